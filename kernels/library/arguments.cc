// Arguments of the products of awqd.h, and the workspace.
#include "kernels/library/arguments.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"

namespace awqd::library {
namespace {

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

// cudaStreamLegacy, the handle of what NULL means: kernels expect a stream that has a handle.
void* const kDefaultStream = reinterpret_cast<void*>(uintptr_t{1});

StreamView MakeStream(const Device& device, const awqd_workspace& workspace, void* stream) {
  if (CounterBytes(device) == 0) return {};
  return {stream == nullptr ? kDefaultStream : stream, static_cast<uint32_t*>(workspace.data)};
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

}  // namespace

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

absl::StatusOr<ActivationFunction> ToSingleActivation(int32_t activation) {
  AWQD_ASSIGN_OR_RETURN(const ActivationFunction out, ToActivation(activation));
  if (out != ActivationFunction::kSwigluOai && out != ActivationFunction::kSitu) return out;
  return BadValue("args->activation", Name(out), "one of a single product");
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

Path ChoosePath(const DeviceWeight& weight, int64_t m, ActivationQuantization quantization) {
  return awqd::ChoosePath(weight.plan, m, quantization,
                          DenseThreshold(weight.plan, weight.shape, weight.device->info()));
}

absl::StatusOr<Path> ToPath(int32_t path, const DeviceWeight& weight, int64_t m,
                            ActivationQuantization quantization) {
  switch (path) {
    case AWQD_PATH_AUTO:
      return ChoosePath(weight, m, quantization);
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

int64_t BytesOf(const MatmulArgs& args, Path path) {
  const auto on = [&](Path taken) {
    return WorkspaceBytes(*args.weight, taken, args.x.rows, args.activation, ProductOf(args));
  };
  // Fewer tokens, of which no row takes E4M3, may be for the dense product.
  const Path of_16_bits = ChoosePath(*args.weight, args.x.rows, ActivationQuantization::kNone);
  return RoundUp(std::max({on(Path::kFused), on(path), on(of_16_bits)}), kAlign);
}

int64_t CounterBytes(const Device& device) {
  return device.info().kind == DeviceKind::kCuda ? kStreamCounters * int64_t{sizeof(uint32_t)} : 0;
}

absl::StatusOr<StreamView> Begin(const Device& device, const awqd_workspace& workspace,
                                 int64_t bytes, void* stream) {
  AWQD_RETURN_IF_ERROR(CheckStream(device, stream));
  AWQD_RETURN_IF_ERROR(CheckWorkspace(workspace, CounterBytes(device) + bytes));
  return MakeStream(device, workspace, stream);
}

void* Behind(const Device& device, const awqd_workspace& workspace) {
  return static_cast<char*>(workspace.data) + CounterBytes(device);
}

}  // namespace awqd::library
