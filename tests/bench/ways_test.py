#!/usr/bin/env python3
"""ways.py with made-up measurements."""
import pathlib
import sys
import unittest
from xml.etree import ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import gpu_report  # noqa: E402
import ways  # noqa: E402

RUNS = [(tokens, way, start + tokens + turn, tokens + 5.0) for turn in (0, 9, 1) for tokens in (1, 16)
        for way, start in (("tcp", 300), ("unix", 200), ("shared", 150), ("device", 130), ("ring", 20), ("ring_device", 15))]


class Ways(unittest.TestCase):
    def test_medians_over_the_rounds(self):
        found = ways.medians(RUNS)
        self.assertEqual(found[1], {"tcp": 302, "unix": 202, "shared": 152, "device": 132, "ring": 22, "ring_device": 17,
                                    "compute": 6})
        self.assertEqual(found[16]["ring"], 37)

    def test_the_table_has_a_row_for_each_count_of_tokens(self):
        lines = ways.table(ways.medians(RUNS)).splitlines()
        self.assertEqual(lines[0], "| tokens | messages, TCP | messages, UNIX socket | tensors in shared memory | "
                                   "tensors on the GPU | ring | ring, tensors on the GPU | on the device |")
        self.assertEqual(lines[2:], ["| 1 | 302.0 | 202.0 | 152.0 | 132.0 | 22.0 | 17.0 | 6.0 |",
                                     "| 16 | 317.0 | 217.0 | 167.0 | 147.0 | 37.0 | 32.0 | 21.0 |"])

    def test_a_cpu_has_no_memory_of_a_gpu(self):
        self.assertEqual(ways.ways_on("cpu"), ["tcp", "unix", "shared", "ring"])
        self.assertEqual(ways.ways_on("cuda:0")[3], "device")

    def test_a_way_that_was_not_measured_is_left_out(self):
        lines = ways.table(ways.medians([run for run in RUNS if run[1] == "ring"])).splitlines()
        self.assertEqual(lines[0], "| tokens | ring | on the device |")
        self.assertEqual([key for key, *_ in ways.measured(ways.medians(RUNS[:1]))], ["tcp", "compute"])

    def test_the_picture_has_a_line_and_a_name_for_each_way(self):
        drawn = ElementTree.fromstring(gpu_report.svg({(64, 32): ways.medians(RUNS)}, "a <machine>", ways.WAYS))
        space = "{http://www.w3.org/2000/svg}"
        self.assertEqual([line.get("stroke") for line in drawn.findall(space + "polyline")],
                         [colour for _, _, colour, _ in ways.WAYS])
        texts = [text.text for text in drawn.findall(space + "text")]
        for _, label, _, _ in ways.WAYS:
            self.assertIn(label, texts)


if __name__ == "__main__":
    unittest.main()
