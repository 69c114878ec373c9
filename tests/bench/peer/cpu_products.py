"""Products of 4-bit weights by other libraries on the CPU. PEERS has a class for each library; its kinds() a Product each.

A library is imported when its class is made, with `threads` for its thread pool. A Product holds copies of one weight.
"""
import importlib.metadata

import numpy

import cpu_weight


class Product:
    """y = x @ W^T: prepared for one weight, then bound to some x, then run with one of the copies of the weight."""

    activations = ""  # their type inside the product, as far as the library says
    settings = ""  # what the library says of itself, for the report

    def __init__(self, weight, size):
        self.weight, self.copies = weight, cpu_weight.copies(size)
        self.checked = weight.checked()  # [columns, K], in double

    def bind(self, x):
        """Takes x [M, K] in FP32 and returns what it gave the library, rounded to the type that it takes."""
        raise NotImplementedError

    def run(self, i):
        raise NotImplementedError

    def result(self):
        """y [M, N] of the last run in FP32."""
        raise NotImplementedError


def packed_bytes(weight):
    return weight.codes.nbytes // 2 + weight.scales.nbytes + weight.zeros.nbytes // 2


class OnnxRuntime:
    """MatMulNBits of com.microsoft: accuracy_level 1 computes in FP32, 4 quantises activations to INT8."""

    package = "onnxruntime"

    def __init__(self, threads):
        import onnx
        import onnxruntime
        self.onnx, self.runtime = onnx, onnxruntime
        # One pool for the sessions of all copies, because the idle threads of several pools would spin.
        onnxruntime.set_global_thread_pool_sizes(threads, 1)

    def kinds(self):
        return {"fp32": lambda weight: NBits(self, weight, 1, "FP32"), "int8": lambda weight: NBits(self, weight, 4, "INT8")}

    def session(self, weight, codes, level):
        helper, array, real = self.onnx.helper, self.onnx.numpy_helper.from_array, self.onnx.TensorProto.FLOAT
        node = helper.make_node("MatMulNBits", ["x", "codes", "scales", "zeros"], ["y"], domain="com.microsoft", K=weight.k,
                                N=weight.n, bits=4, block_size=weight.group, accuracy_level=level)
        constants = [array(cpu_weight.packed(codes).reshape(weight.n, weight.groups, weight.group // 2), "codes"),
                     array(weight.scales.astype(numpy.float32).reshape(-1), "scales"),
                     array(cpu_weight.packed(weight.zeros).reshape(-1), "zeros")]
        graph = helper.make_graph([node], "product", [helper.make_tensor_value_info("x", real, ["M", weight.k])],
                                  [helper.make_tensor_value_info("y", real, ["M", weight.n])], constants)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = self.runtime.SessionOptions()
        options.use_per_session_threads = False
        return self.runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class NBits(Product):
    def __init__(self, library, weight, level, dtype):
        super().__init__(weight, packed_bytes(weight))
        self.values, self.activations = library.runtime.OrtValue, dtype
        self.sessions = [library.session(weight, weight.copy_of_codes(i), level) for i in range(self.copies)]

    def bind(self, x):
        self.y = self.values.ortvalue_from_numpy(numpy.empty((len(x), self.weight.n), numpy.float32))
        self.bindings = []
        for session in self.sessions:
            binding = session.io_binding()
            binding.bind_cpu_input("x", x)
            binding.bind_ortvalue_output("y", self.y)
            self.bindings.append(binding)
        return x

    def run(self, i):
        self.sessions[i].run_with_iobinding(self.bindings[i])

    def result(self):
        return self.y.numpy()


class OpenVino:
    """u4 codes and zeros and FP16 scales, decompressed into a MatMul, which the CPU plugin fuses.

    default   what the plugin chooses: on a CPU with instructions for it BF16, and activations quantised by groups of 32
    float     the precision that it chooses, without quantised activations
    f32       FP32, without quantised activations
    int8      the precision that it chooses, activations quantised by groups as long as the weight's
    """

    package = "openvino"

    def __init__(self, threads):
        import openvino
        import openvino.opset13
        self.openvino, self.ops, self.core = openvino, openvino.opset13, openvino.Core()
        self.settings = {"INFERENCE_NUM_THREADS": str(threads), "NUM_STREAMS": "1", "PERFORMANCE_HINT": "LATENCY"}

    def kinds(self):
        quantised = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
        return {"default": lambda weight: Decompressed(self, weight, {}),
                "float": lambda weight: Decompressed(self, weight, {quantised: "0"}),
                "f32": lambda weight: Decompressed(self, weight, {quantised: "0", "INFERENCE_PRECISION_HINT": "f32"}),
                "int8": lambda weight: Decompressed(self, weight, {quantised: str(weight.group)})}

    def model(self, weight, codes, zeros):
        """codes, zeros: packed, kept by the caller, as the model does not copy them."""
        ops, u4 = self.ops, self.openvino.Type.u4

        def constant(data, shape):
            return ops.convert(ops.constant(self.openvino.Tensor(data, self.openvino.Shape(shape), u4)), "f16")
        x = ops.parameter(self.openvino.PartialShape([-1, weight.k]), self.openvino.Type.f32)
        cells = [weight.n, weight.groups, 1]
        w = ops.subtract(constant(codes, [weight.n, weight.groups, weight.group]), constant(zeros, cells))
        w = ops.multiply(w, ops.constant(weight.scales.reshape(cells)))
        w = ops.convert(ops.reshape(w, ops.constant(numpy.array([weight.n, weight.k])), False), "f32")
        return self.openvino.Model([ops.result(ops.matmul(x, w, False, True))], [x])


class Decompressed(Product):
    def __init__(self, library, weight, settings):
        super().__init__(weight, packed_bytes(weight))
        self.tensor = library.openvino.Tensor
        zeros = cpu_weight.packed(weight.zeros)
        self.requests, self.kept = [], [zeros]
        for i in range(self.copies):
            codes = cpu_weight.packed(weight.copy_of_codes(i))
            self.kept.append(codes)
            compiled = library.core.compile_model(library.model(weight, codes, zeros), "CPU",
                                                  {**library.settings, **settings})
            self.requests.append(compiled.create_infer_request())
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        group = int(compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE"))
        self.activations = "INT8" if group else {"f32": "FP32", "bf16": "BF16", "f16": "FP16"}.get(precision, precision)
        self.settings = f"{precision}, INT8 by groups of {group}" if group else precision

    def bind(self, x):
        self.x, self.y = self.tensor(x), self.tensor(numpy.empty((len(x), self.weight.n), numpy.float32))
        for request in self.requests:
            request.set_input_tensor(self.x)
            request.set_output_tensor(self.y)
        return x

    def run(self, i):
        self.requests[i].infer()

    def result(self):
        return self.y.data


class Torch:
    """BF16: int4 is _weight_int4pack_mm_for_cpu, code - 8 times a BF16 scale plus a BF16 zero; dense is linear()."""

    package = "torch"

    def __init__(self, threads):
        import torch
        self.torch = torch
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)

    def kinds(self):
        return {"int4": lambda weight: Int4Pack(self.torch, weight), "dense": lambda weight: Linear(self.torch, weight)}


class TorchProduct(Product):
    activations = "BF16"

    def bind(self, x):
        self.x = self.torch.from_numpy(x).bfloat16()
        return self.x.float().numpy()

    def result(self):
        return self.y.float().numpy()


class Int4Pack(TorchProduct):
    def __init__(self, torch, weight):
        super().__init__(weight, packed_bytes(weight))
        self.torch, self.multiply = torch, torch.ops.aten._weight_int4pack_mm_for_cpu
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self.packed = [pack(torch.from_numpy(weight.copy_of_codes(i).astype(numpy.int32)), 1) for i in range(self.copies)]
        scales = torch.from_numpy(weight.scales).bfloat16()
        offsets = ((8 - torch.from_numpy(weight.zeros).float()) * scales.float()).bfloat16()
        self.scales = torch.stack([scales.T, offsets.T], dim=-1).contiguous()  # [K / group, N, 2]
        # The exact weight: code * scale + (offset - 8 * scale), in double.
        scales, offsets = scales.double().numpy(), offsets.double().numpy()
        self.checked = weight.checked(scales, offsets - 8 * scales)

    def run(self, i):
        self.y = self.multiply(self.x, self.packed[i], self.weight.group, self.scales)


class Linear(TorchProduct):
    def __init__(self, torch, weight):
        super().__init__(weight, 2 * weight.codes.size)
        dense = torch.from_numpy(weight.dense(numpy.float32)).bfloat16()
        self.torch, self.dense = torch, [dense.clone() for _ in range(self.copies)]
        self.checked = dense[weight.columns].double().numpy()

    def run(self, i):
        self.y = self.torch.nn.functional.linear(self.x, self.dense[i])


class Numpy:
    """sgemm of numpy's OpenBLAS with the dense weight in FP32."""

    package = "numpy"

    def __init__(self, threads):
        del threads  # OPENBLAS_NUM_THREADS

    def kinds(self):
        return {"dense": Sgemm}


class Sgemm(Product):
    activations = "FP32"

    def __init__(self, weight):
        super().__init__(weight, 4 * weight.codes.size)
        dense = weight.dense(numpy.float32)
        self.dense = [dense] + [dense.copy() for _ in range(self.copies - 1)]
        self.checked = dense[weight.columns].astype(numpy.float64)

    def bind(self, x):
        self.x, self.y = x, numpy.empty((len(x), self.weight.n), numpy.float32)
        return x

    def run(self, i):
        numpy.matmul(self.x, self.dense[i].T, out=self.y)

    def result(self):
        return self.y


PEERS = {peer.package: peer for peer in (OnnxRuntime, OpenVino, Torch, Numpy)}


def version(package):
    return importlib.metadata.version(package)
