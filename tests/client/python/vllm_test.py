"""awqd.vllm in vLLM's own layers, on its CPU platform: its loaders read checkpoints, libawqd computes."""
import json
import os
import pathlib
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm._custom_ops  # noqa: E402
import vllm.platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

vllm.platforms.current_platform = CpuPlatform()  # the wheel of PyPI is one for GPUs

from safetensors.torch import load_file  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.kernels import linear as kernels  # noqa: E402
from vllm.model_executor.layers.linear import ReplicatedLinear  # noqa: E402
from vllm.model_executor.layers.quantization import get_quantization_config  # noqa: E402
from vllm.platforms import PlatformEnum  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402
from vllm.scalar_type import scalar_types  # noqa: E402

import awqd.vllm  # noqa: E402

DATA = pathlib.Path(__file__).resolve().parents[2] / "data"
TABLES = {"mp": kernels._POSSIBLE_KERNELS, "int8": kernels._POSSIBLE_INT8_KERNELS, "fp8": kernels._POSSIBLE_FP8_KERNELS,
          "mxfp4": kernels._POSSIBLE_MXFP4_KERNELS, "nvfp4": kernels._POSSIBLE_NVFP4_KERNELS}


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory):
    """What an engine prepares before it builds layers, with the plugin of awqd-torch."""
    load_general_plugins()
    theirs = {kernel.__name__ for table in TABLES.values() for kernel in table.get(PlatformEnum.CPU, ())
              if not kernel.__module__.startswith("awqd")}
    os.environ["VLLM_DISABLED_KERNELS"] = ",".join(sorted(theirs))
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('vllm') / 'rendezvous'}", 0, "gloo")
        initialize_model_parallel()
        config.model_config = types.SimpleNamespace(dtype=torch.float32, quantization_config=None)
        yield


GOLDENS = [
    ("mp", "awq", "all-MiniLM-L6-v2-awq", "encoder.layer.0.attention.self.query"),
    ("mp", "awq", "all-MiniLM-L6-v2-awq", "encoder.layer.0.output.dense"),
    ("mp", "pack-quantized", "w4", "model.layers.0.mlp.up_proj"),
    ("mp", "pack-quantized", "w4", "model.layers.0.q_proj"),
    ("mp", "pack-quantized", "w4", "model.layers.0.k_proj"),
    ("mp", "pack-quantized", "w4", "model.layers.0.v_proj"),
    ("mxfp4", "mxfp4-pack-quantized", "mxfp4", "layers.0.up_proj"),
    ("mxfp4", "mxfp4-pack-quantized", "mxfp4", "layers.0.down_proj"),
    ("nvfp4", "nvfp4-pack-quantized", "nvfp4", "layers.0.up_proj"),
]


def tensors_of(folder, model, path):
    found = {}
    for file in (DATA / folder / model).glob("*.safetensors"):
        found.update({name.removeprefix(f"{path}."): tensor for name, tensor in load_file(file).items()
                      if name.startswith(f"{path}.")})
    return found


def settings_of(folder, model):
    return json.loads((DATA / folder / model / "config.json").read_text())["quantization_config"]


def golden(folder, model, path):
    """x and y of the weight, without rounding of x."""
    every = json.loads((DATA / folder / "goldens/cases.json").read_text())["cases"]
    case = next(case for case in every if (case["model"], case["weight"]) == (model, path))
    x, y = (torch.from_numpy(np.load(DATA / folder / "goldens" / case[name])) for name in ("activations", "matmul"))
    return x.float(), y.double()


def loaded(kind, path, settings, tensors, k, n, dtype=torch.float32):
    """The layer as vLLM makes, loads and processes it."""
    layer = ReplicatedLinear(k, n, bias="bias" in tensors, params_dtype=dtype, prefix=path, return_bias=False,
                             quant_config=get_quantization_config(settings["quant_method"]).from_config(settings))
    owner = getattr(layer, "scheme", layer.quant_method)
    assert type(getattr(owner, "kernel", None) or owner.fp8_linear) is awqd.vllm._KERNELS[kind]
    for name, parameter in layer.named_parameters():
        if name in tensors:
            parameter.weight_loader(parameter, tensors[name])
    before = sum(parameter.nbytes for parameter in layer.parameters())
    layer.quant_method.process_weights_after_loading(layer)
    assert sum(parameter.nbytes for parameter in layer.parameters()) < before / 2, "packed tensors are kept"
    return layer


def of_golden(kind, folder, model, path, prefix=None):
    x, y = golden(folder, model, path)
    tensors = tensors_of(folder, model, path)
    scales = tensors.get("scales", tensors.get("weight_scale")).dtype
    return loaded(kind, prefix or path, settings_of(folder, model), tensors, x.shape[-1], y.shape[-1],
                  scales if scales in (torch.float16, torch.bfloat16) else torch.float32)


def close(got, expected, tolerance=1e-5):
    torch.testing.assert_close(got.double(), expected.reshape(got.shape).double(), rtol=tolerance,
                               atol=tolerance * float(expected.abs().max()))


