// WeightArena: the memory of one model's weights on one device, as one allocation that other
// processes can map for reading.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "kernels/base/mutex.h"
#include "kernels/base/unique_fd.h"
#include "kernels/device.h"
#include "kernels/weight.h"

namespace awqd {

class PackMemory;

// Device memory with a descriptor by which other processes map it. Either keeps the memory alive.
struct ExportedMemory {
  Buffer memory;  // as long as what another process maps
  UniqueFd descriptor;
};

// The part of a device that shares memory with other processes. Thread-safe.
class MemoryExporter {
 public:
  virtual ~MemoryExporter() = default;
  // At least `bytes` of device memory, which count as those of weights do. RESOURCE_EXHAUSTED as
  // Device::Allocate; FAILED_PRECONDITION where the system or the driver cannot share memory so.
  virtual absl::StatusOr<ExportedMemory> Export(int64_t bytes) = 0;
  // Maps what Export of this device returned in another process, `bytes` long, for reading alone.
  // The mapping outlives that process, and does not count as used. INVALID_ARGUMENT for another
  // descriptor or length.
  virtual absl::StatusOr<Buffer> Import(const UniqueFd& descriptor, int64_t bytes) = 0;
};

// FAILED_PRECONDITION for a device that shares no memory.
absl::StatusOr<MemoryExporter*> ExporterOf(Device& device);

// Thread-safe. Buffers of it keep it alive. The memory goes with the last of them, of this, and of
// the mappings of other processes.
class WeightArena : public std::enable_shared_from_this<WeightArena> {
 public:
  // `bytes`: of all weights, each a multiple of Sections::kAlign. Fails as MemoryExporter::Export.
  static absl::StatusOr<std::shared_ptr<WeightArena>> Create(Device& device, int64_t bytes);

  // The next bytes, aligned to Sections::kAlign. RESOURCE_EXHAUSTED beyond the arena's.
  absl::StatusOr<Buffer> Allocate(int64_t bytes);

  // Keeps DigestOfWeight of the bytes that were packed for a weight of this memory.
  void SetDigest(const DeviceWeight& weight, uint64_t digest);
  // 0 without one.
  uint64_t DigestOf(const DeviceWeight& weight) const;

  int descriptor() const { return exported_.descriptor.get(); }
  const uint8_t* data() const { return static_cast<const uint8_t*>(exported_.memory.data()); }
  int64_t bytes() const { return exported_.memory.size(); }

 private:
  explicit WeightArena(ExportedMemory exported) : exported_(std::move(exported)) {}

  const ExportedMemory exported_;
  mutable Mutex mu_;
  int64_t used_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<const void*, uint64_t> digests_ ABSL_GUARDED_BY(mu_);  // by where the weight begins
};

// As PrepareWeight of kernels.h, in memory of `arena`, an arena of the device, which has the weight's
// digest then: of what was packed, before a device's memory had it.
absl::StatusOr<std::shared_ptr<const DeviceWeight>> PrepareWeightIn(WeightArena& arena,
                                                                    const HostWeight& weight,
                                                                    Device& device,
                                                                    PackMemory* memory = nullptr);

}  // namespace awqd
