"""The package as a thing: its types, the versions of protobuf that it runs with, and what its README promises."""
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import awqd
from conftest import ROOT

VERSIONS = sorted(path.name for path in (pathlib.Path(sys.prefix) / "protobuf").iterdir())
PACKAGE = ROOT / "client" / "python"
CALL = """
import google.protobuf, numpy as np, awqd, sys
from google.protobuf.internal import api_implementation
assert google.protobuf.__version__ == sys.argv[1], google.protobuf.__version__
with awqd.Client(sys.argv[2]) as client:
    weight = awqd.packed_weight("plain", {"codes": np.full((2, 1), 130, np.uint8), "scales": np.ones((1, 1), np.float32)},
                                {"bits": 8, "symmetric": True})
    y = client.matmul(None, weight, np.ones((1, 2), np.float32), activation_function="relu", path="auto")
    assert y.tolist() == [[4.0]], y
    assert len(client.get_model("moe").weights) > 3
    try:
        client.matmul("moe", "absent", np.ones(1, np.float32))
    except awqd.NotFound:
        print(awqd.Execution(kernel="k").kernel, awqd.v1.tensor_pb2.DType.Name(1))
"""
# Code of a user with strict types, and lines (E) that a type checker must refuse.
TYPED = """
import numpy as np
import awqd


def f(client: awqd.Client, x: "np.ndarray[tuple[int, int], np.dtype[np.float16]]") -> str:
    y = client.matmul("m", "w", x, path="fused", timeout=1.5)
    for y in client.matmul_stream("m", "w", [x, y], in_flight=2):
        y.sum()
    with client.register(x), client.register(y, early_answers=True) as region:
        client.matmul("m", "w", x, out=y)
    return region.name + str(y.shape) + client.list_models()[0].name


async def g(client: awqd.AsyncClient) -> int:
    return (await client.get_model("m")).weights[0].k


def wrong(client: awqd.Client) -> None:
    client.get_model(1)  # E
    client.matmul("m", "w", np.ones(1), pth="fused")  # E
    client.matmul("m", "w", np.ones(1), path="quick")  # E
    client.matmul_stream("m", "w", np.ones(1), in_flight="2")  # E
    client.get_model("m").weight  # E
    client.register(np.ones(1), early_answers="yes")  # E
"""


def test_four_versions_of_protobuf_are_here():
    assert [version.split(".")[0] for version in VERSIONS] == ["4", "5", "6", "7"]


@pytest.mark.parametrize("version", VERSIONS)
def test_version_of_protobuf(server, version):
    environment = {**os.environ, "PYTHONPATH": f"{sys.prefix}/protobuf/{version}"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", CALL, version, server.address], env=environment,
                          capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "k FP16\n"), done.stderr


def test_types_are_strict_inside_and_useful_outside(tmp_path):
    installed = pathlib.Path(awqd.__file__).parent
    assert installed.is_relative_to(sys.prefix)
    shutil.copytree(installed, tmp_path / "src" / "awqd")
    shutil.copy(PACKAGE / "pyproject.toml", tmp_path)
    (tmp_path / "user.py").write_text(TYPED)
    mypy = [sys.executable, "-m", "mypy", "--cache-dir", f"{sys.prefix}/mypy-cache", "src/awqd", "user.py"]
    done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = re.findall(r"^(.*?):(\d+): error", done.stdout, re.MULTILINE)
    wanted = [("user.py", str(number)) for number, line in enumerate(TYPED.splitlines(), 1) if line.endswith("# E")]
    assert found == wanted, done.stdout + done.stderr


# What calls take and give, one a line.
SURFACE = """
import awqd, numpy as np, torch
from numpy.typing import NDArray
def f(c: awqd.Client, a: awqd.AsyncClient, x: "NDArray[np.float16]", t: torch.Tensor) -> None:
    reveal_type(c.matmul("m", "w", t))
    reveal_type(c.matmul("m", "w", x))
    reveal_type(c.mlp("m", "w", x, expert_ids=[[1, 2]], router_weights=[[0.5, 0.5]]))
    reveal_type(c.chain([awqd.Step("matmul", "m", "w")], t))
    reveal_type(c.dequantize("m", "w"))
    reveal_type(c.quantize_kv(x))
    reveal_type(c.quantize_kv(t).codes)
    reveal_type(list(c.quantize_kv(x)))
    reveal_type(c.dequantize_kv(x, x, x))
    reveal_type(list(c.matmul_stream("m", "w", [t])))
    reveal_type(c.list_models())
    reveal_type(c.list_models()[0].state)
    reveal_type(c.get_model("m"))
    reveal_type(c.get_model("m").weights[0])
    reveal_type(c.get_model("m").weights[0].k)
    reveal_type([p.kernel for p in c.get_model("m").weights[0].plan])
    reveal_type(c.load_model("m").unserved[0].reason)
    reveal_type(c.server_info().limits.shared_memory_prefix)
    reveal_type([d.healthy for d in c.server_info().devices])
    reveal_type(c.is_serving())
    reveal_type(awqd.Execution().kernel)
    reveal_type(awqd.packed_weight("plain", {"codes": x}, {"bits": 8}))
    reveal_type(c.address)
    reveal_type(awqd.Error("a").hint)
    reveal_type(c.matmul)
    reveal_type(c.grouped_matmul)
    reveal_type(c.dequantize)
    reveal_type(a.quantize_kv)
    reveal_type(c.matmul_stream)
    reveal_type(awqd.Client)
"""


def test_nothing_that_calls_take_or_give_is_any(tmp_path):
    """With a stub of PyTorch, which need not be installed."""
    (tmp_path / "torch.pyi").write_text("class dtype: ...\nclass Tensor:\n    dtype: dtype\n    shape: tuple[int, ...]\n")
    (tmp_path / "user.py").write_text(SURFACE)
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", f"{sys.prefix}/mypy-cache-surface", "user.py"],
                          cwd=tmp_path, capture_output=True, text=True, check=False)
    revealed = dict(re.findall(r"^user.py:(\d+): note: Revealed type is \"(.*)\"$", done.stdout, re.MULTILINE))
    assert "error" not in done.stdout and len(revealed) == SURFACE.count("reveal_type"), done.stdout
    lines = SURFACE.splitlines()
    for number, text in revealed.items():
        # Arrays of any shape and dtype are NumPy's own idiom, and coroutines take nothing.
        rest = text.replace("tuple[Any, ...]", "shape").replace("numpy.dtype[Any]", "dtype").replace("Coroutine[Any, Any,", "")
        assert "Any" not in rest, (lines[int(number) - 1], text)


def test_both_clients_have_every_call_with_its_text():
    calls = [name for name, value in vars(awqd.Client).items() if not name.startswith("_") and callable(value) and name != "close"]
    assert len(calls) == 15
    for name in calls:
        method = getattr(awqd.Client, name)
        assert method.__doc__ and name == method.__name__
        assert "Steps" not in str(inspect.signature(method))
        awaited = getattr(awqd.AsyncClient, name)
        assert inspect.iscoroutinefunction(awaited) or inspect.isasyncgenfunction(awaited)
        for parameter in inspect.signature(method).parameters.values():
            assert parameter.name in ("self",) or parameter.annotation is not inspect.Parameter.empty


def test_every_python_block_of_the_readme_runs(server):
    blocks = re.findall(r"^```python\n(.*?)^```", (PACKAGE / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    names = {}
    for block in blocks:
        exec(compile(block.replace("127.0.0.1:8001", server.address), "README.md", "exec"), names)
    names["client"].close()
