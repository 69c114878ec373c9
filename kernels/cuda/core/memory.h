// Device memory of one GPU: a pool under a budget, and pinned host memory.
//
// Built on a private CUDA memory pool because its frees do not stop the whole device, as cudaFree
// does: a model can be unloaded while another serves. The pool keeps nothing back: what a buffer
// frees goes to the driver at once, so that device memory returns to where it started.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/base/mutex.h"
#include "kernels/device.h"

namespace awqd::cuda {

// Thread-safe. Buffers share ownership, so they may outlive the Device that handed them out.
class DeviceMemory : public std::enable_shared_from_this<DeviceMemory> {
 public:
  // `device` must be the thread's device (UseDevice).
  static absl::StatusOr<std::shared_ptr<DeviceMemory>> Create(int device, int64_t budget_bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // Usable on any stream at once. The owner frees it only after the work that uses it was
  // synchronised. RESOURCE_EXHAUSTED naming the bytes asked for and free, by the budget or by the
  // driver.
  absl::StatusOr<Buffer> Allocate(int64_t bytes);

  // What Allocate can still hand out: memory of the GPU that no process holds, or what is left of
  // the budget. 0 when the driver does not answer.
  int64_t FreeBytes() const;
  int64_t UsedBytes() const { return used_; }
  void SetBudget(int64_t bytes) { budget_ = bytes; }

 private:
  DeviceMemory(int device, int64_t budget_bytes) : device_(device), budget_(budget_bytes) {}
  absl::Status Open();
  bool Reserve(int64_t bytes);
  absl::StatusOr<void*> Take(int64_t bytes);
  void Free(void* data, int64_t bytes);
  absl::Status NoRoom(int64_t bytes) const;

  const int device_;
  std::atomic<int64_t> budget_;
  std::atomic<int64_t> used_ = 0;
  Mutex mutex_;                    // keeps "free, wait, trim" in one piece
  cudaMemPool_t pool_ = nullptr;   // null: the driver has no pools, plain cudaMalloc serves
  cudaStream_t stream_ = nullptr;  // orders only allocations and frees
};

// Pinned host memory that every device can copy from and to. RESOURCE_EXHAUSTED when the host
// refuses.
absl::StatusOr<Buffer> AllocateStaging(int device, int64_t bytes);

}  // namespace awqd::cuda
