#!/usr/bin/env python3
"""The allowed includes: checks every #include of the rooms (all but tests/) against the table of CONTRIBUTING.md.

tests/architecture/figures.py prints what a review wants to see of sizes; they fail nothing.
"""
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# The family of a header outside the project; the first pattern that matches decides, "std" when none does.
FAMILIES = [
    ("absl", r"^absl/"),
    ("proto", r"^(awqd/v1|google/(protobuf|rpc)|grpc/(health|reflection)|inference|otlp|xds)/"),
    # What a message is received in and answered with; a room that may include grpc may include these.
    ("grpc_data", r"^grpcpp/support/(byte_buffer|slice|status)\.h$"),
    ("grpc", r"^grpc(pp|\+\+)?/"),
    ("cuda", r"^(cuda|cublas|cooperative_groups|mma\.h|nv|vector_types|driver_types)"),
    ("metrics", r"^(prometheus/|microhttpd\.h)"),
    ("json", r"^nlohmann/"),
    ("cli", r"^CLI/"),
    ("toml", r"^toml\+\+/"),
    ("blas", r"^(cblas|openblas)"),
    ("openssl", r"^openssl/"),
]

BASE = ["kernels/base/"]
GROUND = BASE + ["kernels/types.h", "kernels/scheme.h", "kernels/device.h", "kernels/weight.h",
                 "kernels/exact.h", "kernels/lending/arena.h"]
# A kernel reads its layout, so it may know the constants of one; a layout knows no kernel.
ROW = GROUND + ["kernels/layouts/", "kernels/registry.h", "kernels/steps.h", "kernels/kv4"]
FACE = GROUND + ["kernels/registry.h", "kernels/plan/plan.h", "kernels/layouts/layout.h", "kernels/kernels.h",
                 "kernels/kv4.h"]

# (room, project headers it may include besides its own, families it may include besides std). The longest room
# that is a prefix of a file's path decides.
ROOMS = [
    ("kernels/base/", [], ["absl"]),
    ("kernels/types.", BASE, ["absl"]),
    ("kernels/scheme.", BASE + ["kernels/types.h"], ["absl"]),
    ("kernels/device.", BASE + ["kernels/types.h"], ["absl"]),
    ("kernels/weight.", GROUND, ["absl"]),
    ("kernels/exact.", GROUND, ["absl"]),
    ("kernels/steps.", GROUND + ["kernels/registry.h"], ["absl"]),
    ("kernels/kv4", GROUND + ["kernels/backends.h"], ["absl"]),
    ("kernels/plan/", GROUND + ["kernels/registry.h", "kernels/layouts/layout.h"], ["absl"]),
    ("kernels/registry.", GROUND + ["kernels/layouts/layout.h"], ["absl"]),
    ("kernels/formats/", GROUND, ["absl", "json"]),
    ("kernels/layouts/", GROUND, ["absl"]),
    ("kernels/lending/", GROUND + ["kernels/layouts/layout.h"], ["absl"]),
    ("kernels/backends.", FACE + ["kernels/steps.h"], ["absl"]),
    ("kernels/kernels.", FACE + ["kernels/backends.h", "kernels/steps.h"], ["absl"]),
    ("kernels/prepare.", FACE, ["absl"]),
    ("kernels/cpu/", ROW + ["kernels/backends.h"], ["absl", "blas"]),
    ("kernels/cuda/common/", ROW + ["kernels/cuda/core/"], ["absl", "cuda"]),
    ("kernels/cuda/core/", GROUND, ["absl", "cuda"]),
    # One folder (an architecture, or dense/): its own files, common/ and core/, never another folder's.
    ("kernels/cuda/", ROW + ["kernels/backends.h", "kernels/cuda/common/", "kernels/cuda/core/"], ["absl", "cuda"]),
    ("kernels/checkpoint/", GROUND + ["kernels/formats/format.h"], ["absl", "json"]),
    ("kernels/library/", FACE + ["kernels/formats/format.h", "kernels/checkpoint/", "kernels/lending/"], ["absl"]),
    ("client/command_line/", [], ["absl", "cli"]),
    ("client/tools/", GROUND + ["client/files/output_file.h", "kernels/checkpoint/", "kernels/formats/"], ["absl", "json"]),
    ("server/batching/", BASE, ["absl"]),
    ("server/model/", FACE + ["kernels/checkpoint/", "kernels/formats/format.h"], ["absl"]),
    ("server/repository/", BASE + ["kernels/device.h", "kernels/checkpoint/", "server/model/", "server/obs/"], ["absl"]),
    ("server/engine/", FACE + ["server/batching/", "server/model/", "server/obs/snapshot.h", "server/obs/trace_context.h"], ["absl"]),
    ("server/obs/", BASE, ["absl", "json", "metrics"]),
    ("server/otlp/", BASE + ["server/obs/"], ["absl", "grpc", "proto"]),
    ("server/security/", BASE + ["server/obs/"], ["absl", "openssl"]),
    ("server/transport/", BASE + ["server/obs/", "server/security/"], ["absl", "grpc", "grpc_data"]),
    ("server/ring/", BASE + ["awqd/ring/", "server/obs/", "server/security/", "server/transport/"], ["absl"]),
    ("server/wire/", GROUND + ["kernels/formats/format.h", "kernels/checkpoint/file.h", "server/engine/", "server/model/", "server/obs/",
                       "server/repository/model_folders.h"], ["absl", "proto", "grpc_data"]),
    ("server/lending/", GROUND + ["kernels/lending/", "server/model/", "server/obs/", "server/repository/", "server/security/",
                                  "server/transport/listening.h"], ["absl"]),
    ("server/services/", FACE + ["server/lending/", "kernels/formats/format.h", "kernels/checkpoint/experts.h", "kernels/checkpoint/file.h", "server/security/roles.h", "server/transport/", "server/ring/", "server/wire/", "server/engine/",
                                 "server/model/", "server/repository/", "server/obs/"], ["absl", "proto", "grpc", "grpc_data"]),
    # The wiring: main, options, server.
    ("server/", ["kernels/", "client/command_line/", "server/"], ["absl", "proto", "grpc", "grpc_data", "cli", "json", "toml"]),
    ("client/awqctl/", BASE + ["kernels/scheme.h", "client/"], ["absl", "proto", "cli", "json", "openssl"]),
    ("client/", ["awqd/ring/", "kernels/base/half.h", "kernels/base/mutex.h", "kernels/base/spin.h", "kernels/base/status.h", "kernels/base/unique_fd.h"], ["absl", "proto", "grpc", "grpc_data", "cli", "json"]),
]

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
SOURCES = {".h", ".cc", ".cu", ".cuh"}


