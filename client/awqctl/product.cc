// awqctl matmul and mlp: a weight, a stack of experts or a gated MLP in one call. Operands are
// read, drawn, or put into shared memory; the result is printed and written. awqctl quantize-kv: a
// block of keys or values to 4-bit codes and back, and what that lost.
#include <algorithm>
#include <cmath>
#include <functional>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/awqctl/commands.h"
#include "client/bench/payload.h"
#include "client/files/npy.h"
#include "client/files/tensor_file.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "nlohmann/json.hpp"

namespace awqd::awqctl {
namespace {

// The most that --random draws. With its names a request must stay below Protocol Buffers' 2 GiB.
// Shared memory has no such bound; there it is 4 GiB of floats, drawn before they are converted.
constexpr int64_t kMostRequestBytes = (int64_t{1} << 31) - 65536;
constexpr int64_t kMostSharedValues = int64_t{1} << 30;

// The operands of a product. Tensors that lie in `memory` have no bytes.
struct Operands {
  client::Tensor activations;
  std::optional<client::Routing> routing;
  std::optional<client::Router> router;
  client::SharedMemory memory;
  std::optional<v1::SharedMemory> shared_activations, shared_output;
};

bool IsStack(const std::string& path) { return absl::StrContains(path, "*"); }

// A .npy file, converted to `dtype` unless that is unspecified. Errors are FileFailed.
absl::StatusOr<client::Tensor> ReadTensor(const std::string& path, client::DType dtype) try {
  absl::StatusOr<client::NpyArray> array = client::ReadNpy(path);
  if (!array.ok()) return FileFailed(array.status());
  absl::StatusOr<client::Tensor> tensor = client::ToTensor(*std::move(array));
  if (tensor.ok() && dtype != v1::DTYPE_UNSPECIFIED) tensor = client::Convert(*tensor, dtype);
  return tensor.ok() ? tensor : FileFailed(Prefixed(path, tensor.status()));
} catch (const std::bad_alloc&) {  // more than the file takes, once it is converted
  return FileFailed(
      absl::ResourceExhaustedError(absl::StrCat(path, ": not enough memory to convert it")));
}

// Writes all or nothing; BF16 as FP32, which holds it exactly. Errors are FileFailed.
absl::Status WriteNpy(const std::string& path, const client::Tensor& output) {
  const auto write = [&]() -> absl::Status {
    AWQD_ASSIGN_OR_RETURN(const client::Tensor tensor,
                          output.dtype == v1::BF16 ? client::Convert(output, v1::FP32) : output);
    AWQD_ASSIGN_OR_RETURN(const auto writer, client::TensorFileWriter::Create(
                                                 path, "output", tensor.dtype, tensor.shape));
    AWQD_RETURN_IF_ERROR(writer->Append(tensor.bytes));
    return writer->Commit();
  };
  return FileFailed(write());
}

void Print(const Flags& flags, const client::MatmulResult& result, absl::Duration elapsed,
           Console& console) {
  const v1::Execution& ran = result.execution;
  const double latency_ms = absl::ToDoubleMilliseconds(elapsed);
  if (flags.json) {
    nlohmann::ordered_json json = {{"dtype", std::string(client::Name(result.output.dtype))},
                                   {"shape", result.output.shape},
                                   {"path", PathName(ran.path())},
                                   {"kernel", ran.kernel()},
                                   {"device", ran.device()},
                                   {"batch_tokens", ran.batch_tokens()},
                                   {"batch_requests", ran.batch_requests()},
                                   {"queue_us", ran.queue_us()},
                                   {"compute_us", ran.compute_us()},
                                   {"latency_ms", latency_ms},
                                   {"output", flags.output}};
    PrintJson(json, console);
    return;
  }
  console.out << absl::StrFormat(
      "%s %s  path %s  kernel %s  device %s  latency %.3f ms (queue %.3f, compute %.3f)\n",
      client::Name(result.output.dtype), client::ShapeString(result.output.shape),
      PathName(ran.path()), OneLine(ran.kernel()), OneLine(ran.device()), latency_ms,
      static_cast<double>(ran.queue_us()) / 1000, static_cast<double>(ran.compute_us()) / 1000);
  if (!flags.output.empty()) console.out << "wrote " << flags.output << "\n";
}

// FP16 [tokens, k], or of another dtype, uniform in [-1, 1).
absl::StatusOr<client::Tensor> DrawActivations(const Flags& flags, int64_t k) {
  const int64_t tokens = *flags.random_tokens;
  const client::DType dtype = flags.dtype == v1::DTYPE_UNSPECIFIED ? v1::FP16 : flags.dtype;
  const int64_t most =
      flags.shared_memory ? kMostSharedValues : kMostRequestBytes / client::SizeOf(dtype);
  int64_t count = 0;
  if (__builtin_mul_overflow(tokens, k, &count) || count < 0 || count > most) {
    return Invalid("--random: got ", tokens, " x ", k, " values of ", client::Name(dtype),
                   ", expected at most ", most);
  }
  return client::Tensor::FromFloats(dtype, {tokens, k}, bench::UniformValues(count, flags.seed));
}

absl::StatusOr<client::Routing> ReadRouting(const Flags& flags) {
  client::Routing out;
  AWQD_ASSIGN_OR_RETURN(out.expert_ids, ReadTensor(flags.expert_ids, v1::DTYPE_UNSPECIFIED));
  if (flags.router_weights.empty()) return out;
  AWQD_ASSIGN_OR_RETURN(out.router_weights,
                        ReadTensor(flags.router_weights, v1::DTYPE_UNSPECIFIED));
  return out;
}

// A file that may be left out.
absl::StatusOr<std::optional<client::Tensor>> ReadOptional(const std::string& path) {
  if (path.empty()) return std::nullopt;
  return ReadTensor(path, v1::DTYPE_UNSPECIFIED);
}

absl::StatusOr<client::Router> ReadRouter(const Flags& flags) {
  const RouterFlags& from = flags.router;
  if (!flags.top_k) {
    return BadArguments(Invalid("--top_k: got none, expected a number with --router_logits"));
  }
  client::Router out = {.top_k = static_cast<int32_t>(*flags.top_k),
                        .scoring = from.scoring,
                        .n_group = from.n_group,
                        .topk_group = from.topk_group,
                        .norm_topk_prob = from.norm_topk_prob,
                        .routed_scaling_factor = from.routed_scaling_factor};
  AWQD_ASSIGN_OR_RETURN(out.logits, ReadTensor(from.logits, v1::DTYPE_UNSPECIFIED));
  AWQD_ASSIGN_OR_RETURN(out.correction_bias, ReadOptional(from.correction_bias));
  return out;
}

// The routing that the flags give, or one that is drawn for a stack of experts. `target` is there
// where something is drawn.
absl::StatusOr<std::optional<client::Routing>> MakeRouting(
    const Flags& flags, const std::optional<ProductTarget>& target) {
  if (!flags.expert_ids.empty()) return ReadRouting(flags);
  const int64_t experts = target.has_value() ? target->experts : 0;
  if (flags.top_k.has_value() && experts == 0) {
    return BadArguments(
        Invalid("--top_k: got a number, expected none: there are no experts to draw"));
  }
  if (!flags.random_tokens.has_value() || experts == 0) return std::nullopt;
  const int64_t top_k = flags.top_k.value_or(std::min<int64_t>(2, experts));
  auto routing = bench::RandomRouting(*flags.random_tokens, top_k, experts, flags.seed);
  if (!routing.ok()) return BadArguments(routing.status());
  return *std::move(routing);
}

// Reads or draws.
absl::StatusOr<Operands> MakeOperands(const Flags& flags,
                                      const std::optional<ProductTarget>& target) {
  Operands out;
  if (flags.random_tokens.has_value()) {
    auto drawn = DrawActivations(flags, target->k);
    if (!drawn.ok()) return BadArguments(drawn.status());
    out.activations = *std::move(drawn);
  } else {
    AWQD_ASSIGN_OR_RETURN(out.activations, ReadTensor(flags.input, flags.dtype));
  }
  if (!flags.router.logits.empty()) {
    AWQD_ASSIGN_OR_RETURN(out.router, ReadRouter(flags));
  } else {
    AWQD_ASSIGN_OR_RETURN(out.routing, MakeRouting(flags, target));
  }
  return out;
}

// For --shared_memory: activations and answer, one after the other.
absl::Status MoveToSharedMemory(const Flags& flags, client::Client& client,
                                const ProductTarget& target, Operands& operands) {
  client::Tensor& x = operands.activations;
  const auto in = static_cast<int64_t>(x.bytes.size());
  const bool scaled = flags.activation_scale.has_value() || !flags.activation_scales.empty();
  const client::DType of_int8 = scaled ? v1::FP16 : v1::INT32;
  const client::DType same = x.dtype == v1::INT8       ? of_int8
                             : x.dtype == v1::FP8_E4M3 ? v1::FP16
                                                       : x.dtype;
  const client::DType dtype =
      flags.output_dtype == v1::DTYPE_UNSPECIFIED ? same : flags.output_dtype;
  const int64_t k = x.shape.empty() ? 0 : x.shape.back();
  int64_t rows = k == 0 ? 0 : in / client::SizeOf(x.dtype) / k;
  if (operands.routing && !operands.routing->router_weights) {
    rows = static_cast<int64_t>(operands.routing->expert_ids.bytes.size() / sizeof(int32_t));
  }
  int64_t out = 0;
  if (__builtin_mul_overflow(rows * client::SizeOf(dtype), target.n, &out)) {
    return Invalid("output: the answer would pass 2^63 bytes");
  }
  AWQD_ASSIGN_OR_RETURN(operands.memory, CreateSharedMemory(flags, client, in + out));
  x.bytes.copy(operands.memory.data(), x.bytes.size());
  x.bytes.clear();
  operands.shared_activations = operands.memory.Range(0, in);
  operands.shared_output = operands.memory.Range(in, out);
  return absl::OkStatus();
}

absl::Status CheckOutput(const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  const auto format = client::TensorFileFormatOf(path, v1::FP32);
  if (!format.ok()) return BadArguments(format.status());
  if (*format == client::TensorFileFormat::kNpy) return absl::OkStatus();
  return BadArguments(Invalid("output: got '", path, "', expected .npy"));
}

// Sends the operands, whose tensors it may move away.
using SendProduct = std::function<absl::StatusOr<client::MatmulResult>(Operands& operands)>;

// `first` and `last`: the paths that the activations go to and that the answer comes from.
absl::StatusOr<int> RunProduct(const Flags& flags, client::Client& client, Console& console,
                               const std::string& first, const std::string& last,
                               const SendProduct& send) {
  AWQD_RETURN_IF_ERROR(CheckOutput(flags.output));
  std::optional<ProductTarget> target;
  if (flags.random_tokens.has_value() || flags.shared_memory) {
    AWQD_ASSIGN_OR_RETURN(target, FindTarget(flags, client, flags.model, first, last));
  }
  AWQD_ASSIGN_OR_RETURN(Operands operands, MakeOperands(flags, target));
  if (flags.shared_memory) {
    AWQD_RETURN_IF_ERROR(MoveToSharedMemory(flags, client, *target, operands));
  }
  const absl::Time start = absl::Now();
  AWQD_ASSIGN_OR_RETURN(client::MatmulResult result, send(operands));
  const absl::Duration elapsed = absl::Now() - start;
  if (const auto& range = operands.shared_output) {
    result.output.bytes.assign(operands.memory.data() + range->offset(),
                               static_cast<size_t>(range->size()));
  }
  if (!flags.output.empty()) AWQD_RETURN_IF_ERROR(WriteNpy(flags.output, result.output));
  Print(flags, result, elapsed, console);
  return kOk;
}

// The fields that calls for a weight, a stack and an MLP have in common.
template <typename Call>
Call WithOperands(Call call, const Flags& flags, Operands& operands) {
  call.activations = std::move(operands.activations);
  call.output_dtype = flags.output_dtype;
  call.path = flags.path;
  call.activation_function = flags.activation_function;
  call.activation_quantization = flags.quantize_activations;
  call.shared_activations = operands.shared_activations;
  call.shared_output = operands.shared_output;
  return call;
}

// Scales of quantised activations: a number, those of a file, or none.
absl::StatusOr<std::optional<client::Tensor>> ReadScales(const std::optional<double>& scale,
                                                         const std::string& file) {
  if (scale.has_value()) {
    const std::vector<float> one = {static_cast<float>(*scale)};
    return client::Tensor::FromFloats(v1::FP32, {1}, one);
  }
  if (file.empty()) return std::nullopt;
  return ReadTensor(file, v1::FP32);
}

// --- Keys and values ---

// |A - B| / |B|, Frobenius norms over the elements that are numbers.
double RelativeError(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    if (!std::isfinite(b[i])) continue;
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

absl::Status WriteKv(const std::string& prefix, const client::QuantizeKvResult& result) {
  for (const auto& [name, tensor] : {std::pair{"codes", &result.codes},
                                     {"scales", &*result.scales},
                                     {"zeros", &*result.zeros}}) {
    AWQD_RETURN_IF_ERROR(WriteNpy(absl::StrCat(prefix, ".", name, ".npy"), *tensor));
  }
  return absl::OkStatus();
}

void Print(const Flags& flags, const client::QuantizeKvResult& result, int64_t bytes_before,
           double error, Console& console) {
  const v1::Execution& ran = result.execution;
  const auto bytes = static_cast<int64_t>(result.codes.bytes.size() + result.scales->bytes.size() +
                                          result.zeros->bytes.size());
  if (flags.json) {
    const nlohmann::ordered_json json = {{"codes_shape", result.codes.shape},
                                         {"scales_shape", result.scales->shape},
                                         {"scale_dtype", client::Name(result.scales->dtype)},
                                         {"bytes_before", bytes_before},
                                         {"bytes", bytes},
                                         {"relative_error", error},
                                         {"kernel", ran.kernel()},
                                         {"device", ran.device()},
                                         {"compute_us", ran.compute_us()},
                                         {"output", flags.output}};
    PrintJson(json, console);
    return;
  }
  console.out << absl::StrFormat(
      "codes %s, scales and zeros %s %s: %s of %s, relative error %.3g  kernel %s  device %s  "
      "compute %.3f ms\n",
      client::ShapeString(result.codes.shape), client::Name(result.scales->dtype),
      client::ShapeString(result.scales->shape), FormatBytes(bytes), FormatBytes(bytes_before),
      error, OneLine(ran.kernel()), OneLine(ran.device()),
      static_cast<double>(ran.compute_us()) / 1000);
  if (flags.output.empty()) return;
  console.out << "wrote " << flags.output << ".codes.npy, .scales.npy and .zeros.npy\n";
}

}  // namespace

absl::StatusOr<ProductTarget> FindTarget(const Flags& flags, client::Client& client,
                                         const std::string& model, const std::string& first,
                                         const std::string& last) {
  AWQD_ASSIGN_OR_RETURN(ProductTarget target,
                        FindWeight(flags, client, {model, first}, IsStack(first)));
  if (last == first) return target;
  AWQD_ASSIGN_OR_RETURN(const ProductTarget end,
                        FindWeight(flags, client, {model, last}, IsStack(last)));
  target.n = end.n;
  return target;
}

absl::StatusOr<int> Matmul(const Flags& flags, client::Client& client, Console& console) {
  const client::WeightName name = {flags.model, flags.weight};
  AWQD_ASSIGN_OR_RETURN(std::optional<client::Tensor> bias, ReadOptional(flags.bias));
  AWQD_ASSIGN_OR_RETURN(std::optional<client::Tensor> scales,
                        ReadScales(flags.activation_scale, flags.activation_scales));
  const bool stack = IsStack(flags.weight);
  const client::CallOptions deadline = Deadline(flags);
  const auto send = [&](Operands& operands) -> absl::StatusOr<client::MatmulResult> {
    if (!stack) {
      auto call = WithOperands(client::MatmulCall{.weight = name}, flags, operands);
      call.bias = std::move(bias);
      call.activation_scales = std::move(scales);
      return client.QuantizedMatmul(std::move(call), deadline);
    }
    if (!operands.routing && !operands.router) {
      return Invalid("--expert_ids: got none, expected a file, --router_logits or --random");
    }
    auto call = WithOperands(client::GroupedMatmulCall{.stack = name}, flags, operands);
    if (operands.routing) call.routing = *std::move(operands.routing);
    call.router = std::move(operands.router);
    call.bias = std::move(bias);
    call.activation_scales = std::move(scales);
    return client.GroupedQuantizedMatmul(std::move(call), deadline);
  };
  return RunProduct(flags, client, console, flags.weight, flags.weight, send);
}

absl::StatusOr<int> Mlp(const Flags& flags, client::Client& client, Console& console) {
  v1::GatedMlpRef mlp;
  mlp.set_model(flags.model);
  mlp.set_path(flags.weight);
  mlp.set_gate(flags.gate);
  mlp.set_up(flags.up);
  mlp.set_down(flags.down);
  mlp.set_shared_expert(flags.shared_expert);
  client::GatedMlpCall common = {.mlp = mlp};
  AWQD_ASSIGN_OR_RETURN(common.activation_scales,
                        ReadScales(flags.activation_scale, flags.activation_scales));
  AWQD_ASSIGN_OR_RETURN(common.down_activation_scales,
                        ReadScales(flags.down_activation_scale, flags.down_activation_scales));
  AWQD_ASSIGN_OR_RETURN(common.gate_bias, ReadOptional(flags.gate_bias));
  AWQD_ASSIGN_OR_RETURN(common.up_bias, ReadOptional(flags.up_bias));
  AWQD_ASSIGN_OR_RETURN(common.down_bias, ReadOptional(flags.down_bias));
  AWQD_ASSIGN_OR_RETURN(common.shared_expert_gate, ReadOptional(flags.shared_expert_gate));
  const auto send = [&](Operands& operands) {
    auto call = WithOperands(std::move(common), flags, operands);
    call.routing = std::move(operands.routing);
    call.router = std::move(operands.router);
    if (call.activation_function == v1::NONE) call.activation_function = v1::SILU;
    call.activation_parameters = flags.activation_parameters;
    return client.GatedMlp(std::move(call), Deadline(flags));
  };
  return RunProduct(flags, client, console,
                    flags.gate.empty() ? flags.weight + ".gate_proj" : flags.gate,
                    flags.down.empty() ? flags.weight + ".down_proj" : flags.down, send);
}

absl::StatusOr<int> QuantizeKv(const Flags& flags, client::Client& client, Console& console) {
  AWQD_ASSIGN_OR_RETURN(const client::Tensor block, ReadTensor(flags.input, flags.dtype));
  const auto before = block.ToFloats();
  if (!before.ok()) return FileFailed(before.status());
  const client::CallOptions deadline = Deadline(flags);
  AWQD_ASSIGN_OR_RETURN(
      const client::QuantizeKvResult result,
      client.QuantizeKv({.block = block, .scale_dtype = flags.scale_dtype}, deadline));
  if (!result.scales.has_value()) return absl::InternalError("the answer has no scales");
  AWQD_ASSIGN_OR_RETURN(const client::DequantizeKvResult again,
                        client.DequantizeKv({.codes = result.codes,
                                             .scales = *result.scales,
                                             .zeros = *result.zeros,
                                             .head_dim = block.shape.back(),
                                             .output_dtype = v1::FP32},
                                            deadline));
  if (!flags.output.empty()) AWQD_RETURN_IF_ERROR(WriteKv(flags.output, result));
  const double error = RelativeError(*again.output.ToFloats(), *before);
  Print(flags, result, static_cast<int64_t>(block.bytes.size()), error, console);
  return kOk;
}

}  // namespace awqd::awqctl
