// StagingPool: host memory that a device copies from and to at full speed, kept for reuse, and
// Payload, a reference-counted view of it.
//
// A request's tensor is copied into a pooled buffer once, the device reads it from there, and the
// result is sent from the buffer that the device wrote. After warm-up no request allocates.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/mutex.h"
#include "kernels/device.h"

namespace awqd::engine {

// Bytes in memory and a share in whatever keeps them alive. Cheap to copy; copies and slices see
// the same bytes. The last one gives a pooled buffer back, on any thread, also after its pool is
// gone.
class Payload {
 public:
  Payload() = default;
  // `owner` keeps `data` alive.
  Payload(std::shared_ptr<const void> owner, char* data, int64_t size)
      : Payload(std::move(owner), data, size, size) {}
  // Memory of `device`, which another process shares.
  Payload(std::shared_ptr<const void> owner, char* data, int64_t size, const Device* device)
      : Payload(std::move(owner), data, size, size) {
    device_ = device;
  }

  char* data() const { return data_; }
  // The device whose memory it is; null for host memory.
  const Device* device() const { return device_; }
  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  bool Overlaps(const Payload& other) const {
    return data_ < other.data_ + other.size_ && other.data_ < data_ + size_;
  }
  // Bytes that it keeps alive: those of the payload that it is a slice of.
  int64_t kept_size() const { return kept_size_; }
  absl::string_view view() const { return {data_, static_cast<size_t>(size_)}; }

  // Bytes [offset, offset + size), which must lie within this payload.
  Payload Slice(int64_t offset, int64_t size) const {
    Payload out(owner_, data_ + offset, size, kept_size_);
    out.device_ = device_;
    return out;
  }

 private:
  Payload(std::shared_ptr<const void> owner, char* data, int64_t size, int64_t kept_size)
      : owner_(std::move(owner)), data_(data), size_(size), kept_size_(kept_size) {}

  std::shared_ptr<const void> owner_;
  const Device* device_ = nullptr;
  char* data_ = nullptr;
  int64_t size_ = 0;
  int64_t kept_size_ = 0;
};

struct StagingStats {
  int64_t misses = 0;        // buffers that had to be allocated
  int64_t lent_bytes = 0;    // in buffers that are in use
  int64_t kept_bytes = 0;    // in buffers that wait for reuse
  int64_t copied_bytes = 0;  // payload bytes that the host has copied
};

// Thread-safe.
class StagingPool {
 public:
  // Keeps unused buffers of up to `max_kept_bytes` together; what is returned beyond makes the pool
  // free those that were unused longest. `device` outlives the pool, not the payloads.
  StagingPool(Device* device, int64_t max_kept_bytes);
  ~StagingPool();
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  // Uninitialised, 256-byte aligned; never null, also for no bytes. RESOURCE_EXHAUSTED when the
  // host has no room.
  absl::StatusOr<Payload> Get(int64_t bytes);

  // Frees what waits for reuse, the largest buffers first, until at most `rest_bytes` are kept: for
  // an idle server. Requests that need more allocate again.
  void FreeKept(int64_t rest_bytes = 0);

  // Notes that the host copied payload bytes: the counter that proves how often it does.
  void CountCopy(int64_t bytes) { copied_bytes_.fetch_add(bytes, std::memory_order_relaxed); }

  StagingStats stats() const;

 private:
  class Shelves;
  struct Lent;

  Device* const device_;
  // Shared with the buffers that are out.
  const std::shared_ptr<Shelves> shelves_;
  std::atomic<int64_t> copied_bytes_{0};
};

}  // namespace awqd::engine
