#!/usr/bin/env python3
"""The service that one would otherwise write: grpc.aio and torch, the same protos, weights dequantised once and kept
on the device, one matmul a request.

    server.py --model FOLDER --descriptors FILE --port_file FILE [--device cuda:0] [--site_packages DIR]

--descriptors is what `protoc --include_imports --descriptor_set_out` writes for awqd's protos, so that no generated
code has to fit the version of protobuf that is installed. Exit code 77 and one line when a package is missing.
"""
import argparse
import asyncio
import json
import pathlib
import sys


def parse():
    parser = argparse.ArgumentParser()
    for name in ("model", "descriptors", "port_file"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--site_packages")
    return parser.parse_args()


ARGUMENTS = parse()
if ARGUMENTS.site_packages:
    sys.path.append(ARGUMENTS.site_packages)
try:
    import grpc
    import torch
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ImportError as error:
    print(f"peer: {error}; see requirements.txt", file=sys.stderr)
    sys.exit(77)

# Column c of eight lies in this nibble of its word.
NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
DTYPES = {1: torch.float16, 2: torch.bfloat16, 3: torch.float32}


def messages():
    """Name -> message class, for every message of the descriptor set."""
    pool = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString(ARGUMENTS.descriptors.read_bytes())
    for file in files.file:
        pool.Add(file) if not hasattr(pool, "AddSerializedFile") else pool.AddSerializedFile(file.SerializeToString())
    if hasattr(message_factory, "GetMessageClass"):
        make = message_factory.GetMessageClass
    else:
        make = message_factory.MessageFactory(pool).GetPrototype
    return {f"{file.package}.{message.name}": make(pool.FindMessageTypeByName(f"{file.package}.{message.name}"))
            for file in files.file for message in file.message_type}


def unpack(words):
    """int32 [rows, n/8] -> int16 [rows, n]"""
    nibbles = torch.stack([(words >> (4 * nibble)) & 15 for nibble in NIBBLES], dim=-1)
    return nibbles.reshape(words.shape[0], -1).to(torch.int16)


def load(folder, device):
    """Path -> FP16 [k, n] on the device (FP32 on the CPU, whose half-precision products are slow)."""
    with open(folder / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = bytearray(file.read())
    group = json.loads((folder / "config.json").read_text())["quantization_config"]["group_size"]

    def tensor(name):
        entry = header[name]
        begin, end = entry["data_offsets"]
        dtype = torch.int32 if entry["dtype"] == "I32" else torch.float16
        return torch.frombuffer(memoryview(data)[begin:end], dtype=dtype).reshape(entry["shape"])

    weights = {}
    for name in [name[:-len(".qweight")] for name in header if name.endswith(".qweight")]:
        zeros = unpack(tensor(name + ".qzeros")).repeat_interleave(group, 0)
        scale = tensor(name + ".scales").float().repeat_interleave(group, 0)
        weight = ((unpack(tensor(name + ".qweight")) - zeros).float() * scale).half()
        weights[name] = weight.to(device) if device != "cpu" else weight.float()
    return weights


class Service:
    """Handlers; one event loop."""

    def __init__(self, weights, device, types):
        self.weights, self.device, self.types = weights, device, types

    async def matmul(self, request, context):
        weight = self.weights.get(request.weight.weight)
        if weight is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such weight")
        x = request.activations
        tokens = torch.frombuffer(bytearray(x.raw), dtype=DTYPES[x.dtype]).reshape(tuple(x.shape))
        y = tokens.to(self.device).to(weight.dtype) @ weight
        y = y.to(DTYPES[request.output_dtype or x.dtype]).cpu().contiguous()
        response = self.types["awqd.v1.QuantizedMatmulResponse"]()
        response.output.dtype = request.output_dtype or x.dtype
        response.output.shape.extend(y.shape)
        response.output.raw = y.view(torch.uint8).numpy().tobytes()
        return response

    async def model(self, request, _):
        response = self.types["awqd.v1.GetModelResponse"]()
        response.model.name = request.name
        for path, weight in self.weights.items():
            response.weights.add(path=path, k=weight.shape[0], n=weight.shape[1])
        return response

    async def check(self, _, __):
        return self.types["grpc.health.v1.HealthCheckResponse"](status=1)


def handlers(service, types):
    """The three methods that a bench calls."""
    def unary(service_name, method, handle, request):
        return grpc.method_handlers_generic_handler(service_name, {method: grpc.unary_unary_rpc_method_handler(
            handle, request_deserializer=types[request].FromString,
            response_serializer=lambda message: message.SerializeToString())})

    return (unary("awqd.v1.QuantizedInference", "QuantizedMatmul", service.matmul, "awqd.v1.QuantizedMatmulRequest"),
            unary("awqd.v1.ModelRepository", "GetModel", service.model, "awqd.v1.GetModelRequest"),
            unary("grpc.health.v1.Health", "Check", service.check, "grpc.health.v1.HealthCheckRequest"))


async def main():
    types = messages()
    service = Service(load(ARGUMENTS.model, ARGUMENTS.device), ARGUMENTS.device, types)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1),
                                      ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(handlers(service, types))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ARGUMENTS.port_file.write_text(f"{port}\n")
    await server.wait_for_termination()


if __name__ == "__main__":
    with torch.inference_mode():
        asyncio.run(main())
