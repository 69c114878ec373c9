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

// Where an expert of a spread stack is.
struct ExpertHome {
  size_t share = 0;    // among WeightStack::shares
  int32_t number = 0;  // in that share

  friend bool operator==(const ExpertHome&, const ExpertHome&) = default;
};

// One or more experts, by number. Alike: same K, N and description, all with a bias or all without,
// the same columns or rows on the same devices, or spread: each whole on one device. Scale octaves
// may differ, and with them the layouts. Immutable once made; shares its experts with the model
// that they are weights of.
struct WeightStack {
  std::string path;  // "model.layers.0.mlp.experts.*.up_proj"; empty for a stack of one
  std::vector<std::shared_ptr<const PlacedWeight>> experts;
  // Of a spread stack: what each device has of it, as stacks of their own. Else both are empty.
  std::vector<std::shared_ptr<const WeightStack>> shares;
  std::vector<ExpertHome> homes;  // of each expert

  // Of every expert, but for scale_octaves, which are those of the first.
  const WeightShape& shape() const { return experts.front()->shape; }
  bool has_bias() const { return experts.front()->has_bias; }
  bool cut() const { return experts.front()->cut(); }
  bool spread() const { return !shares.empty(); }
  int64_t bytes() const;        // of all, on all devices
  std::string devices() const;  // "cuda:0,cuda:1"
};

// The stack of these weights in the order of their numbers; `spread`: each on one device, which may
// differ. FAILED_PRECONDITION naming the stack and the lowest number that is missing, or the first
// expert that differs from the lowest one, in what, got and expected.
absl::StatusOr<std::shared_ptr<const WeightStack>> MakeStack(
    std::string path, const std::map<int64_t, std::shared_ptr<const PlacedWeight>>& experts,
    bool spread = false);

// A weight as a stack of its own, for operations that take either.
std::shared_ptr<const WeightStack> StackOfOne(std::shared_ptr<const PlacedWeight> weight);

}  // namespace awqd::model
