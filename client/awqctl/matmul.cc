// awqctl matmul and mlp: a weight, a stack of experts or a gated MLP in one call.
#include <optional>
#include <utility>
#include <vector>

#include "client/awqctl/commands.h"
#include "client/awqctl/product.h"

namespace awqd::awqctl {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(60);

// Scales of quantised activations, if the flags give any.
absl::StatusOr<std::optional<client::Tensor>> ActivationScales(const Flags& flags) {
  absl::StatusOr<client::Tensor> scales;
  if (flags.activation_scale.has_value()) {
    const std::vector<float> one = {static_cast<float>(*flags.activation_scale)};
    scales = client::Tensor::FromFloats(v1::FP32, {1}, one);
  } else if (!flags.activation_scales.empty()) {
    scales = ReadTensor(flags.activation_scales, v1::FP32);
  } else {
    return std::nullopt;
  }
  if (!scales.ok()) return scales.status();
  return *std::move(scales);
}

absl::StatusOr<client::MatmulResult> SendGrouped(const Flags& flags, client::Client& client,
                                                 std::optional<client::Tensor> bias,
                                                 Operands operands) {
  if (!operands.routing.has_value()) {
    return absl::InvalidArgumentError("--expert_ids: got none, expected a file, or --random");
  }
  return client.GroupedQuantizedMatmul(
      {.stack = client::WeightName{flags.model, flags.weight},
       .activations = std::move(operands.activations),
       .routing = *std::move(operands.routing),
       .bias = std::move(bias),
       .output_dtype = flags.output_dtype,
       .path = flags.path,
       .activation_function = flags.activation_function,
       .shared_activations = std::move(operands.shared_activations),
       .shared_output = std::move(operands.shared_output)},
      Deadline(flags, kCallTimeout));
}

}  // namespace

int Matmul(const Flags& flags, client::Client& client, Console& console) {
  std::optional<client::Tensor> bias;
  if (!flags.bias.empty()) {
    auto read = ReadTensor(flags.bias, v1::DTYPE_UNSPECIFIED);
    if (!read.ok()) return FileFailed(read.status(), console);
    bias = *std::move(read);
  }
  auto scales = ActivationScales(flags);
  if (!scales.ok()) return FileFailed(scales.status(), console);
  const bool quantized =
      scales->has_value() || flags.quantize_activations != v1::ACTIVATIONS_AS_SENT;
  if (quantized && IsStack(flags.weight)) {
    return BadArguments(absl::InvalidArgumentError(
                            "--quantize_activations: got a stack of experts, expected a weight"),
                        console);
  }
  const ProductPaths paths = {flags.weight, flags.weight};
  return RunProduct(flags, client, console, paths, [&](Operands operands) {
    if (IsStack(flags.weight)) {
      return SendGrouped(flags, client, std::move(bias), std::move(operands));
    }
    return client.QuantizedMatmul({.weight = client::WeightName{flags.model, flags.weight},
                                   .activations = std::move(operands.activations),
                                   .bias = std::move(bias),
                                   .output_dtype = flags.output_dtype,
                                   .path = flags.path,
                                   .activation_function = flags.activation_function,
                                   .activation_quantization = flags.quantize_activations,
                                   .activation_scales = *std::move(scales),
                                   .shared_activations = std::move(operands.shared_activations),
                                   .shared_output = std::move(operands.shared_output)},
                                  Deadline(flags, kCallTimeout));
  });
}

int Mlp(const Flags& flags, client::Client& client, Console& console) {
  v1::GatedMlpRef mlp;
  mlp.set_model(flags.model);
  mlp.set_path(flags.weight);
  mlp.set_gate(flags.gate);
  mlp.set_up(flags.up);
  mlp.set_down(flags.down);
  ProductPaths paths = PathsOfMlp(flags.weight);
  if (!flags.gate.empty()) paths.first = flags.gate;
  if (!flags.down.empty()) paths.last = flags.down;
  return RunProduct(flags, client, console, paths, [&](Operands operands) {
    return client.GatedMlp(
        {.mlp = mlp,
         .activations = std::move(operands.activations),
         .routing = std::move(operands.routing),
         .output_dtype = flags.output_dtype,
         .path = flags.path,
         .activation_function =
             flags.activation_function == v1::NONE ? v1::SILU : flags.activation_function,
         .shared_activations = std::move(operands.shared_activations),
         .shared_output = std::move(operands.shared_output)},
        Deadline(flags, absl::Seconds(60)));
  });
}

}  // namespace awqd::awqctl