def test_the_plugin_adds_a_kernel_of_each_kind():
    awqd.vllm.register()  # another time
    for kind, table in TABLES.items():
        for platform in (PlatformEnum.CUDA, PlatformEnum.CPU):
            assert table[platform].count(awqd.vllm._KERNELS[kind]) == 1


@pytest.mark.parametrize("case", GOLDENS, ids="/".join)
def test_goldens(case):
    layer = of_golden(*case)
    x, expected = golden(*case[1:])
    close(layer(x), expected, 2 ** -11)  # a golden's weight is rounded to FP16
    close(layer(x), awqd.torch.Local(DATA / case[1] / case[2]).matmul(case[3], x), 1e-6)  # as from the checkpoint itself
    assert torch.equal(layer(x.reshape(1, *x.shape)), layer(x)[None])
    for dtype, step in ((torch.float16, 2 ** -11), (torch.bfloat16, 2 ** -8)):
        layer.to(dtype)  # the bias
        y = layer(x.to(dtype))
        assert y.dtype == dtype
        close(y, layer(x.to(dtype).float()), 4 * step)


def test_gptq():
    torch.manual_seed(1)
    codes, scales, x = torch.randint(0, 16, (128, 48)), torch.rand(4, 48) / 64, torch.randn(3, 128)
    words = sum(codes.reshape(16, 8, 48)[:, i] << 4 * i for i in range(8)).to(torch.int32)  # wraps, as GPTQ's words do
    layer = loaded("mp", "gptq", {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
                   {"qweight": words, "scales": scales}, 128, 48)
    close(layer(x), x.double() @ ((codes - 8) * scales.repeat_interleave(32, 0)).double())


def to_e4m3(x, scale):
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("kind, folder, model, path, static", [
    ("int8", "int-quantized", "w8-channel", "layers.0.up_proj", False),
    ("int8", "int-quantized", "w8-channel", "layers.0.down_proj", True),
    ("fp8", "float-quantized", "channel", "layers.0.up_proj", False),
    ("fp8", "float-quantized", "channel", "layers.0.down_proj", False),
    ("fp8", "float-quantized", "tensor", "layer", True)])
def test_activations_are_rounded_as_the_checkpoint_says(kind, folder, model, path, static, monkeypatch):
    # An operator of vLLM's compiled part; it changes nothing here, where a layer is of one part.
    monkeypatch.setattr(vllm._custom_ops, "scaled_fp8_quant", lambda x, scale: (to_e4m3(x, scale), scale))
    settings, tensors = settings_of(folder, model), tensors_of(folder, model, path)
    x, weight_alone = golden(folder, model, path)
    if static and kind == "int8":
        settings["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "symmetric": True,
                                                                     "strategy": "tensor", "dynamic": False}
        tensors["input_scale"] = torch.tensor([0.015])
    layer = loaded(kind, path, settings, tensors, x.shape[-1], weight_alone.shape[-1])
    scale = tensors["input_scale"] if static else x.abs().amax(-1, keepdim=True) / (127 if kind == "int8" else 448)
    rounded = (x / scale).round().clamp(-128, 127) if kind == "int8" else to_e4m3(x, scale)
    expected = rounded.double() * scale.double() @ (tensors["weight"].double() * tensors["weight_scale"].double()).T
    y = layer(x)
    close(y, expected + tensors.get("bias", torch.zeros(1)).double())
    assert float((y - weight_alone).abs().max()) > 1e-3 * float(weight_alone.abs().max())


def test_compile_takes_a_layer_whose_number_is_the_same_in_each_process():
    layer = of_golden(*GOLDENS[0], "compiled")
    x, _ = golden(*GOLDENS[0][1:])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
    number = layer.awqd.number
    assert number > 1 << 32, "made of the path"
    other = of_golden(*GOLDENS[0], "compiled")
    assert other.awqd.number == number + 1, "two models in a process"
    ones = {"codes": torch.ones(384, 384, dtype=torch.uint8), "scales": torch.ones(1, 384)}
    other.quant_method.kernel.pack(layer, "plain", ones, ("qweight",), zero=0)
    assert layer.awqd.number == number, "other weights, the same number"
    assert torch.equal(compiled(torch.ones(1, 384)), 384 + layer.bias.float()[None])


@pytest.mark.parametrize("change, reason", [
    ({"act_type": torch.int8}, "activations"), ({"weight_type": scalar_types.int4}, "unsigned"),
    ({"weight_type": scalar_types.float4_e2m1f}, "unsigned"), ({"zero_points": True}, "zero_points"),
    ({"group_size": 96}, "divisor of 128")])
def test_layers_that_are_left_to_others(change, reason):
    config = {"full_weight_shape": (128, 64), "partition_weight_shape": (128, 64), "weight_type": scalar_types.uint4b8,
              "act_type": torch.float16, "group_size": 32, "zero_points": False}
    assert awqd.vllm.AwqdLinearKernel.can_implement(kernels.MPLinearLayerConfig(**config)) == (True, None)
    able, why = awqd.vllm.AwqdLinearKernel.can_implement(kernels.MPLinearLayerConfig(**(config | change)))
    assert not able and reason in why
