// InferRequest: a request of a bench in the words of the Open Inference Protocol.
#pragma once

#include <optional>

#include "absl/status/statusor.h"
#include "client/awqd_client.h"
#include "client/bench/plan.h"
#include "client/tensor.h"
#include "inference/grpc_service.pb.h"

namespace awqd::bench {

inline constexpr char kModelInfer[] = "/inference.GRPCInferenceService/ModelInfer";

// What the protocol calls the weight, the stack or the MLP: "m/layer", "m/mlp:gated_mlp".
std::string InferName(const WeightShare& weight);

// The same product that awqd.v1 would be asked for, with tensors in raw_input_contents. `routing`:
// of experts.
inference::ModelInferRequest InferRequest(const Plan& plan, const WeightShare& weight,
                                          client::Tensor x, std::optional<client::Routing> routing);

}  // namespace awqd::bench
