"""Attacks by whoever can write the repository, beside clients that load its models all the while. Each runs in a process of
its own until it is told that it is over, returns what it did in words, and asserts what must hold."""
import concurrent.futures
import json
import os
import random
import threading
import time
import urllib.parse

import messages
import peer
from target import CONFIG, linear, safetensors, write_model

INVALID_ARGUMENT, ALREADY_EXISTS, RESOURCE_EXHAUSTED, UNAVAILABLE = "3", "6", "8", "14"
K, N = 2048, 4096  # of the models that change during loads
OUTPUT = 1  # the tensor in a product's answer


def _loads(ground, model, caller=None):
    """Loads it once. (the status, seconds)."""
    start = time.monotonic()
    answer = (caller or peer.Caller(ground.port)).call(peer.LOAD, messages.named(model))
    return answer.status, time.monotonic() - start


def _product(caller, model):
    answer = caller.call(peer.MATMUL, messages.matmul(model, 1, K))
    assert answer.status == "0", f"a product of {model}: got status {answer.status}, {answer.message}"
    return messages.field_of(answer.body, OUTPUT)


def _empty_tensors(count):
    """A shard of tensors without elements: nothing but a header."""
    header = ",".join(f'"t{i:07d}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(count)).encode()
    header = b"{" + header + b"}"
    return len(header).to_bytes(8, "little") + header


def _tries_until_over(ground, model, expected):
    """Loads it again and again; how often, and how long the slowest took."""
    caller, tries, slowest = peer.Caller(ground.port, timeout_s=60), 0, 0
    while tries == 0 or not ground.over.is_set():
        status, took = _loads(ground, model, caller)
        assert status == expected, f"a load of {model}: got status {status}, expected {expected}"
        tries, slowest = tries + 1, max(slowest, took)
    return f"{tries} loads, the slowest of {slowest:.1f} s"


def many_links(ground):
    """One shard of empty tensors under many names: as much header as may be, for each of them."""
    folder = ground.models / "links"
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG)
    shard, tensors, names = folder / "model-0.safetensors", ground.some(1_000_000), ground.some(900)
    shard.write_bytes(_empty_tensors(tensors))
    for i in range(1, names):
        other = folder / f"model-{i}.safetensors"
        (other.symlink_to if i % 2 else other.hardlink_to)(shard.name if i % 2 else shard)
    return f"a shard of {tensors} empty tensors under {names} names; " + _tries_until_over(ground, "links", INVALID_ARGUMENT)


def stop_during_load(ground):
    """Loads of a long header, from two clients, when SIGTERM comes."""
    folder, tensors = ground.models / "long", ground.some(900_000)
    write_model(folder, linear(K, N))
    (folder / "more.safetensors").write_bytes(_empty_tensors(tensors))
    loads = []

    def load():
        try:
            caller = peer.Caller(ground.port, timeout_s=60)
            while not ground.over.is_set():
                status, _ = _loads(ground, "long", caller)
                assert status in ("0", ALREADY_EXISTS, UNAVAILABLE), f"a load: got status {status}"
                loads.append(status)
        except OSError:
            pass  # the server has ended
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: load(), range(2)))
    return f"{loads.count('0')} loads of {tensors} tensors until the end"


def _load_all(ground, models, expected):
    """Loads every model again and again, each from a client of its own, until it is over or the server has ended; how often."""
    def load(model):
        tries = 0
        try:
            caller = peer.Caller(ground.port, timeout_s=60)
            while not ground.over.is_set():
                status, _ = _loads(ground, model, caller)
                assert status in expected, f"a load of {model}: got status {status}, expected one of {expected}"
                tries += 1
        except OSError:
            pass  # the server has ended
        return tries
    with concurrent.futures.ThreadPoolExecutor(len(models)) as pool:
        return sum(pool.map(load, models))


def large_index(ground):
    """An index as large as may be, of two models at once."""
    models, entries = ("index-0", "index-1"), ground.some(700_000)
    tensors = ",".join(f'"model.layers.10.mlp.experts.up_projection.weight.{i:07d}":"model-{i % 10}.safetensors"' for i in range(entries))
    for model in models:
        write_model(ground.models / model, linear(64, 64))
        for i in range(10):
            (ground.models / model / f"model-{i}.safetensors").write_bytes(safetensors([(f"t{i}", "U8", [1], b"x")]))
        (ground.models / model / "model.safetensors.index.json").write_text('{"weight_map":{' + tensors + "}}")
    tries = _load_all(ground, models, (INVALID_ARGUMENT, UNAVAILABLE))
    return f"{tries} loads of two indices of {len(tensors) >> 20} MiB"


