"""Triton's perf_analyzer measures products over the inference protocol, with messages and on a stream.

By hand, for a table of its own: tests/interop/perf_table.py.
"""
import pathlib
import tempfile
import unittest

import perf_table
from server import Server

TOKENS = 4


class PerfAnalyzer(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Server())
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))

    def measured(self, *options):
        """Its report for one and two requests at a time, in short windows that need not agree with one another."""
        rows = perf_table.measure(self.server.address, TOKENS, self.folder, "--concurrency-range", "1:2", "-p", "300", "-s", "999",
                                     *options)
        self.assertEqual(sorted(row["Concurrency"] for row in rows), ["1", "2"])
        for row in rows:
            self.assertGreater(float(row["Inferences/Second"]), 10)
            self.assertGreater(float(row["p99 latency"]), float(row["p50 latency"]) / 2)
        return rows

    def test_messages(self):
        self.measured()

    def test_a_stream(self):
        self.measured("--streaming")

    def test_requests_at_a_rate(self):
        rows = perf_table.measure(self.server.address, TOKENS, self.folder, "--request-rate-range", "50:50", "-p", "1000", "-s", "999")
        self.assertAlmostEqual(float(rows[0]["Inferences/Second"]) / TOKENS, 50, delta=15)


if __name__ == "__main__":
    unittest.main()
