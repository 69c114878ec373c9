#!/usr/bin/env python3
"""awqd_bench --library on a CPU: each case of a row and of libawqd, right and as fast: library_test.py AWQD_BENCH"""
import json
import subprocess
import sys
import unittest

BENCH = sys.argv.pop(1)


def bench(*flags):
    done = subprocess.run([BENCH, "--library", "--hot", "--floors=none", "--shapes=1024x768", *flags], capture_output=True,
                          text=True, check=False)
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done, runs


class LibraryTest(unittest.TestCase):
    def expect_pairs(self, runs):
        for row, library in zip(runs[::2], runs[1::2], strict=True):
            self.assertEqual(library["row"], "libawqd:" + row["row"])
            self.assertEqual(library["error"], row["error"])
            self.assertEqual(library["row_us"], row["us"])
            for key in ("weight", "k", "n", "m", "dtype"):
                self.assertEqual(library[key], row[key])
            # Other programs share the cores; the least of many short calls is near what it is alone.
            self.assertLess(library["us"], 2 * row["us"] + 20)

    def test_products_and_decodes(self):
        done, runs = bench("--m=16", "--rows=qmatmul_a16,dequant")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.expect_pairs(runs)
        self.assertEqual({(run["m"], run["dtype"]) for run in runs}, {(16, "FP16"), (0, "FP16"), (0, "BF16"), (0, "FP32")})

    def test_other_activations_and_weights(self):
        done, runs = bench("--m=8", "--rows=qmatmul_a16,a8_scaled", "--weight=w3g32m5*c", "--batch_invariant")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.expect_pairs(runs)
        self.assertEqual(len(runs), 4, runs)
        self.assertTrue(all(run["batch_invariant"] for run in runs))

    def test_experts(self):
        done, runs = bench("--m=5", "--experts=4x2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([run["kernel"] for run in runs][1:], ["libawqd"])
        self.assertLess(runs[1]["error"], 4e-3)

    def test_says_which_weights_it_cannot_make(self):
        done, _ = bench("--m=1", "--weight=e4m3c+fp32")
        self.assertEqual(done.returncode, 1)
        self.assertIn("--library: got weights e4m3c+fp32, expected integer codes", done.stderr)


if __name__ == "__main__":
    unittest.main()
