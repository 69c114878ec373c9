// Products of awqd.h: arguments are checked and the workspace is divided here; kernels/kernels.h
// computes.
#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/kernels.h"
#include "kernels/library/objects.h"

namespace awqd::library {
namespace {

constexpr int64_t kAlign = 256;
constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

// A workspace begins with the words by which the blocks of a kernel synchronise, zero before and
// after each kernel (StreamView::counters).
int64_t CounterBytes(const Device& device) {
  return device.info().kind == DeviceKind::kCuda ? kStreamCounters * int64_t{sizeof(uint32_t)} : 0;
}

StreamView MakeStream(const Device& device, const awqd_workspace& workspace, void* stream) {
  if (CounterBytes(device) == 0) return {};
  return {stream, static_cast<uint32_t*>(workspace.data)};
}

absl::Status CheckStream(const Device& device, const void* stream) {
  if (stream == nullptr || device.info().kind == DeviceKind::kCuda) return absl::OkStatus();
  return BadValue("stream", "one", "NULL for a CPU");
}

absl::Status CheckWorkspace(const awqd_workspace& workspace, int64_t needed) {
  if (workspace.bytes < needed) {
    return BadValue("workspace.bytes", workspace.bytes, absl::StrCat("at least ", needed));
  }
  if (needed == 0) return absl::OkStatus();
  AWQD_RETURN_IF_ERROR(CheckPointer("workspace.data", workspace.data));
  if (reinterpret_cast<uintptr_t>(workspace.data) % kAlign == 0) return absl::OkStatus();
  return BadValue("workspace.data", "another address", "a multiple of 256");
}

absl::StatusOr<DType> ToDType(absl::string_view name, int32_t dtype) {
  switch (dtype) {
    case AWQD_FP16:
      return DType::kFp16;
    case AWQD_BF16:
      return DType::kBf16;
    case AWQD_FP32:
      return DType::kFp32;
    case AWQD_INT8:
      return DType::kInt8;
    case AWQD_INT32:
      return DType::kInt32;
  }
  return BadValue(name, dtype, "an awqd_dtype");
}

absl::StatusOr<DType> ToFloating(absl::string_view name, int32_t dtype) {
  AWQD_ASSIGN_OR_RETURN(const DType out, ToDType(name, dtype));
  if (IsFloating(out)) return out;
  return BadValue(name, Name(out), "FP16, BF16 or FP32");
}

absl::StatusOr<ActivationFunction> ToActivation(int32_t activation) {
  switch (activation) {
    case AWQD_NONE:
      return ActivationFunction::kNone;
    case AWQD_RELU:
      return ActivationFunction::kRelu;
    case AWQD_GELU:
      return ActivationFunction::kGelu;
    case AWQD_SILU:
      return ActivationFunction::kSilu;
    case AWQD_GELU_TANH:
      return ActivationFunction::kGeluTanh;
    case AWQD_SWIGLU_OAI:
      return ActivationFunction::kSwigluOai;
    case AWQD_SITU:
      return ActivationFunction::kSitu;
  }
  return BadValue("args->activation", activation, "an awqd_activation");
}

absl::StatusOr<ActivationQuantization> ToQuantization(int32_t quantization) {
  switch (quantization) {
    case AWQD_UNQUANTIZED:
      return ActivationQuantization::kNone;
    case AWQD_INT8_PER_TOKEN:
      return ActivationQuantization::kPerToken;
    case AWQD_INT8_STATIC:
      return ActivationQuantization::kStatic;
    case AWQD_FP8_PER_TOKEN:
      return ActivationQuantization::kFloat8PerToken;
    case AWQD_FP8_PER_BLOCK_128:
      return ActivationQuantization::kFloat8PerBlock;
    case AWQD_FP8_STATIC:
      return ActivationQuantization::kFloat8Static;
  }
  return BadValue("args->quantization", quantization, "an awqd_quantization");
}

absl::StatusOr<Path> ToPath(int32_t path, const DeviceWeight& weight, int64_t m) {
  switch (path) {
    case AWQD_PATH_AUTO:
      return m < DenseThreshold(weight.plan, weight.shape, weight.device->info())
                 ? Path::kFused
                 : Path::kDequantize;
    case AWQD_PATH_FUSED:
      return Path::kFused;
    case AWQD_PATH_DEQUANTIZE:
      return Path::kDequantize;
  }
  return BadValue("args->path", path, "an awqd_path");
}

absl::Status CheckTokens(int64_t m) {
  if (m >= 0 && m <= kMaxTokens) return absl::OkStatus();
  return BadValue("args->m", m, absl::StrCat("0 to ", kMaxTokens));
}

struct Product {
  MatmulArgs args;
  Path path = Path::kFused;
};

absl::StatusOr<Product> ReadMatmul(const awqd_weight* weight, const awqd_matmul_args* args) {
  AWQD_RETURN_IF_ERROR(CheckPointer("weight", weight));
  AWQD_RETURN_IF_ERROR(CheckStructure("args", args));
  AWQD_RETURN_IF_ERROR(CheckTokens(args->m));
  const DeviceWeight& on = *weight->weight;
  Product out;
  out.args.weight = &on;
  AWQD_ASSIGN_OR_RETURN(const DType x, ToDType("args->x_dtype", args->x_dtype));
  AWQD_ASSIGN_OR_RETURN(const DType y, ToDType("args->y_dtype", args->y_dtype));
  AWQD_ASSIGN_OR_RETURN(out.args.activation, ToActivation(args->activation));
  AWQD_ASSIGN_OR_RETURN(out.args.quantization, ToQuantization(args->quantization));
  AWQD_ASSIGN_OR_RETURN(out.path, ToPath(args->path, on, args->m));
  if (out.args.activation == ActivationFunction::kSwigluOai ||
      out.args.activation == ActivationFunction::kSitu) {
    return BadValue("args->activation", Name(out.args.activation), "one of a single product");
  }
  out.args.x = {args->x, x, args->m, on.shape.k};
  out.args.y = {args->y, y, args->m, on.shape.n};
  out.args.bias = args->bias != nullptr ? args->bias : on.bias();
  out.args.scales = args->scales;
  return out;
}

// For this number of tokens and any smaller one, whose path may be another.
int64_t BytesOf(const MatmulArgs& args) {
  const auto on = [&](Path path) {
    return WorkspaceBytes(*args.weight, path, args.x.rows, args.activation, ProductOf(args));
  };
  return RoundUp(std::max(on(Path::kFused), on(Path::kDequantize)), kAlign);
}

int64_t BytesOf(const DequantizeArgs& args) {
  return DequantizeWorkspaceBytes(*args.weight, args.out.cols, args.out.dtype);
}

absl::StatusOr<DequantizeArgs> ReadDequantize(const awqd_weight* weight,
                                              const awqd_dequantize_args* args) {
  AWQD_RETURN_IF_ERROR(CheckPointer("weight", weight));
  AWQD_RETURN_IF_ERROR(CheckStructure("args", args));
  const DeviceWeight& on = *weight->weight;
  AWQD_ASSIGN_OR_RETURN(const DType dtype, ToFloating("args->dtype", args->dtype));
  if (on.transforms_input()) {
    return absl::UnimplementedError(
        "dequantize: got a weight that transforms x first, expected one that does not");
  }
  return DequantizeArgs{.weight = &on,
                        .out = {args->out, dtype, args->rows, args->cols},
                        .row_begin = args->row,
                        .col_begin = args->col};
}

// A gated MLP: its three products, and gate times up between them. Gate and up are FP32 [M, middle],
// one after the other; the second product of the MLP reads them where they are.
struct GatedMlp {
  Product gate, up, down;  // without workspace
  GateArgs middle;
  Device* device = nullptr;

