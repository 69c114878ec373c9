#!/usr/bin/env python3
"""The dashboard and the alert rules ask for metrics that the server has, in expressions that Prometheus takes."""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yml"
DASHBOARD = ROOT / "deploy/grafana/awqd.json"
METRIC = re.compile(r"\b((?:awqd|grpc_server|process)_[a-z_]+)\b")


# Scraped every 5 s from a server with a peak of 280 requests a second and deadlines of 200 ms: 40 s of 100 requests a
# second, 60 s of 900, and a rest.
OVERLOAD = {
    'awqd_refused_requests_total{reason="deadline"}':
        "0 0 13 17 17 17 35 59 68 3623 7016 9875 13391 16695 20202 22423 25731 28951 32224 35527 37744 37744 37744 37744 37744",
    'awqd_refused_requests_total{reason="deadline_in_queue"}':
        "0 0 3 3 3 3 22 50 50 114 158 222 273 359 400 475 550 585 679 828 900 900 900 900 900",
    'awqd_model_outcomes_total{model="bench",outcome="in_time"}':
        "0 454 992 1498 1956 2475 2942 3424 3963 4365 4907 5446 6104 6924 7836 8296 8950 10181 11125 11555 11862 11862 11862 11862 11862",
    'awqd_model_outcomes_total{model="bench",outcome="lost"}':
        "0 0 5 7 7 7 15 20 21 44 118 207 227 261 289 378 405 418 439 454 470 470 470 470 470",
    'awqd_model_outcomes_total{model="bench",outcome="not_computed"}':
        "0 0 15 19 19 19 56 108 114 3561 7014 9964 13539 16858 20345 22631 25992 29196 32341 35790 38041 38041 38041 38041 38041",
}


def known_metrics():
    """Names as the server's source spells them, with what Prometheus appends to those of histograms."""
    source = (ROOT / "server/obs/exposition.cc").read_text()
    names = set()
    for kind, name in re.findall(r'(Counter|Gauge|Histograms)\(\s*"([a-z_]+)"', source):
        names |= {name + end for end in ("_bucket", "_sum", "_count")} if kind == "Histograms" else {name}
    # Some gauges of the process stand in a table.
    names |= set(re.findall(r'\{"(process_[a-z_]+)", "', source))
    return names


def dashboard_expressions():
    dashboard = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def rule_expressions():
    return re.findall(r"^\s+expr: (.+)$", RULES.read_text(), re.MULTILINE)


def firing(series, at, interval="30s"):
    """The alerts that fire at the time `at`, as promtool runs the rules. Series: "name{labels} value", which stand still, or
    a dictionary of "name{labels}" to their values every `interval`."""
    # A test that expects nothing fails where the alert fires.
    alerts = sorted(set(re.findall(r"- alert: (\w+)", RULES.read_text())))
    if not isinstance(series, dict):
        series = {line.rsplit(" ", 1)[0]: f"{line.rsplit(' ', 1)[1]}x60" for line in series}
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "test.yml"
        for alert in alerts:
            file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": interval, "tests": [
                {"interval": interval, "input_series": inputs,
                 "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": []}]}]}))
            done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
            if done.returncode != 0:
                assert alert in done.stdout + done.stderr, done.stdout + done.stderr
                found.append(alert)
    return found


class Monitoring(unittest.TestCase):

    def test_metrics_are_those_of_the_server(self):
        known = known_metrics()
        self.assertGreater(len(known), 40)
        for expressions in (dashboard_expressions(), rule_expressions()):
            self.assertGreater(len(expressions), 8)
            for expression in expressions:
                # Labels and their values are not names of metrics.
                bare = re.sub(r"\{[^}]*\}|by \([^)]*\)|on \([^)]*\)", "", expression)
                names = METRIC.findall(bare)
                self.assertTrue(names or "up" in bare, expression)
                for name in names:
                    self.assertIn(name, known, expression)

    @unittest.skipUnless(shutil.which("promtool"), "no promtool")
    def test_promtool_takes_rules_and_expressions(self):
        # Grafana replaces these variables.
        expressions = [expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
                       for expression in dashboard_expressions()]
        with tempfile.TemporaryDirectory() as folder:
            panels = pathlib.Path(folder) / "panels.yml"
            panels.write_text(json.dumps({"groups": [{"name": "panels", "rules": [
                {"record": f"panel:{i}", "expr": expression} for i, expression in enumerate(expressions)]}]}))
            for file in (RULES, panels):
                done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    @unittest.skipUnless(shutil.which("promtool"), "no promtool")
    def test_a_certificate_that_expires_fires_its_alert(self):
        day, labels = 86400, {"instance": "a:1", "job": "awqd"}
        series = 'awqd_tls_certificate_expiry_timestamp_seconds{instance="a:1",job="awqd"}'
        alert = {"exp_labels": {**labels, "severity": "warning"}, "exp_annotations": {
            "summary": "The TLS certificate of a:1 expires in 13d 23h 50m 0s; renew its files, which the server reads again"}}
        with tempfile.TemporaryDirectory() as folder:
            tests = pathlib.Path(folder) / "tests.yml"
            tests.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [
                {"interval": "1m", "input_series": [{"series": series, "values": f"{days * day}x60"}],
                 "alert_rule_test": [{"eval_time": "10m", "alertname": "AwqdCertificateExpires", "exp_alerts": alerts}]}
                for days, alerts in ((20, []), (14, [alert]))]}))
            done = subprocess.run(["promtool", "test", "rules", tests], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    @unittest.skipUnless(shutil.which("promtool"), "no promtool")
    def test_an_overload_fires_within_a_minute(self):
        self.assertEqual(firing(OVERLOAD, "40s", "5s"), [])
        self.assertEqual(firing(OVERLOAD, "60s", "5s"), ["AwqdRefuses"])

    @unittest.skipUnless(shutil.which("promtool"), "no promtool")
    def test_a_model_that_failed_at_start_fires(self):
        """No counter rises then while Prometheus looks on."""
        failed = ['awqd_models{state="failed"} 1', 'awqd_models{state="ready"} 3', "awqd_ready 0",
                  'awqd_model_load_duration_seconds_count{outcome="failed"} 1']
        sound = ['awqd_models{state="failed"} 0', "awqd_ready 1"]
        for series, at, expected in ((failed, "2m", ["AwqdModelFailed"]), (failed, "16m", ["AwqdModelFailed", "AwqdNotReady"]),
                                     (sound, "16m", [])):
            self.assertEqual(firing(series, at), expected, series)


if __name__ == "__main__":
    sys.exit(unittest.main())
