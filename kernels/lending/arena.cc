// Hands the bytes of one exported allocation out, one after the other.
#include "kernels/lending/arena.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"

namespace awqd {

absl::StatusOr<MemoryExporter*> ExporterOf(Device& device) {
  if (auto* const exporter = dynamic_cast<MemoryExporter*>(&device.backend())) return exporter;
  return absl::FailedPreconditionError(
      absl::StrCat(device.info().id, ": shares no memory of weights with other processes"));
}

absl::StatusOr<std::shared_ptr<WeightArena>> WeightArena::Create(Device& device, int64_t bytes) {
  AWQD_ASSIGN_OR_RETURN(MemoryExporter* const exporter, ExporterOf(device));
  AWQD_ASSIGN_OR_RETURN(ExportedMemory exported, exporter->Export(bytes));
  return std::shared_ptr<WeightArena>(new WeightArena(std::move(exported)));
}

absl::StatusOr<Buffer> WeightArena::Allocate(int64_t bytes) {
  MutexLock lock(&mu_);
  if (bytes > this->bytes() - used_) {
    return absl::ResourceExhaustedError(absl::StrCat("memory to lend: asked for ", bytes,
                                                     " bytes, ", this->bytes() - used_, " of ",
                                                     this->bytes(), " are left"));
  }
  void* const at = static_cast<uint8_t*>(exported_.memory.data()) + used_;
  used_ += RoundUp(bytes, Sections::kAlign);
  return Buffer(at, bytes, [self = shared_from_this()](void*, int64_t) {});
}

void WeightArena::SetDigest(const DeviceWeight& weight, uint64_t digest) {
  MutexLock lock(&mu_);
  digests_[weight.storage.data()] = digest;
}

uint64_t WeightArena::DigestOf(const DeviceWeight& weight) const {
  MutexLock lock(&mu_);
  const auto found = digests_.find(weight.storage.data());
  return found == digests_.end() ? 0 : found->second;
}

}  // namespace awqd