  int64_t middle_bytes() const { return 2 * RoundUp(middle.count * 4, kAlign); }
  int64_t bytes() const {
    return middle_bytes() + std::max({BytesOf(gate.args), BytesOf(up.args), BytesOf(down.args)});
  }
};

absl::Status CheckMiddle(absl::string_view name, const awqd_weight& weight, const awqd_weight& gate,
                         int64_t k, int64_t n) {
  const WeightShape& shape = weight.weight->shape;
  if (weight.device != gate.device) {
    return BadValue(
        name, absl::StrCat("a weight on ", weight.device->info().id),
        absl::StrCat("one of the same awqd_device as args->gate, ", gate.device->info().id));
  }
  if (shape.k == k && (n == 0 || shape.n == n)) return absl::OkStatus();
  return BadValue(name, absl::StrCat("[", shape.k, ", ", shape.n, "]"),
                  n == 0 ? absl::StrCat("[", k, ", N]") : absl::StrCat("[", k, ", ", n, "]"));
}

absl::StatusOr<GatedMlp> ReadGatedMlp(const awqd_gated_mlp_args* args) {
  AWQD_RETURN_IF_ERROR(CheckStructure("args", args));
  AWQD_RETURN_IF_ERROR(CheckPointer("args->gate", args->gate));
  AWQD_RETURN_IF_ERROR(CheckPointer("args->up", args->up));
  AWQD_RETURN_IF_ERROR(CheckPointer("args->down", args->down));
  AWQD_RETURN_IF_ERROR(CheckTokens(args->m));
  const DeviceWeight& gate = *args->gate->weight;
  const int64_t m = args->m, k = gate.shape.k, middle = gate.shape.n;
  AWQD_RETURN_IF_ERROR(CheckMiddle("args->up", *args->up, *args->gate, k, middle));
  AWQD_RETURN_IF_ERROR(CheckMiddle("args->down", *args->down, *args->gate, middle, 0));
  AWQD_ASSIGN_OR_RETURN(const DType x, ToFloating("args->x_dtype", args->x_dtype));
  AWQD_ASSIGN_OR_RETURN(const DType y, ToFloating("args->y_dtype", args->y_dtype));
  GatedMlp out;
  AWQD_ASSIGN_OR_RETURN(out.middle.activation, ToActivation(args->activation));
  if (args->limit > 0) out.middle.parameters.limit = args->limit;
  out.middle.parameters.alpha = args->alpha;
  out.middle.parameters.beta = args->beta;
  out.middle.parameters.linear_beta = args->linear_beta;
  out.middle.count = m * middle;
  out.device = gate.device;
  const auto product = [&](const awqd_weight* weight) -> absl::StatusOr<Product> {
    const DeviceWeight& on = *weight->weight;
    AWQD_ASSIGN_OR_RETURN(const Path path, ToPath(args->path, on, m));
    return Product{{.weight = &on,
                    .x = {args->x, x, m, k},
                    .y = {nullptr, DType::kFp32, m, middle},
                    .bias = on.bias()},
                   path};
  };
  AWQD_ASSIGN_OR_RETURN(out.gate, product(args->gate));
  AWQD_ASSIGN_OR_RETURN(out.up, product(args->up));
  AWQD_ASSIGN_OR_RETURN(out.down, product(args->down));
  out.down.args.x = {nullptr, DType::kFp32, m, middle};
  out.down.args.y = {args->y, y, m, out.down.args.weight->shape.n};
  return out;
}

absl::Status Run(GatedMlp mlp, const awqd_workspace& workspace, StreamView stream) {
  auto* const data = static_cast<char*>(workspace.data) + CounterBytes(*mlp.device);
  mlp.middle.gate = mlp.gate.args.y.data = data;
  mlp.middle.up = mlp.up.args.y.data = data + mlp.middle_bytes() / 2;
  mlp.down.args.x.data = data;
  for (Product* product : {&mlp.gate, &mlp.up, &mlp.down}) {
    product->args.workspace = data + mlp.middle_bytes();
  }
  AWQD_RETURN_IF_ERROR(QuantizedMatmul(mlp.gate.args, mlp.gate.path, stream));
  AWQD_RETURN_IF_ERROR(QuantizedMatmul(mlp.up.args, mlp.up.path, stream));
  AWQD_RETURN_IF_ERROR(MultiplyByUp(mlp.middle, *mlp.device, stream));
  return QuantizedMatmul(mlp.down.args, mlp.down.path, stream);
}

// The checks that each call makes before it enqueues, and its stream.
absl::StatusOr<StreamView> Begin(const Device& device, const awqd_workspace& workspace,
                                 int64_t bytes, void* stream) {
  AWQD_RETURN_IF_ERROR(CheckStream(device, stream));
  AWQD_RETURN_IF_ERROR(CheckWorkspace(workspace, CounterBytes(device) + bytes));
  return MakeStream(device, workspace, stream);
}

void* Behind(const Device& device, const awqd_workspace& workspace) {
  return static_cast<char*>(workspace.data) + CounterBytes(device);
}

}  // namespace
}  // namespace awqd::library

