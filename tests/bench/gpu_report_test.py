#!/usr/bin/env python3
"""gpu_report.py with made-up measurements."""
import json
import pathlib
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import gpu_report  # noqa: E402


def product(m, us, cublaslt_us, **more):
    return {"row": "sm90a/qmatmul_a16", "k": 4096, "n": 6144, "m": m, "us": us, "stream_us": 5.0,
            "cublaslt_us": cublaslt_us, **more}


def report(runs):
    """The tables of these runs, and what load() made of them."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(run) + "\n" for run in runs)
        file.flush()
        products, dequantize = gpu_report.load(file.name)
    return "\n".join(body for _, body in gpu_report.tables(products, dequantize).values()), products


class GpuReportTest(unittest.TestCase):
    def test_ratios_are_to_the_floor_and_to_cublaslt_of_the_run(self):
        text, _ = report([product(1, 6.0, 24.0)])
        self.assertIn("| 4096 x 6144 | 6.0 (1.20) |", text)
        self.assertIn("| 4096 x 6144 | 6.0 (0.25) |", text)

    def test_the_floor_is_arithmetic_where_that_is_more(self):
        us = 2 * 128 * 4096 * 6144 / 750e6 * 1.5
        self.assertIn("(1.50)", report([product(128, us, 100.0)])[0])

    def test_names_counts_that_a_larger_one_beats(self):
        text, _ = report([product(96, 30.0, 99.0), product(160, 60.0, 99.0), product(192, 50.0, 99.0),
                          product(256, 48.0, 99.0)])
        self.assertIn("| 4096 x 6144 | 4 | 160 (1.25 x 256) | none |", text)

    def test_names_counts_where_cublaslt_is_faster(self):
        text, _ = report([product(1, 12.0, 48.0), product(256, 50.0, 49.0)])
        self.assertIn("| 4096 x 6144 | 2 | none | 256 (1.02) |", text)

    def test_many_counts_have_a_row_each(self):
        counts = range(1, gpu_report.WIDE + 2)
        text, _ = report([product(m, 10.0 + m, 99.0) for m in counts])
        for m in counts:
            self.assertIn(f"| {m} | {10 + m:.1f} |", text)

    def test_batch_invariant_stands_beside_the_default(self):
        text, products = report([product(32, 20.0, 99.0), product(32, 22.0, 99.0, batch_invariant=True)])
        self.assertIn("22.0 (1.10)", text)
        self.assertEqual(products[4096, 6144][32]["fused"], 20.0)

    def test_libawqd_stands_beside_the_row_of_its_turns(self):
        runs = [product(16, 8.0, 24.0)]
        for row, m, us in (("sm90a/qmatmul_a16", 16, 8.2), ("dense/cublaslt", 16, 30.0), ("sm90a/dequantize", 0, 7.0)):
            runs.append({"row": "libawqd:" + row, "k": 4096, "n": 6144, "m": m, "dtype": "FP16", "us": us, "row_us": 8.0})
        text, products = report(runs)
        self.assertIn("| K x N | M=16 |\n|---|---|\n| 4096 x 6144 | 8.2 (1.02) |", text)
        self.assertEqual(products[4096, 6144][16]["fused"], 8.0)
        self.assertNotIn("dense", products[4096, 6144][16])

    def test_several_schemes_have_one_table(self):
        runs = [product(m, us, 10.0, weight=weight) for weight, m, us in
                (("w4g128z", 1, 5.0), ("w4g128z", 64, 8.0), ("e4m3c+fp32", 1, 12.0))]
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(json.dumps(run) + "\n" for run in runs)
            file.flush()
            ratios = gpu_report.load_schemes(file.name)
        text = gpu_report.scheme_tables(ratios)["schemes"][1]
        self.assertIn("| `w4g128z` | 0.50 | 0.80 |", text)
        self.assertIn("| `e4m3c+fp32` | 1.20 | - |", text)
        drawn = ElementTree.fromstring(gpu_report.schemes_svg(ratios, "H100 <x>"))
        self.assertEqual(len(drawn.findall("{http://www.w3.org/2000/svg}rect")), 4)

    def test_marks_say_where_tables_go(self):
        by_name = {"floor": ("", "| a |\n|---|\n| 1 |\n"), "dense": ("", "| b |\n")}
        text = "before\n<!-- gpu_report: fp16 floor -->\n| old |\n|---|\n\n<!-- gpu_report: bf16 floor -->\n| kept |\n"
        want = text.replace("| old |\n|---|", "| a |\n|---|\n| 1 |")
        self.assertEqual(gpu_report.put_into(text, "fp16", by_name), want)

    def test_a_mark_without_a_table_is_an_error(self):
        by_name = {"floor": ("", "| a |\n")}
        for text, said in (("<!-- gpu_report: fp16 rate -->\n| old |\n", "expected one of floor"),
                           ("<!-- gpu_report: fp16 floor -->\n\n| old |\n", "expected a table on the next line"),
                           ("<!-- gpu_report: bf16 floor -->\n| old |\n", "got no mark")):
            with self.assertRaisesRegex(ValueError, said):
                gpu_report.put_into(text, "fp16", by_name)

    def test_the_plot_is_a_picture_with_a_line_for_each_series(self):
        _, products = report([product(1, 12.0, 48.0), product(48, 20.0, 48.0), product(64, 25.0, 50.0)])
        picture = ElementTree.fromstring(gpu_report.svg(products, "a GPU <&>"))
        space = "{http://www.w3.org/2000/svg}"
        lines = [line.get("stroke") for line in picture.iter(space + "polyline")]
        self.assertEqual(len(lines), len(set(lines)))
        self.assertGreaterEqual(len(lines), 3)  # fused, cuBLASLt, reading the weights
        labels = {text.text for text in picture.iter(space + "text")}
        self.assertLessEqual({"1", "64"}, labels)
        self.assertNotIn("48", labels)

    def test_labels_of_the_tokens_keep_apart(self):
        counts = [2**i for i in range(13)]
        _, products = report([product(m, 12.0 + m, 48.0 + m) for m in counts])
        picture = ElementTree.fromstring(gpu_report.svg(products, "a GPU"))
        labels = [text for text in picture.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "c"]
        self.assertEqual([label.text for label in labels], ["1", "4", "16", "64", "256", "1024", "4096"])
        ends = [(float(label.get("x")) - 3.5 * len(label.text), float(label.get("x")) + 3.5 * len(label.text))
                for label in labels]
        for (_, end), (begin, _) in zip(ends, ends[1:]):
            self.assertGreaterEqual(begin - end, 8)


if __name__ == "__main__":
    unittest.main()
