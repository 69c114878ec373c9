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


def known_metrics():
    """Names as the server's source spells them, with what Prometheus appends to those of histograms."""
    source = (ROOT / "server/obs/exposition.cc").read_text()
    names = set()
    for kind, name in re.findall(r'(Counter|Gauge|Histograms)\(\s*"([a-z_]+)"', source):
        names |= {name + end for end in ("_bucket", "_sum", "_count")} if kind == "Histograms" else {name}
    return names


def dashboard_expressions():
    dashboard = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def rule_expressions():
    return re.findall(r"^\s+expr: (.+)$", RULES.read_text(), re.MULTILINE)


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


if __name__ == "__main__":
    sys.exit(unittest.main())
