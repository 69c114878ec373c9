"""Payloads beside the generated classes: the same bytes in, the same tensors out."""
import numpy as np
import pytest

import awqd
from awqd import _arrays, _wire
from awqd.v1 import inference_pb2, tensor_pb2


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (7, 300)])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", "i1", "u1", "<i4"])
def test_requests_parse_as_what_was_meant(shape, dtype):
    array = np.ones(shape, dtype)
    spec = _arrays.spec_of(array, "activations")
    request = inference_pb2.QuantizedMatmulRequest(request_id="id")
    data = b"".join([request.SerializeToString(), *_wire.tensor_field(3, spec)])
    request.activations.CopyFrom(tensor_pb2.Tensor(dtype=spec.dtype, shape=shape, raw=array.tobytes()))
    assert inference_pb2.QuantizedMatmulRequest.FromString(data) == request


@pytest.mark.parametrize("size", [0, 1, 127, 128, 70000])
def test_answers_are_split_and_whole_again(size):
    response = inference_pb2.QuantizedMatmulResponse(request_id="id", output=tensor_pb2.Tensor(
        dtype="UINT8", shape=[size], raw=bytes(range(256)) * (size // 256) + bytes(size % 256)))
    response.execution.kernel = "k"
    data = response.SerializeToString()
    head, payload = _wire.split(data, 1)
    assert payload is not None and len(head) < 64 and bytes(payload) == response.output.raw
    parsed = inference_pb2.QuantizedMatmulResponse.FromString(head)
    response.output.ClearField("raw")
    assert parsed.output.shape == response.output.shape and parsed.execution == response.execution
    assert parsed.request_id == "id"


def test_any_other_message_is_left_to_the_parser():
    values = inference_pb2.QuantizedMatmulResponse(output=tensor_pb2.Tensor(dtype="FP32", shape=[1]))
    values.output.floats.values.append(3)
    whole = inference_pb2.QuantizedMatmulResponse(output=tensor_pb2.Tensor(raw=b"abc")).SerializeToString()
    for data in (b"", values.SerializeToString(), whole + whole, whole[:-1], b"\x0b\x0c", b"\xff" * 20, b"\x0a\xff\x01"):
        assert _wire.split(data, 1) == (data, None)


def test_dtypes_have_many_names():
    for value in ("fp16", "FP16", "float16", np.float16, np.dtype("f2"), np.dtype(">f2")):
        assert _arrays.dtype_of(value, "dtype") == tensor_pb2.FP16
    with pytest.raises(awqd.InvalidArgument, match="output_dtype: got int64, expected fp16"):
        _arrays.dtype_of(np.int64, "output_dtype")


def test_bf16_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(awqd.InvalidArgument, match="pip install ml_dtypes"):
        _arrays.numpy_dtype(tensor_pb2.BF16, "output_dtype")


def test_pytorch():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int32):
        tensor = torch.arange(6).reshape(2, 3).to(dtype).t()
        spec = _arrays.spec_of(tensor, "x")
        back = _arrays.array_of(spec.dtype, spec.shape, spec.data, True, "x")
        assert back.dtype == dtype and torch.equal(back, tensor)