using namespace awqd::library;  // NOLINT: the functions below are in no namespace

int awqd_workspace_init(awqd_device* device, awqd_workspace workspace, void* stream) {
  return Call([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(CheckPointer("device", device));
    awqd::Device& on = *device->device;
    const int64_t bytes = CounterBytes(on);
    AWQD_ASSIGN_OR_RETURN(const awqd::StreamView view, Begin(on, workspace, 0, stream));
    if (bytes == 0) return absl::OkStatus();
    static const uint32_t kZeros[awqd::kStreamCounters] = {};
    return on.CopyToDevice(workspace.data, kZeros, bytes, view);
  });
}

int awqd_matmul_workspace(const awqd_weight* weight, const awqd_matmul_args* args, int64_t* bytes) {
  return Call([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(CheckPointer("bytes", bytes));
    AWQD_ASSIGN_OR_RETURN(const Product product, ReadMatmul(weight, args));
    *bytes = CounterBytes(*weight->device) + BytesOf(product.args);
    return absl::OkStatus();
  });
}

int awqd_matmul(const awqd_weight* weight, const awqd_matmul_args* args, awqd_workspace workspace,
                void* stream) {
  return Call([&]() -> absl::Status {
    AWQD_ASSIGN_OR_RETURN(Product product, ReadMatmul(weight, args));
    AWQD_ASSIGN_OR_RETURN(const awqd::StreamView view,
                          Begin(*weight->device, workspace, BytesOf(product.args), stream));
    if (args->m > 0) {
      AWQD_RETURN_IF_ERROR(CheckPointer("args->x", args->x));
      AWQD_RETURN_IF_ERROR(CheckPointer("args->y", args->y));
    }
    product.args.workspace = Behind(*weight->device, workspace);
    return awqd::QuantizedMatmul(product.args, product.path, view);
  });
}