def _write_expressions(folder, expressions, tensors):
    """A model of compressed-tensors that leaves out what one of the expressions matches."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": expressions}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    header = ",".join(f'"{name}.weight_packed":{{"dtype":"I32","shape":[0,0],"data_offsets":[0,0]}}' for name in tensors)
    header = ("{" + header + "}").encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def costly_expressions(ground):
    """Expressions in config.json that take long, and much memory, to compile."""
    expressions = [f"re:(?:\\pL\\pN){{1,{1 + i % 9}}}number{i:05d}" for i in range(ground.some(10_000))]
    _write_expressions(ground.models / "costly", expressions, ["layer"])
    tries = _load_all(ground, ("costly",), (INVALID_ARGUMENT, UNAVAILABLE))
    return f"{tries} loads of {len(expressions)} expressions, {sum(map(len, expressions)) >> 10} KiB"


def slow_expressions(ground):
    """Expressions that are within all bounds, and take long to match, with paths as long as may be."""
    expressions = [f"re:.*a[ab]{{{9 + i % 9}}}c{i:04d}" for i in range(ground.some(6000))]
    noise = random.Random(3)
    paths = ["".join(noise.choices("ab", k=900)) + f"{i:06d}" for i in range(ground.some(50_000))]
    _write_expressions(ground.models / "slow", expressions, paths)
    tries = _load_all(ground, ("slow",), (INVALID_ARGUMENT, UNAVAILABLE))
    return f"{tries} loads of {len(expressions)} expressions and {len(paths)} paths"


class _Versions:
    """A model "changing" of two versions, and what each answers."""

    def __init__(self, ground):
        self.model, self.caller = "changing", peer.Caller(ground.port, timeout_s=60)
        self.blobs = [safetensors(linear(K, N, seed)) for seed in (1, 2)]
        self.right, self.loads, self.refused, self.took = [], 0, 0, 0
        self.ground = ground

    def learn(self, place):
        """`place` puts a version where the model is."""
        for version in (0, 1):
            place(version)
            status, self.took = _loads(self.ground, self.model, self.caller)
            assert status == "0", f"version {version}: got status {status}, expected 0"
            self.right.append(_product(self.caller, self.model))
        assert self.right[0] != self.right[1]

    def load(self, judge=lambda: True):
        """A load, whatever happens to the files meanwhile, and a product that must be of one version, if `judge` says so."""
        status, _ = _loads(self.ground, self.model, self.caller)
        self.loads, self.refused = self.loads + 1, self.refused + (status != "0")
        right = _product(self.caller, self.model) in self.right
        assert right or not judge(), f"load {self.loads}: an answer of no version"

    def told(self):
        return f"{self.loads} loads, {self.refused} of them refused; every answer of one version"


def writes_in_place(ground):
    """Another version is written into the file, whose time of modification is put back, while the model is loaded."""
    versions, chance, version = _Versions(ground), random.Random(5), 1
    folder = ground.models / versions.model
    write_model(folder, linear(K, N, 1))
    with (folder / "model.safetensors").open("r+b") as file:
        before = os.fstat(file.fileno())

        def write(version):
            os.pwrite(file.fileno(), versions.blobs[version], 0)
            os.utime(file.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
        versions.learn(write)
        while not ground.over.is_set():
            version, took = 1 - version, []
            delay = chance.random() * versions.took

            def later():
                time.sleep(delay)
                start = time.monotonic()
                write(version)
                took.append(time.monotonic() - start)
            thread = threading.Thread(target=later)
            thread.start()

            def was_short():
                """Else the file may have been of two versions for as long as a whole load."""
                thread.join()
                return took[0] < versions.took / 8
            versions.load(judge=was_short)
            thread.join()
    assert versions.refused > 0 or versions.loads < 20, "no write came during a load"
    return versions.told()


def folder_flips(ground):
    """The model is a link to a folder, led to another one all the while."""
    versions = _Versions(ground)
    for version in (0, 1):
        write_model(ground.models / f".{version}", linear(K, N, version + 1))

    def place(version):
        fresh = ground.models / ".fresh"
        fresh.symlink_to(f".{version}")
        fresh.rename(ground.models / versions.model)
    return _change_during_loads(ground, versions, place)


def files_replaced(ground):
    """config.json and the tensors are replaced, one after the other, all the while."""
    versions = _Versions(ground)
    folder = ground.models / versions.model
    write_model(folder, linear(K, N, 1))

    def place(version):
        for name, contents in (("config.json", CONFIG.encode()), ("model.safetensors", versions.blobs[version])):
            (folder / ".fresh").write_bytes(contents)
            (folder / ".fresh").rename(folder / name)
    return _change_during_loads(ground, versions, place)


def _change_during_loads(ground, versions, place):
    versions.learn(place)
    ended = threading.Event()

    def change():
        chance, version = random.Random(6), 0
        while not ended.is_set():
            place(version)
            version = 1 - version
            time.sleep(chance.random() * 2 * versions.took)
    thread = threading.Thread(target=change)
    thread.start()
    try:
        while not ground.over.is_set():
            versions.load()
    finally:
        ended.set()
        thread.join()
    return versions.told()


def sparse_weight(ground):
    """A file that says it holds 34 GB, and takes no room on the disk."""
    folder, side, group = ground.models / "sparse", 1 << 18, 64
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG)
    sizes = (("layer.qweight", "I32", [side, side // 8], side * side // 2),
             ("layer.qzeros", "I32", [side // group, side // 8], side // group * side // 2),
             ("layer.scales", "F16", [side // group, side], side // group * side * 2))
    header, at = [], 0
    for name, dtype, shape, size in sizes:
        header.append(f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{at},{at + size}]}}')
        at += size
    text = ("{" + ",".join(header) + "}").encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return f"a weight of {at >> 30} GiB; " + _tries_until_over(ground, "sparse", RESOURCE_EXHAUSTED)


def failing_loads(ground):
    """Loads that fail, of many kinds, from four clients: every one would like a line in the log."""
    long_name = "n" * 1000
    broken = {
        "b-json": {"config.json": b"{" * 100},
        "b-method": {"config.json": b'{"quantization_config": {"quant_method": "' + b"x" * 100_000 + b'"}}'},
        "b-cut": {"config.json": CONFIG.encode(), "model.safetensors": safetensors(linear(64, 64))[:-1]},
        "b-name": {"config.json": CONFIG.encode(),
                   "model.safetensors": safetensors([(long_name + ".qweight", "I32", [64, 1], bytes(256))])},
        "b-index": {"config.json": CONFIG.encode(), "model.safetensors.index.json": b'{"weight_map": {"a": "gone"}}'},
    }
    for model, files in broken.items():
        (ground.models / model).mkdir()
        for name, contents in files.items():
            (ground.models / model / name).write_bytes(contents)
    tries = []

    def load():
        caller = peer.Caller(ground.port, timeout_s=60)
        while not ground.over.is_set():
            for model in broken:
                status, _ = _loads(ground, model, caller)
                assert status not in ("0", "2", "13"), f"{model}: got status {status}"
                tries.append(status)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: load(), range(4)))
    assert len(tries) > len(broken), "the loads went wrong"
    return f"{len(tries)} loads, log of {ground.log_path.stat().st_size >> 10} KiB"


FORGED = "\nFORGED 2026 info \x1b[2J\u2028\u202e\x85\x7f"


def control_characters(ground):
    """Names that would forge a line in the log or move a terminal's cursor: of folders, tensors, settings and in calls."""
    odd = ground.models / FORGED
    odd.mkdir()
    (odd / "config.json").write_text(CONFIG)
    os.mkdir(os.fsencode(ground.models) + b"/\xff\xfe\x1b")
    write_model(ground.models / "ctrl", [(FORGED + ".qweight", "I32", [64, 8], bytes(64 * 32))])
    (ground.models / "word").mkdir()
    (ground.models / "word" / "config.json").write_text(CONFIG.replace("awq", "\\u001b]0;x\\u0007\\nFORGED"))
    calls = [(peer.LOAD, messages.named(name)) for name in ("ctrl", "word", FORGED)]
    calls += [(peer.MATMUL, messages.matmul(FORGED, 1, 8)), (peer.LIST, b""),
              (peer.MATMUL, messages.weight_ref("m", FORGED) + messages.bytes_field(3, messages.tensor([1, 8], b"\0" * 16)))]
    caller, count = peer.Caller(ground.port), 0
    while count == 0 or not ground.over.is_set():
        for path, message in calls:
            told = urllib.parse.unquote(caller.call(path, message).message)
            assert not _controls(told), f"a message of {path} has control characters: {told!r}"
            count += 1
    text = ground.log_path.read_bytes().decode()
    assert not _controls(text.replace("\n", "")), "the log has control characters"
    assert "FORGED" in text, "the log never showed what was sent"
    assert not any(line.startswith("FORGED") for line in text.splitlines()), "a line was forged"
    return f"{count} calls, log of {len(text) >> 10} KiB"


def _controls(text):
    return [c for c in text if ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or c in "\u2028\u2029\u202e"]
