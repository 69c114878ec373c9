"""compressed-tensors' tensors and settings in numpy, for the scripts of its formats.

Where the package compressed-tensors can be imported, its compressors pack the weights of these scripts too: every byte of
every tensor has to be the same, and what its decompressors make of them in FP32.
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from golden import Bf16, E2M1_VALUES, Typed, e4m3_values, sylvester, wide

try:
    import compressed_tensors
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.transform import TransformArgs, TransformConfig, TransformScheme, apply_transform_config
    VERSION = compressed_tensors.__version__
    PADS = tuple(map(int, VERSION.split(".")[:2])) < (0, 18)
except ImportError:
    VERSION = None

checked = []  # what the library was compared with


def pack(codes, bits, padded):
    """Unsigned [..., rows, count] -> I32 [..., rows, words]. Padded: floor(32 / bits) to a word; else one after the other."""
    rows = codes.reshape(-1, codes.shape[-1]).astype(np.uint64)
    if padded:
        each = 32 // bits
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % each))).reshape(len(rows), -1, each)
        words = (rows << (np.arange(each, dtype=np.uint64) * np.uint64(bits))).sum(axis=2).astype("<u4")
    else:
        stream = (rows[:, :, None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
        stream = stream.reshape(len(rows), -1)
        stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
        words = np.ascontiguousarray(np.packbits(stream, axis=1, bitorder="little")).view("<u4")
    return np.ascontiguousarray(words).view("<i4").reshape(*codes.shape[:-1], -1)


def pack_columns(codes, bits, padded):
    """Unsigned [..., N, groups] -> I32 [..., words of N, groups]."""
    return np.ascontiguousarray(np.swapaxes(pack(np.ascontiguousarray(np.swapaxes(codes, -1, -2)), bits, padded), -1, -2))


def weights_config(bits, kind, strategy, **more):
    out = {"num_bits": bits, "type": kind, "symmetric": True, "group_size": None, "strategy": strategy,
           "block_structure": None, "dynamic": False, "actorder": None, "observer": "minmax", "observer_kwargs": {}}
    return {**out, **more}


def group_config(targets, weights, **more):
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None, **more}


def config(form, groups, version="0.20.0", **more):
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "config_groups": {f"group_{i}": group for i, group in enumerate(groups)}, "ignore": ["lm_head"],
            "kv_cache_scheme": None, "global_compression_ratio": None, "version": version, **more}


def tensor_of(array):
    if isinstance(array, Typed):
        return torch.from_numpy(array.bits.copy()).view(torch.float8_e4m3fn)
    return torch.from_numpy(np.array(wide(array) if isinstance(array, Bf16) or array.dtype == np.float16 else array))


def bits_of(tensor):
    tensor = tensor.contiguous()
    return (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor).numpy()


def check(form, weights, values, tensors, state, name):
    """`values` FP32 [N, K], as the library has them; `tensors`: what it has to write for them, by suffix; `state`: the
    scales and zero points that it is given, by suffix."""
    if VERSION is None:
        return
    args = {key: value for key, value in weights.items() if value is not None and key not in ("observer", "observer_kwargs")}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    compressor = BaseCompressor.get_value_from_registry(form)
    given = {"weight": torch.from_numpy(values.copy()), **{key: tensor_of(value) for key, value in state.items()}}
    packed = compressor.compress(given, scheme)
    for suffix, ours in tensors.items():
        theirs = packed[suffix]
        expected = ours.bits if isinstance(ours, Typed) else wide(ours) if theirs.dtype == torch.float32 else ours
        assert tuple(theirs.shape) == tuple(expected.shape), (name, suffix, theirs.shape, expected.shape)
        if "fp4" in form and suffix == "weight_packed":  # it writes no negative zeros
            expected = np.where(expected & 15 == 8, expected & 0xF0, expected)
            expected = np.where(expected >> 4 == 8, expected & 15, expected)
        assert (bits_of(theirs) == expected).all(), (name, suffix, "differs")
    if "fp4" in form:  # what its decompressor calls, which has BF16 come out
        unpacked = torch.from_numpy(E2M1_VALUES[unpack_nibbles(tensors["weight_packed"])])
        scale = tensor_of(tensors["weight_scale"])
        scale = scale.to(torch.float32) if "nv" in form else torch.ldexp(torch.ones(scale.shape), scale.to(torch.int32) - 127)
        back = dequantize(unpacked, scale, args=scheme.weights, dtype=torch.float32,
                          global_scale=given.get("weight_global_scale"))
    elif PADS and (weights["strategy"] == "block" or values.ndim == 3):  # whose decompressor guesses the strategy wrong
        codes = packed["weight"] if "weight" in packed else unpack_from_int32(packed["weight_packed"], weights["num_bits"],
                                                                              values.shape)
        back = dequantize(codes, given["weight_scale"], given.get("weight_zero_point"), args=scheme.weights)
    else:
        back = compressor.decompress(packed, scheme)["weight"]
        back = back.float() if form == "mxfp8-quantized" else back  # BF16 holds E4M3 times powers of two
    assert back.dtype == torch.float32, (name, back.dtype)
    assert (back.numpy().view("<u4") == values.view("<u4")).all(), (name, "values differ")
    checked.append(name)


def unpack_nibbles(packed):
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(packed.shape[0], -1)


class Checkpoint:
    """Linears of one checkpoint and their goldens."""

    def __init__(self, goldens, model, form):
        self.goldens, self.model, self.form, self.tensors, self.cases = goldens, model, form, {}, []
        self.random = np.random.default_rng(sum(map(ord, model)))
        self.tensors["lm_head.weight"] = Bf16(self.random.standard_normal((8, 16)))

    def put(self, path, description, values, tensors, settings, bias=None, form=None, besides=None):
        """`values` FP32 [N, K]: the weight."""
        for suffix, tensor in {**tensors, **(besides or {})}.items():
            self.tensors[f"{path}.{suffix}"] = tensor
        if bias is not None:
            self.tensors[path + ".bias"] = bias
        settings = {key: value for key, value in settings.items() if value is not None}
        self.cases.append(dict(path=path, description=description, bias=bias, settings=settings,
                               weight=np.ascontiguousarray(values.astype(np.float16).T), format=form))

    def transform(self, path, name, size=None):
        """Gives the case of that path, the latest, the transform of its input that the library does."""
        case = self.cases[-1]
        assert case["path"] == path
        k = len(case["weight"])
        matrix = sylvester(size or k)
        case["transform"] = matrix / np.sqrt(len(matrix))
        case["settings"]["hadamard_size"] = size or -1
        self.tensors[f"{path}.{name}_input.weight"] = matrix.astype("<f4")
        if VERSION is None:
            return
        module = torch.nn.Module()
        module.linear = torch.nn.Linear(k, k, bias=False, dtype=torch.float64)
        module.linear.weight.data = torch.eye(k, dtype=torch.float64)
        apply_transform_config(module, TransformConfig(config_groups={name: TransformScheme(
            type="hadamard", head_dim=size, precision=torch.float64,
            apply=[TransformArgs(targets=["linear"], location="input")])}))
        stored = module.linear.get_submodule(f"{name}_input").weight
        assert (stored.numpy(force=True) == matrix).all(), (path, "matrix differs")
        x = self.random.standard_normal((3, k))
        ours = (x.reshape(3, -1, len(matrix)) @ case["transform"]).reshape(3, k)
        assert np.allclose(module.linear(torch.from_numpy(x)).numpy(force=True), ours, rtol=0, atol=1e-12), (path, "differs")
        checked.append(f"{self.model}/{path}/{name}")

    def bias(self, n):
        return Bf16(self.random.standard_normal(n))

    # --- pack-quantized ---

    def integers(self, path, description, n, k, bits, strategy, group=None, symmetric=True, scale_type=Bf16, padded=False,
                 act=False, bias=False, form=None, experts=None, bytes_zero=False, activations=None):
        """Codes of groups of `group` in-features, which `act` mixes. `experts`: so many in one tensor of each suffix."""
        size, middle, stack = group or k, 1 << (bits - 1), [experts] if experts else []
        groups = -(-k // size)
        tensor = strategy == "tensor"
        codes = self.random.integers(0, 2 * middle, (*stack, n, k))
        shape = (1,) if tensor else (*stack, n, groups)
        scales = scale_type(self.random.uniform(1e-2, 1e-1, shape))
        zeros = np.full(shape, middle) if symmetric else self.random.integers(0, 2 * middle, shape)
        group_of = np.arange(k) // size
        if act:
            self.random.shuffle(group_of)
        spread = (lambda cells: cells.reshape(1, 1)) if tensor else (lambda cells: cells[..., group_of])
        values = (codes - spread(zeros)).astype(np.float32) * spread(wide(scales))
        out = {"weight_packed": pack(codes, bits, padded), "weight_scale": scales,
               "weight_shape": np.array(codes.shape, "<i8")}
        state = {"weight_scale": scales}
        if not symmetric:
            signed = (zeros - middle).astype("i1")
            state["weight_zero_point"] = signed
            out["weight_zero_point"] = signed if tensor or bytes_zero else pack_columns(zeros, bits, padded)
        if act:
            state["weight_g_idx"] = out["weight_g_idx"] = group_of.astype("<i4")
        order = "group" if act else None
        weights = weights_config(bits, "int", strategy, symmetric=symmetric, group_size=group, actorder=order)
        # Each version packs in its own way; only the older one has an order, and both need whole groups.
        like = 32 % bits == 0 or (VERSION and padded == PADS)
        if VERSION and like and k % size == 0 and not (act and not PADS) and not bytes_zero:
            check("pack-quantized", weights, values, out, state, f"{self.model}/{path}")
        settings = {"num_bits": bits, "strategy": strategy, "group_size": group, "symmetric": symmetric, "actorder": order,
                    "packing": "padded" if padded else "dense", "activations": activations}
        offset = self.bias(n) if bias else None
        if not experts:
            self.put(path, description, values, out, settings, offset, form)
            return weights
        self.tensors.update({f"{path}.{suffix}": tensor for suffix, tensor in out.items()})
        parent, _, name = path.rpartition(".")
        for expert in range(experts):
            self.put(f"{parent}.{expert}.{name}", description, values[expert], {}, settings, None, form)
        return weights

    # --- The formats of floating-point codes ---

    def fp8(self, path, description, n, k, strategy, scale_type=lambda v: v.astype("<f4"), group=None, block=None, bias=False,
            form=None, besides=None, stored=None):
        codes = self.random.choice(np.array([b for b in range(256) if b & 127 != 127], "u1"), (n, k))
        if strategy == "block":
            shape = (-(-n // block[0]), -(-k // block[1]))
        else:
            shape = {"tensor": (1,), "channel": (n, 1), "group": (n, k // (group or k))}[strategy]
        if stored == "mxfp8-quantized":
            scales = self.random.integers(118, 124, shape).astype("u1")
            factors = np.ldexp(np.float32(1), scales.astype(np.int64) - 127).astype(np.float32)
        else:
            scales = scale_type(self.random.uniform(1e-3, 2e-2, shape))
            factors = wide(scales)
        if strategy == "block":
            cells = np.repeat(np.repeat(factors, block[0], 0), block[1], 1)[:n, :k]
        else:
            cells = factors.reshape(1, 1) if strategy == "tensor" else np.repeat(factors, k // shape[1], 1)
        values = e4m3_values()[codes] * cells
        out = {"weight": Typed(codes, "F8_E4M3"), "weight_scale": scales}
        weights = weights_config(8, "float", strategy, group_size=group, block_structure=block)
        check(stored or "float-quantized", weights, values, out,
              {"weight_scale": factors if stored == "mxfp8-quantized" else scales}, f"{self.model}/{path}")
        settings = {"strategy": strategy, "group_size": group, "block_n": block and block[0], "block_k": block and block[1]}
        self.put(path, description, values, out, settings, self.bias(n) if bias else None, form, besides)
        return weights

    def nvfp4(self, path, description, n, k, bias=False, form=None, besides=None):
        codes = self.random.integers(0, 16, (n, k)).astype("u1")
        scales = self.random.integers(0x20, 0x7f, (n, k // 16)).astype("u1")
        divisor = self.random.uniform(500, 3000, 1).astype("<f4")
        cells = np.repeat(e4m3_values()[scales], 16, axis=1)
        # The library divides scales, this format multiplies by the reciprocal: one rounding each.
        values = E2M1_VALUES[codes] * cells * (np.float32(1) / divisor)
        theirs = E2M1_VALUES[codes] * (cells / divisor)
        assert (np.abs(values.view("<i4").astype(np.int64) - theirs.view("<i4")) <= 2).all(), "more than two last places"
        out = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": Typed(scales, "F8_E4M3"),
               "weight_global_scale": divisor}
        weights = weights_config(4, "float", "tensor_group", group_size=16)
        check("nvfp4-pack-quantized", weights, theirs, out,
              {"weight_scale": e4m3_values()[scales], "weight_global_scale": divisor}, f"{self.model}/{path}")
        self.put(path, description, values, out, {"group_size": 16}, self.bias(n) if bias else None, form, besides)
        return weights

    def mxfp4(self, path, description, n, k, bias=False, form=None):
        codes = self.random.integers(0, 16, (n, k)).astype("u1")
        scales = self.random.integers(118, 124, (n, k // 32)).astype("u1")
        powers = np.ldexp(np.float32(1), scales.astype(np.int64) - 127).astype(np.float32)
        values = E2M1_VALUES[codes] * np.repeat(powers, 32, axis=1)
        out = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}
        weights = weights_config(4, "float", "group", group_size=32)
        check("mxfp4-pack-quantized", weights, values, out, {"weight_scale": powers}, f"{self.model}/{path}")
        self.put(path, description, values, out, {"group_size": 32}, self.bias(n) if bias else None, form)
        return weights

    def write(self, groups, form=None, **more):
        self.goldens.checkpoint(self.model, config(form or self.form, groups, **more), self.tensors)
        for case in self.cases:
            self.goldens.case(self.model, **case)


def report():
    print(f"compressed-tensors {VERSION}: the same bytes and FP32 values of {len(checked)} linears" if VERSION
          else "compressed-tensors is not installed: nothing was compared with it")
