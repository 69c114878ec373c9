"""tests/bench/generate.py, tiny and on the CPU: every way generates, and those of awqd give the same bits."""
import json
import math
import os
import pathlib
import subprocess
import sys
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from conftest import ROOT  # noqa: E402

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import generate  # noqa: E402

BIN = pathlib.Path(os.environ["AWQD_BUILD"]) / "bin"


@pytest.mark.parametrize("model", ("llama", "qwen3-moe"))
def test_ways_of_generation(model, tmp_path):
    lines, picture = tmp_path / "rows.jsonl", tmp_path / "bars.svg"
    done = subprocess.run(
        [sys.executable, ROOT / "tests/bench/generate.py", "--bin", BIN, "--model", model, "--tiny", "--device", "cpu",
         "--batches", "1", "8", "--tokens", "4", "--processes", "2", "--out", lines, "--svg", picture],
        capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert "humming: not here" in done.stderr
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    ways = {(row["way"], row["batch"]): row for row in rows if "process" not in row}
    assert set(ways) == {(way, batch) for way in ("torch", "rpc", "ring", "lease") for batch in (1, 8)}
    processes = [row for row in rows if "process" in row]
    assert [(row["way"], row["batch"], row["process"]) for row in processes] == [("lease", 1, 1), ("lease", 1, 2)]
    for row in rows:
        if row["way"] != "torch":
            for step in ("first_sha256", "last_sha256"):
                assert row[step] == ways["lease", row["batch"]][step], (row["way"], step)
            assert row["first_sha256"] != ways["torch", row["batch"]]["first_sha256"], "torch rounds otherwise"
            assert row["difference"] > 0
            if model == "llama":  # a router may choose another expert where two are nearly equal
                # Hidden states near 1 pass some ten roundings to 11 bits, and a head that adds 256 of them times 0.02.
                assert row["difference"] < 10 * 2**-11 * 256**0.5 * 0.02 * 4
        assert 0 <= row["same"] <= 1
    assert all(math.isfinite(row["beyond_mib"]) for row in processes)
    tables = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(tables) == len(rows) + 2
    for line in tables:
        if line[0] not in ("way", "process"):
            assert line.pop(2) == "no", "a CPU has no CUDA graphs"
            for cell in line[1:]:
                assert math.isfinite(float(cell)), line
            assert all(float(cell) > 0 for cell in line[2:5]), line
    assert len(ElementTree.fromstring(picture.read_text()).findall("{http://www.w3.org/2000/svg}rect")) == len(ways) + 1


def test_other_bits_end_it():
    row = {"way": "rpc", "batch": 1, "first_sha256": "a", "last_sha256": "b"}
    generate.compare(row, [{**row, "way": "ring"}, {**row, "way": "lease", "batch": 8, "last_sha256": "c"}])
    with pytest.raises(SystemExit, match="batch 1: logits of the last step: rpc has other bits than lease"):
        generate.compare(row, [{**row, "way": "lease", "last_sha256": "c"}])
