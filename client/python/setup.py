"""Generates the messages of awqd.v1 from the .proto files, as a step of the build.

What protoc generates for Python runs only beside the versions of protobuf that it was made for. So the build keeps the
description of the messages, which every version reads, and the types for type checkers; awqd/_descriptors.py makes the
classes when they are imported.
"""
import pathlib

import grpc_tools
from grpc_tools import protoc
from setuptools import setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
PROTO = HERE / "proto"
OTHERS = ["google/rpc/error_details.proto", "google/rpc/status.proto", "grpc/health/v1/health.proto"]
MODULE = '''"""Messages of {proto}."""
from awqd._descriptors import define

define("{proto}", globals())
'''


def run_protoc(*arguments):
    include = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    if protoc.main(["protoc", f"-I{PROTO}", f"-I{include}", *arguments]) != 0:
        raise SystemExit(f"protoc failed: {' '.join(arguments)}")


class BuildWithMessages(build_py):
    """Adds awqd/descriptors.binpb and, for each file of awqd/v1, a module and its types."""

    def run(self):
        super().run()
        root = HERE / "src" if self.editable_mode else pathlib.Path(self.build_lib)
        names = sorted(path.relative_to(PROTO).as_posix() for path in (PROTO / "awqd/v1").glob("*.proto"))
        if not names:
            raise SystemExit(f"no .proto files in {PROTO / 'awqd/v1'}")
        (root / "awqd/v1").mkdir(parents=True, exist_ok=True)
        run_protoc("--include_imports", f"--descriptor_set_out={root / 'awqd/descriptors.binpb'}", *names, *OTHERS)
        run_protoc(f"--pyi_out={root}", *names)
        for name in names:
            (root / name.replace(".proto", "_pb2.py")).write_text(MODULE.format(proto=name), encoding="utf-8")


setup(cmdclass={"build_py": BuildWithMessages})
