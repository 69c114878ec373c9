// WeightStack: the experts of one projection of a mixture of experts, as one thing to multiply by.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/checkpoint/experts.h"
#include "server/model/placed_weight.h"

namespace awqd::model {

// The place of an expert in an expert-parallel stack.
struct ExpertPlace {
  size_t shard = 0;    // among WeightStack::shards
  int32_t number = 0;  // in that shard

  friend bool operator==(const ExpertPlace&, const ExpertPlace&) = default;
};

// One or more experts, by number. Alike: same K, N and scheme, all with a bias or all without,
// the same columns or rows on the same devices, or expert parallel: each whole on one device. Scale
// octaves may differ, and with them the layouts. Immutable once made; shares its experts with the
// model that they are weights of.
struct WeightStack {
  std::string path;  // "model.layers.0.mlp.experts.*.up_proj"; empty for a stack of one
  std::vector<std::shared_ptr<const PlacedWeight>> experts;
  // Only for an expert-parallel stack: the experts of each device as a stack of their own, and the
  // place of each expert. Else both are empty.
  std::vector<std::shared_ptr<const WeightStack>> shards;
  std::vector<ExpertPlace> places;

  // The shape of every expert. Its scale_octaves are those of the first expert.
  const WeightShape& shape() const { return experts.front()->shape; }
  bool has_bias() const { return experts.front()->has_bias; }
  bool partitioned() const { return experts.front()->partitioned(); }
  bool expert_parallel() const { return !shards.empty(); }
  int64_t bytes() const;        // of all, on all devices
  std::string devices() const;  // "cuda:0,cuda:1"
};

// The stack of these weights in the order of their numbers; `expert_parallel`: each on one device,
// which may differ. FAILED_PRECONDITION naming the stack and the lowest number that is missing, or
// the first expert that differs from the lowest one, in what, got and expected.
absl::StatusOr<std::shared_ptr<const WeightStack>> MakeStack(
    std::string path, const std::map<int64_t, std::shared_ptr<const PlacedWeight>>& experts,
    bool expert_parallel = false);

// A weight as a stack of its own, for operations that take either.
std::shared_ptr<const WeightStack> StackOfOne(std::shared_ptr<const PlacedWeight> weight);

}  // namespace awqd::model
