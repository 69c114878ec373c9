#!/usr/bin/env python3
"""tile_costs.py with made-up measurements."""
import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import tile_costs  # noqa: E402

HEADER = """inline constexpr TileCost kFreeTiles4[] = {
    {{64, 3, 1}, 0.700, 0.800, kEvery}, {{24, 1, 1, 2, 1, 2}, 0.193, 0.227},
};
inline constexpr TileCost kFixedOrderTiles4[] = {
    {{64, 3, 1}, 0.720, 0.820},
};
"""


def run(us, model_us, steps_us, tile="{64, 3, 1}", dtype="FP16", row="sm90a/qmatmul_a16", m=64):
    return {"row": row, "weight": "w4g128z", "tile": tile, "k": 4096, "n": 28672, "m": m, "dtype": dtype, "us": us, "model_us": model_us,
            "model_steps_us": steps_us}


def load(runs):
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(each) + "\n" for each in runs)
        file.flush()
        return tile_costs.load([file.name])


class TileCostsTest(unittest.TestCase):
    def test_a_step_takes_what_is_left_beside_the_rest(self):
        # 5 us around the steps, and steps that take half as long again.
        text = tile_costs.fit(HEADER, load([run(35, 25, 20), run(65, 45, 40, m=65)]))
        self.assertEqual(text, HEADER.replace("{{64, 3, 1}, 0.700, 0.800,", "{{64, 3, 1}, 1.050, 0.800,"))

    def test_types_and_the_order_of_sums_have_steps_of_their_own(self):
        text = tile_costs.fit(HEADER, load([run(25, 45, 40, dtype="BF16", row="sm90a/qmatmul_a16_chained")]))
        self.assertEqual(text, HEADER.replace("{{64, 3, 1}, 0.720, 0.820}", "{{64, 3, 1}, 0.720, 0.410}"))

    def test_what_is_no_choice_counts_for_less(self):
        slow = run(60, 45, 40, m=65)
        alone = tile_costs.factor(load([run(45, 45, 40), slow])["kFreeTiles4", "{64, 3, 1}", "FP16"])
        beaten = load([run(45, 45, 40), slow, run(30, 30, 25, tile="{24, 1, 1, 2, 1, 2}", m=65)])
        self.assertGreater(alone, 1.1)
        self.assertLess(tile_costs.factor(beaten["kFreeTiles4", "{64, 3, 1}", "FP16"]), 1.05)

    def test_every_row_of_the_header_is_read(self):
        header = tile_costs.HEADER.read_text(encoding="utf-8")
        arrays = {match[1]: len(tile_costs.ROW.findall(match[2])) for match in tile_costs.ARRAY.finditer(header)}
        self.assertEqual(sum(arrays.values()), header.count("}, 0.") + header.count("}, 1."))
        self.assertEqual(tile_costs.fit(header, {}), header)
        self.assertEqual(sorted(arrays), ["kExpertTiles", "kExpertTilesE4m3", "kFixedOrderTiles4", "kFreeTiles4", "kFreeTiles8", "kFreeTilesInt8", "kIntegerTilesInt8",
                                           "kTilesE4m3"])


if __name__ == "__main__":
    unittest.main()
