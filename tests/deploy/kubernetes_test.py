"""The Helm chart, the manifests rendered from it and KServe's resources, checked without a cluster.

Helm is its own library; the manifests are held against the schemas of Kubernetes and against one another.
"""
import os
import pathlib
import re
import subprocess
import sys
import unittest

import helm_python
import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
KSERVE = ROOT / "deploy" / "kserve"
AWQD = pathlib.Path(os.environ["AWQD_BUILD"]) / "bin" / "awqd"
VERSIONS = ["1.29", "1.31", "1.34", "1.37"]
CUSTOM = {"ServiceMonitor"}  # not of Kubernetes itself
# Flags of builds with TLS and metrics.
OTHER_BUILDS = set()

sys.path.insert(0, str(KUBERNETES))
from render import examples, render  # noqa: E402


def documents(text):
    return [document for document in yaml.safe_load_all(text) if document]


def within(labels, selector):
    return selector.items() <= labels.items()


class Chart(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.rendered = {name: documents(render(values)) for name, values in examples().items()}
        cls.rendered["defaults"] = documents(render({}))

    def one(self, name, kind):
        found = [document for document in self.rendered[name] if document["kind"] == kind]
        self.assertEqual(len(found), 1, f"{name}: {kind}")
        return found[0]

    def container(self, name):
        return self.one(name, "Deployment")["spec"]["template"]["spec"]["containers"][0]

    def test_lint(self):
        result = helm_python.lint(str(KUBERNETES / "awqd"))
        self.assertEqual(result["errors"], [])
        self.assertEqual([m["error"] for m in result["messages"] if m["severity"] > 1], [])

    def test_plain_manifests_are_what_the_chart_renders(self):
        self.assertEqual({path.stem for path in (KUBERNETES / "manifests").iterdir()}, set(examples()))
        for name, values in examples().items():
            text = (KUBERNETES / "manifests" / f"{name}.yaml").read_text()
            self.assertEqual(text.split("\n", 1)[1], render(values), f"{name}: run deploy/kubernetes/render.py")

    def test_schemas_of_kubernetes(self):
        checked = 0
        for version in VERSIONS:
            for name, found in self.rendered.items():
                for document in found:
                    if document["kind"] not in CUSTOM:
                        with self.subTest(version=version, example=name, kind=document["kind"]):
                            kubernetes_validate.validate(document, version, strict=True)
                            checked += 1
        self.assertGreater(checked, 60)
        broken = {**self.one("cpu", "Deployment"), "spec": {"replica": 2}}
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(broken, VERSIONS[0], strict=True)

    def test_selectors_find_the_pods(self):
        for name, found in self.rendered.items():
            pods = self.one(name, "Deployment")["spec"]["template"]["metadata"]["labels"]
            services = [document for document in found if document["kind"] == "Service"]
            self.assertEqual([service["spec"].get("clusterIP") for service in services], [None, "None"])
            selectors = [service["spec"]["selector"] for service in services]
            selectors.append(self.one(name, "Deployment")["spec"]["selector"]["matchLabels"])
            selectors.append(self.one(name, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"])
            selectors.append(self.one(name, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"])
            for selector in selectors:
                self.assertTrue(selector and within(pods, selector), selector)
            ports = {port["name"] for port in self.container(name)["ports"]}
            self.assertLessEqual({port["targetPort"] for service in services for port in service["spec"]["ports"]}, ports)
            opened = {port["port"] for rule in self.one(name, "NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]}
            self.assertEqual(opened, ports)
        monitor = self.one("gpu", "ServiceMonitor")["spec"]["selector"]["matchLabels"]
        scraped = [d["metadata"]["name"] for d in self.rendered["gpu"] if d["kind"] == "Service" and within(d["metadata"]["labels"], monitor)]
        self.assertEqual(scraped, ["awqd-pods"])

    def test_names_that_refer_to_one_another(self):
        for name in self.rendered:
            deployment = self.one(name, "Deployment")
            spec = deployment["spec"]["template"]["spec"]
            self.assertEqual(spec["serviceAccountName"], self.one(name, "ServiceAccount")["metadata"]["name"])
            volumes = {volume["name"] for volume in spec["volumes"] or []}
            mounts = {mount["name"] for c in [*spec["containers"], *spec.get("initContainers", [])] for mount in c["volumeMounts"] or []}
            self.assertEqual(mounts, volumes)
        scaler = self.one("gpu", "HorizontalPodAutoscaler")["spec"]
        self.assertEqual(scaler["scaleTargetRef"]["name"], self.one("gpu", "Deployment")["metadata"]["name"])
        self.assertNotIn("replicas", self.one("gpu", "Deployment")["spec"])
        rule = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"][0]
        self.assertEqual(scaler["metrics"][0]["pods"]["metric"]["name"], rule["name"]["as"])
        claim = self.one("hub", "PersistentVolumeClaim")["metadata"]["name"]
        volume = next(v for v in self.one("hub", "Deployment")["spec"]["template"]["spec"]["volumes"] if v["name"] == "models")
        self.assertEqual(volume["persistentVolumeClaim"]["claimName"], claim)

    def test_flags_are_the_servers(self):
        known = set(re.findall(r"--([a-z_]+)", subprocess.run([AWQD, "--help=all"], capture_output=True, text=True, check=True).stdout))
        self.assertIn("model_repository", known)
        runtime = yaml.safe_load((KSERVE / "servingruntime.yaml").read_text())["spec"]["containers"][0]
        for container in [*map(self.container, self.rendered), runtime]:
            flags = {re.match(r"--([a-z_]+)", argument).group(1) for argument in container["args"]}
            self.assertEqual(flags - known - OTHER_BUILDS, set())

    def test_pods_are_confined_and_stop_in_time(self):
        for name in self.rendered:
            spec = self.one(name, "Deployment")["spec"]["template"]["spec"]
            self.assertTrue(spec["securityContext"]["runAsNonRoot"])
            self.assertFalse(spec["automountServiceAccountToken"])
            for container in [*spec["containers"], *spec.get("initContainers", [])]:
                context = container["securityContext"]
                self.assertTrue(context["readOnlyRootFilesystem"])
                self.assertFalse(context["allowPrivilegeEscalation"])
                self.assertEqual(context["capabilities"], {"drop": ["ALL"]})
                self.assertIn("memory", container["resources"]["limits"])
            leave = int(self.container(name)["lifecycle"]["preStop"]["exec"]["command"][1])
            drain = next(int(a.split("=")[1]) for a in self.container(name)["args"] if a.startswith("--drain_timeout_s="))
            self.assertGreaterEqual(spec["terminationGracePeriodSeconds"], leave + drain + 5)
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                found = self.container(name)[probe]
                # The kubelet cannot speak TLS to gRPC.
                tls = any(a.startswith("--tls_cert") for a in self.container(name)["args"])
                self.assertEqual("exec" in found, tls)
                self.assertEqual("grpc" in found, not tls)

    def test_clusters_that_choose_users_and_runtimes(self):
        values = {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}, "runtimeClassName": "nvidia",
                  "securityContext": {"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}},
                  "imagePullSecrets": [{"name": "registry"}], "deploymentAnnotations": {"a": "1"}, "podAnnotations": {"b": "2"},
                  "serviceAccountAnnotations": {"c": "3"}, "service": {"annotations": {"d": "4"}}}
        found = documents(render(values))
        for document in found:
            if document["kind"] not in CUSTOM:
                kubernetes_validate.validate(document, VERSIONS[0], strict=True)
        deployment, account = (next(d for d in found if d["kind"] == kind) for kind in ("Deployment", "ServiceAccount"))
        service = next(d for d in found if d["kind"] == "Service")
        pod = deployment["spec"]["template"]
        self.assertEqual(set(pod["spec"]["securityContext"]), {"runAsNonRoot", "fsGroupChangePolicy", "seccompProfile"})
        context = pod["spec"]["containers"][0]["securityContext"]
        self.assertEqual(context["capabilities"], {"drop": ["ALL"], "add": ["IPC_LOCK"]})
        self.assertTrue(context["readOnlyRootFilesystem"])
        self.assertEqual(pod["spec"]["runtimeClassName"], "nvidia")
        self.assertEqual(pod["spec"]["imagePullSecrets"], [{"name": "registry"}])
        annotations = [d["metadata"]["annotations"] for d in (deployment, pod, account, service)]
        self.assertEqual(annotations, [{"a": "1"}, {"b": "2"}, {"c": "3"}, {"d": "4"}])
        for name in self.rendered:  # nothing of it by default
            pod = self.one(name, "Deployment")["spec"]["template"]["spec"]
            self.assertEqual(pod["securityContext"]["runAsUser"], 65532)
            self.assertNotIn("runtimeClassName", pod)

    def test_gpus(self):
        self.assertEqual(self.container("gpu")["resources"]["limits"]["nvidia.com/gpu"], 1)
        self.assertNotIn("nvidia.com/gpu", self.container("cpu")["resources"]["limits"])
        self.assertIn("--device=cpu", self.container("cpu")["args"])
        two = documents(render({"gpus": 2}))
        deployment = next(d for d in two if d["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"][0]
        self.assertIn("--device=cuda:0,cuda:1", deployment["args"])
        self.assertEqual(deployment["resources"]["limits"]["nvidia.com/gpu"], 2)

    def test_values_that_cannot_be(self):
        cases = {
            "tokensSecret": {"tokensSecret": "t"},
            "clientCertificates": {"tls": {"clientCertificates": True}},
            "models.hub.repositories": {"models": {"source": "hub"}},
            "models.claim": {"models": {"source": "pvc", "claim": ""}},
            "maxReplicas": {"autoscaling": {"minReplicas": 9}},
            "metrics.enabled": {"autoscaling": {"enabled": True}, "metrics": {"enabled": False}},
            "replica": {"replica": 2},
            "gpus": {"gpus": -1},
            "source": {"models": {"source": "s3"}},
            "extraArgs": {"extraArgs": ["lanes=2"]},
        }
        for words, values in cases.items():
            with self.subTest(words), self.assertRaisesRegex(helm_python.HelmError, words):
                with helm_python.Chart.load(str(KUBERNETES / "awqd")) as chart:
                    chart.validate_schema(values)
                render(values)


class KServe(unittest.TestCase):

    def test_runtime_and_service_fit(self):
        runtime = yaml.safe_load((KSERVE / "servingruntime.yaml").read_text())
        service = yaml.safe_load((KSERVE / "inferenceservice.yaml").read_text())
        model = service["spec"]["predictor"]["model"]
        self.assertEqual(model["runtime"], runtime["metadata"]["name"])
        self.assertIn(model["protocolVersion"], runtime["spec"]["protocolVersions"])
        formats = [(f["name"], f["version"]) for f in runtime["spec"]["supportedModelFormats"]]
        self.assertIn((model["modelFormat"]["name"], model["modelFormat"]["version"]), formats)

    def test_pod_of_the_runtime(self):
        spec = yaml.safe_load((KSERVE / "servingruntime.yaml").read_text())["spec"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "awqd"},
               "spec": {"containers": spec["containers"], "volumes": spec["volumes"]}}
        for version in VERSIONS:
            kubernetes_validate.validate(pod, version, strict=True)


if __name__ == "__main__":
    unittest.main()
