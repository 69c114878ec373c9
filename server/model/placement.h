// Placement: which devices take each weight of a model, and how the weight lies on them; MemoryPlan:
// the memory that a load will take on each device and on the host, before it is allocated.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
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
  // The most linears that are read and decoded at a time, where there is room for more than one;
  // 0: one for each core, two at least, and MemoryPlan::kMostReaders at most.
  int readers = 0;
  // Whether a load fails where a quantised linear cannot be read. Else the others are served.
  bool require_all = false;
  // Whether other processes may map the weights: each device has those of the model in one arena.
  bool lend = false;

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

struct MemoryPlan {
  // With more readers than cores a load from the page cache gains nothing. More than eight were not
  // measured.
  static constexpr int kMostReaders = 8;
  // More than two readers take no more memory together than this.
  static constexpr int64_t kMostWorkingBytes = int64_t{768} << 20;

  // The exact bytes that all weights will take on each device.
  std::map<const Device*, int64_t> weights;
  // Linears to read at a time: those of the target, or as many as there is room for.
  int readers = 1;
  // The most host memory at a time beside the weights: the tensors of so many linears as they are
  // in the file, decoded, and packed for a device that the host does not address. An upper bound:
  // what small buffers take is not counted.
  int64_t working = 0;
  // The most that weights and that memory take together of a device that the host addresses.
  std::map<const Device*, int64_t> peak;
  // The linears that cannot be decoded, as far as their small tensors show it, or that no kernel
  // takes. They count nowhere above.
  UnservedLinears unserved;
  Remarks remarks;        // on the linears that were described
  int64_t host_peak = 0;  // host memory: `working`, and weights on devices that the host addresses

  int64_t device_bytes() const;  // on all devices
  std::string ToString() const;  // "918.0 KiB on cpu and 1.2 MiB of host memory while it loads"
};

// The limits of such devices count memory beside the weights only above this size.
inline constexpr int64_t kFreeWorkingBytes = int64_t{256} << 20;

// Reads headers and the small tensors of every linear, one after the other; the whole linear where
// its scales lie among its codes and its layout depends on them. RESOURCE_EXHAUSTED when it does
// not fit into what is free now, naming the device or the host, needed and free. UNAVAILABLE once
// `cancelled`. Where no linear can be decoded, the error of the first.
absl::StatusOr<MemoryPlan> PlanLoad(const Checkpoint& checkpoint, const LoadTarget& target,
                                    const std::atomic<bool>& cancelled);

// Whether an error of reading one linear leaves the others as they are.
inline bool ConcernsOneLinear(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsUnimplemented(status);
}

}  // namespace awqd::model
