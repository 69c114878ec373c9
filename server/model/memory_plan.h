// MemoryPlan: the memory that a load will take on each device and on the host, computed before it
// is allocated.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/device.h"
#include "server/model/placement.h"

namespace awqd::model {

struct MemoryPlan {
  // The exact bytes that all weights will take on each device.
  std::map<const Device*, int64_t> weights;
  // Linears to read at a time: those of the target, or one where there is no room for more.
  int readers = 1;
  // The most host memory at a time beside the weights: the tensors of so many linears as they are
  // in the file, decoded, and packed for a device that the host does not address. An upper bound:
  // what small buffers take is not counted.
  int64_t working = 0;
  // The most that weights and that memory take together of a device that the host addresses.
  std::map<const Device*, int64_t> peak;
  int64_t host_peak = 0;  // host memory: `working`, and weights on devices that the host addresses

  int64_t device_bytes() const;  // on all devices
  std::string ToString() const;  // "918.0 KiB on cpu and 1.2 MiB of host memory while it loads"
};

// The limits of such devices count memory beside the weights only above this size.
inline constexpr int64_t kFreeWorkingBytes = int64_t{256} << 20;

// Reads headers and the small tensors of every linear, one after the other; the whole linear where
// its scales lie among its codes and its layout depends on them. RESOURCE_EXHAUSTED when it does
// not fit into what is free now, naming the device or the host, needed and free. UNAVAILABLE once
// `cancelled`. Other errors are those of the checkpoint: a linear cannot be decoded, or no kernel
// takes it.
absl::StatusOr<MemoryPlan> PlanLoad(const Checkpoint& checkpoint, const LoadTarget& target,
                                    const std::atomic<bool>& cancelled);

}  // namespace awqd::model
