"""The notebook, run on a dense checkpoint made here and what awqctl quantises it to; its figures against awqctl's own."""
import os
import re
import subprocess

import ml_dtypes
import nbclient
import nbformat
import numpy as np
import pytest
from safetensors.numpy import save_file

from conftest import ROOT
from server import BIN, Server, awqctl

NOTEBOOK = ROOT / "client" / "python" / "notebooks" / "quantisation_error.ipynb"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["fp16", "bf16"])
def test_notebook(tmp_path, monkeypatch, dtype):
    random = np.random.default_rng(3)
    dense = tmp_path / "dense"
    dense.mkdir()
    tensors = {f"layers.{layer}.{name}.weight": random.normal(0, 0.02, (192, 256)).astype(dtype)
               for layer in range(2) for name in ("up", "down")}
    tensors["layers.1.up.weight"][:, ::64] *= 8  # an outlier in each group
    save_file(tensors, dense / "model.safetensors")
    (dense / "config.json").write_text('{"model_type": "test"}')
    awqctl("quantize", dense, "-o", tmp_path / "q4", "--group_size", 64)
    # Its exit status says that they differ.
    differences = subprocess.run([BIN / "awqctl", "--json", "diff", tmp_path / "q4", dense], capture_output=True, text=True,
                                 check=False)
    told = [float(value) for value in re.findall(r'"relative_error": *([0-9.e-]+)', differences.stdout)]
    assert len(told) >= 4, differences.stdout + differences.stderr

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "clear its outputs"
    with Server(f"--model=q4={tmp_path / 'q4'}") as server:
        for name, value in (("ADDRESS", server.address), ("MODEL", "q4"), ("DENSE", str(dense))):
            monkeypatch.setenv(f"AWQCTL_{name}", value)
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        nbclient.NotebookClient(notebook, timeout=120, startup_timeout=240, kernel_name="python3",  # slow beside compilers
                                resources={"metadata": {"path": str(tmp_path)}}).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert "worst: layers.1.up" in text and os.environ["AWQCTL_MODEL"] in text
    low, high = map(float, re.search(r"from ([0-9.]+) to ([0-9.]+)", text).groups())
    # For normal numbers in groups of 64 with 16 codes, the step is about a third of the deviation; outliers make it
    # coarser.
    assert 0.05 < low < 0.12 < high < 0.5
    products = [float(value) for value in re.findall(r"activations: ([0-9.]+)", text)]
    assert len(products) == 3 and all(abs(value - high) < 0.1 for value in products)
    assert abs(max(told) - high) < 1e-3 and abs(min(told) - low) < 1e-3
