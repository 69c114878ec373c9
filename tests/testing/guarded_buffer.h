// GuardedBuffer: device memory between two bands that must not change.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"

namespace awqd::testing {

// Works on any device through copies. Not thread-safe.
class GuardedBuffer {
 public:
  static constexpr int64_t kBand = 1024;
  static constexpr uint8_t kPoison = 0xff;  // a NaN in every float type

  // Allocates `bytes` of poison between bands. The data is 256-byte aligned plus `misalign`.
  static absl::StatusOr<GuardedBuffer> Create(Device& device, int64_t bytes, int64_t misalign = 0);

  // The same for workspaces, which may be far larger than the part that a kernel uses: only the
  // first kScratchPoison bytes are poison.
  static absl::StatusOr<GuardedBuffer> CreateScratch(Device& device, int64_t bytes);
  static constexpr int64_t kScratchPoison = 1 << 20;

  void* data() const { return static_cast<uint8_t*>(buffer_.data()) + kBand + misalign_; }
  int64_t size() const { return size_; }

  absl::Status Fill(const std::vector<uint8_t>& bytes);
  // Poisons all of it, or the start of a scratch buffer.
  absl::Status Poison();
  absl::StatusOr<std::vector<uint8_t>> Read() const;
  // Returns DATA_LOSS with the first byte of a band that changed.
  absl::Status CheckBands() const;

 private:
  static absl::StatusOr<GuardedBuffer> WithBands(Device& device, int64_t bytes, int64_t misalign);
  absl::StatusOr<int64_t> FirstBroken(int64_t begin, int64_t end) const;

  Device* device_ = nullptr;
  Buffer buffer_;
  int64_t size_ = 0;
  int64_t poisoned_ = 0;
  int64_t misalign_ = 0;
};

}  // namespace awqd::testing
