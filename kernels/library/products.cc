// Products of awqd.h: arguments are checked and the workspace is divided here; kernels/kernels.h
// computes.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/kernels.h"
#include "kernels/library/arguments.h"
#include "kernels/library/objects.h"

namespace awqd::library {
namespace {

struct Product {
  MatmulArgs args;
  Path path = Path::kFused;

  int64_t bytes() const { return BytesOf(args, path); }  // of the workspace
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
  AWQD_ASSIGN_OR_RETURN(out.args.activation, ToSingleActivation(args->activation));
  AWQD_ASSIGN_OR_RETURN(out.args.quantization, ToQuantization(args->quantization));
  AWQD_ASSIGN_OR_RETURN(out.path, ToPath(args->path, on, args->m, out.args.quantization));
  out.args.x = {args->x, x, args->m, on.shape.k};
  out.args.y = {args->y, y, args->m, on.shape.n};
  out.args.bias = args->bias != nullptr ? args->bias : on.bias();
  out.args.scales = args->scales;
  return out;
}

int64_t BytesOfBlock(const DequantizeArgs& args) {
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
    return middle_bytes() + std::max({gate.bytes(), up.bytes(), down.bytes()});
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
  AWQD_ASSIGN_OR_RETURN(out.middle, ReadGate(*args));
  out.middle.count = m * middle;
  out.device = gate.device;
  const auto product = [&](const awqd_weight* weight) -> absl::StatusOr<Product> {
    const DeviceWeight& on = *weight->weight;
    AWQD_ASSIGN_OR_RETURN(const Path path,
                          ToPath(args->path, on, m, ActivationQuantization::kNone));
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
    *bytes = CounterBytes(*weight->device) + product.bytes();
    return absl::OkStatus();
  });
}

int awqd_matmul(const awqd_weight* weight, const awqd_matmul_args* args, awqd_workspace workspace,
                void* stream) {
  return Call([&]() -> absl::Status {
    AWQD_ASSIGN_OR_RETURN(Product product, ReadMatmul(weight, args));
    AWQD_ASSIGN_OR_RETURN(const awqd::StreamView view,
                          Begin(*weight->device, workspace, product.bytes(), stream));
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
    *bytes = CounterBytes(*weight->device) + BytesOfBlock(block);
    return absl::OkStatus();
  });
}

int awqd_dequantize(const awqd_weight* weight, const awqd_dequantize_args* args,
                    awqd_workspace workspace, void* stream) {
  return Call([&]() -> absl::Status {
    AWQD_ASSIGN_OR_RETURN(const awqd::DequantizeArgs block, ReadDequantize(weight, args));
    AWQD_ASSIGN_OR_RETURN(const awqd::StreamView view,
                          Begin(*weight->device, workspace, BytesOfBlock(block), stream));
    if (args->rows > 0 && args->cols > 0)
      AWQD_RETURN_IF_ERROR(CheckPointer("args->out", args->out));
    return awqd::Dequantize(block, Behind(*weight->device, workspace), view);
  });
}
