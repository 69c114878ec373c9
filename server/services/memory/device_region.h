// DeviceRegion: memory of a GPU that a client on the server's machine exported, and its events.
//
// The server maps it once. Kernels read activations there and write results there, so that no byte
// of them passes through the host. The mapping stays valid when its client ends; what the client
// writes there meanwhile changes its own results alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/mutex.h"
#include "kernels/device.h"
#include "server/engine/staging.h"

namespace awqd::services {

// Thread-safe. Its device outlives it.
class DeviceRegion : public std::enable_shared_from_this<DeviceRegion> {
 public:
  // Bytes [offset, offset + size) of an allocation. Handles are those of CUDA IPC
  // (Device::ImportMemory, ImportEvent); those of events may be empty.
  struct Handles {
    std::string memory;
    int64_t offset = 0, size = 0;
    std::string ready;     // works wait for it before they read
    std::string finished;  // recorded after the last kernel
    bool early = false;    // calls are answered before that
  };
  // INVALID_ARGUMENT names the field of ShareMemoryRequest.
  // `descriptor`: of the memory, in place of its handle (Device::ImportMemory).
  static absl::StatusOr<std::shared_ptr<const DeviceRegion>> Import(
      Device* device, const Handles& handles, const UniqueFd& descriptor = UniqueFd());

  int64_t size() const { return size_; }
  const Device& device() const { return *device_; }
  // A range within the region.
  engine::Payload Slice(int64_t offset, int64_t size) const {
    return {shared_from_this(), data() + offset, size, device_};
  }
  // Null where there is none.
  const std::shared_ptr<SharedEvent>& ready() const { return ready_; }
  const std::shared_ptr<SharedEvent>& finished() const { return finished_; }
  bool early_answers() const { return early_; }

  // Copies to or from staging memory, after `ready` and `point`, and waits: for what cannot use the
  // memory where it is.
  absl::Status Copy(const CopyPiece& piece, const StreamPoint* point = nullptr) const;

 private:
  DeviceRegion(Device* device, Buffer memory, int64_t offset, int64_t size)
      : device_(device), memory_(std::move(memory)), offset_(offset), size_(size) {}
  char* data() const { return static_cast<char*>(memory_.data()) + offset_; }

  Device* const device_;
  const Buffer memory_;
  const int64_t offset_, size_;
  std::shared_ptr<SharedEvent> ready_, finished_;
  bool early_ = false;
  mutable Mutex mu_;
  mutable std::unique_ptr<Stream> copies_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::services
