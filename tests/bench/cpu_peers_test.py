#!/usr/bin/env python3
"""The report of cpu_peers.py for made-up records."""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import cpu_peers_report as report  # noqa: E402


def record(product, us, error, activations="FP32", m=16, **more):
    return {"by": product.split()[0], "product": product, "k": 4096, "n": 14336, "group": 128, "m": m, "activations": activations,
            "us": us, "error": error, **more}


FP16 = record("awqd FP16", 60.0, 2e-4, "FP16")
INT8 = record("awqd INT8", 30.0, 8e-3, "INT8")
EXACT = record("numpy dense", 600.0, 3e-7)
QUICK = record("onnxruntime fp32", 120.0, 3e-7)
COARSE = record("torch int4", 40.0, 2e-3, "BF16")
FINE_INT8 = record("onnxruntime int8", 20.0, 6e-3, "INT8")
COARSE_INT8 = record("openvino int8", 25.0, 9e-3, "INT8")
PEERS = [EXACT, QUICK, COARSE, FINE_INT8, COARSE_INT8]


class CpuPeersTest(unittest.TestCase):
    def test_a_faster_peer_of_larger_error_does_not_count(self):
        self.assertIs(report.fastest_as_exact(FP16, PEERS), QUICK)
        self.assertIsNone(report.fastest_as_exact(FP16, [COARSE, FINE_INT8]))

    def test_equal_errors_scatter(self):
        near, far = record("torch int4", 40.0, 2.4e-4), record("torch int4", 40.0, 2.6e-4)
        self.assertIs(report.fastest_as_exact(FP16, [near, QUICK]), near)
        self.assertIs(report.fastest_as_exact(FP16, [far, QUICK]), QUICK)

    def test_any_activations_count_where_the_error_is_no_larger(self):
        self.assertIs(report.fastest_as_exact(INT8, PEERS), FINE_INT8)
        self.assertIs(report.fastest_as_exact(INT8, [COARSE, QUICK]), COARSE)

    def test_quantised_peers_are_those_of_no_smaller_error(self):
        self.assertIs(report.fastest_quantised(INT8, PEERS), COARSE_INT8)
        self.assertIsNone(report.fastest_quantised(INT8, [FINE_INT8, COARSE, record("torch int4", 1.0, 9e-3, "BF16")]))

    def test_the_least_time_of_the_rounds_is_taken(self):
        rounds = [record("awqd FP16", us, 2e-4, "FP16", m=1, stream_us=stream) for us, stream in ((60, 50), (55, 52), (70, 49))]
        best = report.merge([*rounds, record("awqd FP16", 10, 2e-4, "FP16", m=4), record("torch int4", 90, 2e-3, m=1)])
        self.assertEqual([(each["product"], each["m"], each["us"]) for each in best],
                         [("awqd FP16", 1, 55), ("awqd FP16", 4, 10), ("torch int4", 1, 90)])
        self.assertEqual(best[0]["stream_us"], 49)
        self.assertEqual(rounds[0]["us"], 60)

    def test_times_stand_beside_errors(self):
        # The peer comes first in the records, and has no product of 64 tokens.
        text = report.times([QUICK, FP16, record("awqd FP16", 200.0, 2e-4, "FP16", m=64)])
        self.assertEqual(text, "| K x N | M | awqd FP16 | onnxruntime fp32 |\n|---|---|---|---|\n"
                               "| 4096 x 14336, w4g128z | 16 | 60 (2.0e-04) | 120 (3.0e-07) |\n"
                               "| 4096 x 14336, w4g128z | 64 | 200 (2.0e-04) | - |\n")

    def test_ratios_name_the_peer(self):
        text = report.ratios([FP16, INT8, *PEERS])
        self.assertIn("| 16 | 0.50 (onnxruntime fp32) | 1.50 (onnxruntime int8) | 1.20 (openvino int8) |", text)

    def test_no_peer_is_said(self):
        self.assertIn("| 16 | none | none |", report.ratios([INT8]))
        self.assertIn("| 16 | none | - |", report.ratios([FP16, COARSE]))

    def test_cases_are_compared_with_themselves_alone(self):
        other = {**QUICK, "group": 32, "us": 1.0}
        rows = report.ratios([FP16, QUICK, {**FP16, "group": 32}, other]).splitlines()[2:]
        self.assertEqual(rows, ["| 4096 x 14336, w4g32z | 16 | 60.00 (onnxruntime fp32) | - |",
                                "| 4096 x 14336, w4g128z | 16 | 0.50 (onnxruntime fp32) | - |"])

    def test_one_token_stands_beside_reading_the_weight(self):
        ours = [record("awqd FP16", 60.0, 2e-4, "FP16", m=1, stream_us=50.0),
                record("awqd INT8", 75.0, 8e-3, "INT8", m=1, stream_us=55.0)]
        self.assertIn("| 4096 x 14336, w4g128z | 50 | 1.20 | 1.50 |", report.streams([*ours, FP16, QUICK]))
        self.assertIsNone(report.streams([FP16, QUICK]))


if __name__ == "__main__":
    unittest.main()
