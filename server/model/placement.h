// Placement: which devices take each weight of a model, and how the weight lies on them.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/device.h"
#include "server/model/placed_weight.h"

namespace awqd::model {

struct LoadTarget {
  std::vector<Device*> devices;  // one or more
  Sharding sharding = Sharding::kReplicas;
  std::shared_ptr<ModelStatistics> statistics;  // what the weights count in; null: nothing
  // More are RESOURCE_EXHAUSTED: each has objects of its own, however small it is. 1024 experts of
  // three projections in 80 layers are fewer.
  int64_t max_weights = int64_t{1} << 18;
  // Linears that are read and decoded at a time, where the host has room for more than one. With
  // two, one is packed while the other is read; with more, memory would be taken for little.
  int readers = 2;

  // Whether the devices need room for the model together, not each for all of it.
  bool shared() const { return sharding == Sharding::kColumns || sharding == Sharding::kExperts; }
};

// The paths of all weights of a model.
using Paths = std::set<std::string, std::less<>>;
Paths CollectPaths(const Checkpoint& checkpoint);

enum class MlpRole { kNone, kGateOrUp, kDown };

// The role of the weight `path`, one of `paths`, in a gated MLP. A component of the path is
// gate_proj, up_proj or down_proj, or one of a row of the table in placement.cc, and the other two
// of its row are in `paths` too.
MlpRole FindMlpRole(absl::string_view path, const Paths& paths);

struct Place {
  absl::Span<Device* const> devices;  // of the target
  Placing placing = Placing::kWhole;
};

// The place of the weight `path`, one of `paths`. Expert e of every stack goes to the same device,
// so that its projections are together.
Place ChoosePlace(absl::string_view path, const Paths& paths, const LoadTarget& target);

}  // namespace awqd::model