def room_of(path):
    fits = [room for room in ROOMS if path.startswith(room[0])]
    return max(fits, key=lambda room: len(room[0])) if fits else None


def is_own(path, header):
    """A file's own room; beneath kernels/cuda/ only its own folder, not its neighbours."""
    room = room_of(path)[0]
    if room == "kernels/cuda/":
        folder = str(pathlib.PurePosixPath(path).parent)
        # kernels/cuda/backend.cc lists every folder: it is the one file above them.
        return header.startswith(folder + "/")
    return room_of(header) == room_of(path)


def family_of(header):
    return next((name for name, pattern in FAMILIES if re.match(pattern, header)), "std")


def violation(path, header, quoted):
    """None, or why `path` may not include `header`."""
    room = room_of(path)
    if room is None:
        return "the file belongs to no room"
    family = family_of(header)
    if family != "std":
        return None if family in room[2] else f"{room[0]} may not include {family} headers"
    if not quoted:
        return None
    if is_own(path, header) or any(header.startswith(allowed) for allowed in room[1]):
        return None
    return f"{room[0]} may not include it"


def sources(top):
    return sorted(path for path in (ROOT / top).rglob("*") if path.suffix in SOURCES)


TOPS = ["kernels", "server", "client"]


def every_source():
    return [path for top in TOPS for path in sources(top)]


class Includes(unittest.TestCase):

    def test_every_include_is_allowed(self):
        found, checked = [], 0
        for path in every_source():
            relative = path.relative_to(ROOT).as_posix()
            for bracket, header in INCLUDE.findall(path.read_text(encoding="utf-8")):
                why = violation(relative, header, bracket == '"')
                checked += 1
                if why:
                    found.append(f"{relative}: #include {header}: {why}")
        self.assertGreater(checked, 100)
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_the_check_can_fail(self):
        for path, header in [("kernels/cuda/sm80/x.cu", "kernels/cuda/sm90a/y.h"),
                             ("kernels/cpu/x.cc", "kernels/formats/format.h"),
                             ("kernels/formats/x.cc", "kernels/layouts/layout.h"),
                             ("kernels/checkpoint/x.cc", "kernels/kernels.h"),
                             ("kernels/checkpoint/x.cc", "server/model/model.h"),
                             ("server/model/x.cc", "server/repository/model_store.h"),
                             ("server/repository/x.cc", "server/services/env.h"),
                             ("server/batching/x.cc", "kernels/types.h"),
                             ("server/engine/x.cc", "awqd/v1/tensor.pb.h"),
                             ("server/transport/x.cc", "awqd/v1/tensor.pb.h"),
                             ("server/transport/x.cc", "server/wire/tensor.h"),
                             ("server/transport/x.cc", "server/engine/engine.h"),
                             ("server/ring/x.cc", "server/services/env.h"),
                             ("server/ring/x.cc", "awqd/v1/tensor.pb.h"),
                             ("server/wire/x.cc", "grpcpp/server_context.h"),
                             ("server/wire/x.cc", "server/batching/task.h"),
                             ("server/wire/x.cc", "server/transport/call.h"),
                             ("server/services/x.cc", "cuda_runtime.h"),
                             ("client/x.cc", "server/config/options.h"),
                             ("client/bench/x.cc", "client/tools/inspect.h"),
                             ("client/awqctl/x.cc", "kernels/weight.h"),
                             ("client/tools/x.cc", "kernels/kernels.h"),
                             ("client/tools/x.cc", "grpcpp/grpcpp.h"),
                             ("client/tools/x.cc", "client/remove_on_signal.h"),
                             ("kernels/cuda/common/x.cuh", "kernels/cuda/sm80/tiles.h")]:
            self.assertIsNotNone(violation(path, header, True), f"{path} -> {header}")

    def test_first_line_says_what_the_file_is_for(self):
        bare = [path.relative_to(ROOT).as_posix()
                for top in TOPS + ["tests"] for path in sources(top)
                if not path.read_text(encoding="utf-8").startswith("//")]
        self.assertEqual(bare, [])

    def test_top_level(self):
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
        folders = {path.split("/")[0] for path in listed if "/" in path and not path.startswith(".")}
        self.assertEqual(folders, {"proto", "server", "kernels", "client", "deploy", "tests", "cmake"})


if __name__ == "__main__":
    sys.exit(unittest.main())
