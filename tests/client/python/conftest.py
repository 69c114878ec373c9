"""Shared by the tests: a server of the demo checkpoints, and a client of it."""
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "interop"), str(ROOT / "tests" / "data")]

import awqd  # noqa: E402
from server import Server  # noqa: E402


@pytest.fixture(scope="session")
def server():
    experts = ROOT / "tests/data/experts"
    with Server(f"--model=moe={experts / 'moe'}", f"--model=blocks={experts / 'blocks'}") as running:
        yield running


@pytest.fixture
def client(server):
    with awqd.Client(server.address, wait_for_server=True) as made:
        yield made
