#!/usr/bin/env python3
"""Writes an AutoAWQ checkpoint of random weights: make_checkpoint.py FOLDER NAME=KxN ... (group 128; standard library only)."""
import array
import json
import os
import pathlib
import random
import re
import sys

GROUP = 128


def scales(count):
    """FP16 bits of numbers from 0.0039 to 0.0117, as in the layers of language models."""
    block = array.array("H", (0x1C00 + random.randrange(0x600) for _ in range(min(count, 1 << 16))))
    repeated = block * (count // len(block) + 1)
    return repeated[:count].tobytes()


def pieces(name, k, n):
    groups = k // GROUP
    yield f"{name}.qweight", "I32", [k, n // 8], os.urandom(k * n // 2)
    yield f"{name}.qzeros", "I32", [groups, n // 8], os.urandom(groups * n // 2)
    yield f"{name}.scales", "F16", [groups, n], scales(groups * n)


def main():
    shapes = [re.fullmatch(r"([\w.]+)=(\d+)x(\d+)", argument) for argument in sys.argv[2:]]
    if len(sys.argv) < 3 or not all(shapes):
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True)
    random.seed(1)
    header, data, offset = {}, [], 0
    for shape in shapes:
        k, n = int(shape[2]), int(shape[3])
        if k % GROUP or n % 8:
            sys.exit(f"{shape[0]}: expected K a multiple of {GROUP} and N one of 8")
        for name, dtype, size, content in pieces(shape[1], k, n):
            header[name] = {"dtype": dtype, "shape": size, "data_offsets": [offset, offset + len(content)]}
            offset += len(content)
            data.append(content)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for content in data:
            file.write(content)
    (folder / "config.json").write_text(json.dumps({
        "model_type": "random", "torch_dtype": "float16",
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
                                "version": "gemm"}}))


if __name__ == "__main__":
    main()
