// WeightStack: the experts of one projection of a mixture of experts, as one thing to multiply by.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/expert_path.h"
#include "server/model/placed_weight.h"

namespace awqd::model {

// One or more experts, by number. Alike: same K, N and description, all with a bias or all without,
// the same columns on the same devices. Scale octaves may differ, and with them the layouts.
// Immutable once made; shares its experts with the model that they are weights of.
struct WeightStack {
  std::string path;  // "model.layers.0.mlp.experts.*.up_proj"; empty for a stack of one
  std::vector<std::shared_ptr<const PlacedWeight>> experts;

  // Of every expert, but for scale_octaves, which are those of the first.
  const WeightShape& shape() const { return experts.front()->shape; }
  bool has_bias() const { return experts.front()->has_bias; }
  bool cut() const { return experts.front()->cut(); }
  int64_t bytes() const;                                              // of all, on all devices
  std::string devices() const { return experts.front()->devices(); }  // "cuda:0,cuda:1"
};

// The stack of these weights in the order of their numbers. FAILED_PRECONDITION naming the stack
// and the lowest number that is missing, or the first expert that differs from the lowest one, in
// what, got and expected.
absl::StatusOr<std::shared_ptr<const WeightStack>> MakeStack(
    std::string path, const std::map<int64_t, std::shared_ptr<const PlacedWeight>>& experts);

// A weight as a stack of its own, for operations that take either.
std::shared_ptr<const WeightStack> StackOfOne(std::shared_ptr<const PlacedWeight> weight);

}  // namespace awqd::model