int awqd_gated_mlp_workspace(const awqd_gated_mlp_args* args, int64_t* bytes) {
  return Call([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(CheckPointer("bytes", bytes));
    AWQD_ASSIGN_OR_RETURN(const GatedMlp mlp, ReadGatedMlp(args));
    *bytes = CounterBytes(*mlp.device) + mlp.bytes();
    return absl::OkStatus();
  });
}

int awqd_gated_mlp(const awqd_gated_mlp_args* args, awqd_workspace workspace, void* stream) {
  return Call([&]() -> absl::Status {
    AWQD_ASSIGN_OR_RETURN(const GatedMlp mlp, ReadGatedMlp(args));
    AWQD_ASSIGN_OR_RETURN(const awqd::StreamView view,
                          Begin(*mlp.device, workspace, mlp.bytes(), stream));
    if (args->m == 0) return absl::OkStatus();
    AWQD_RETURN_IF_ERROR(CheckPointer("args->x", args->x));
    AWQD_RETURN_IF_ERROR(CheckPointer("args->y", args->y));
    return Run(mlp, workspace, view);
  });
}

int awqd_dequantize_workspace(const awqd_weight* weight, const awqd_dequantize_args* args,
                              int64_t* bytes) {
  return Call([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(CheckPointer("bytes", bytes));
    AWQD_ASSIGN_OR_RETURN(const awqd::DequantizeArgs block, ReadDequantize(weight, args));
    *bytes = CounterBytes(*weight->device) + BytesOf(block);
    return absl::OkStatus();
  });
}

int awqd_dequantize(const awqd_weight* weight, const awqd_dequantize_args* args,
                    awqd_workspace workspace, void* stream) {
  return Call([&]() -> absl::Status {
    AWQD_ASSIGN_OR_RETURN(const awqd::DequantizeArgs block, ReadDequantize(weight, args));
    AWQD_ASSIGN_OR_RETURN(const awqd::StreamView view,
                          Begin(*weight->device, workspace, BytesOf(block), stream));
    if (args->rows > 0 && args->cols > 0)
      AWQD_RETURN_IF_ERROR(CheckPointer("args->out", args->out));
    return awqd::Dequantize(block, Behind(*weight->device, workspace), view);
  });
}
