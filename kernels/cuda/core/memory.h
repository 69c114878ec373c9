// Device memory of one GPU: two pools under one budget, and pinned host memory.
//
// Built on private CUDA memory pools. Frees to a pool do not stop the whole device, as cudaFree
// does, so a model can be unloaded while another serves. The pools keep nothing: freed memory goes
// to the driver at once. A pool takes memory from the driver 32 MiB at a time. Weights have a pool
// of their own, because a long-lived scratch buffer in the same 32 MiB would keep them from the
// driver.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/base/mutex.h"
#include "kernels/device.h"
#include "kernels/lending/arena.h"

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
  // `kind`: kDevice or kWeights.
  absl::StatusOr<Buffer> Allocate(MemoryKind kind, int64_t bytes);

  // As MemoryExporter has it.
  absl::StatusOr<ExportedMemory> Export(int64_t bytes);

  // Bytes that Allocate can still return: memory of the GPU that no process holds, or the rest of
  // the budget. 0 when the driver does not answer.
  int64_t FreeBytes() const;
  int64_t UsedBytes() const { return used_; }
  void SetBudget(int64_t bytes) { budget_ = bytes; }

 private:
  DeviceMemory(int device, int64_t budget_bytes) : device_(device), budget_(budget_bytes) {}
  absl::Status Open();
  absl::StatusOr<cudaMemPool_t> CreatePool() const;
  bool Reserve(int64_t bytes);
  absl::StatusOr<void*> AllocateFrom(cudaMemPool_t pool, int64_t bytes);
  void Free(cudaMemPool_t pool, void* data, int64_t bytes);
  absl::Status NoRoom(int64_t bytes) const;

  const int device_;
  std::atomic<int64_t> budget_;
  std::atomic<int64_t> used_ = 0;
  Mutex mutex_;  // keeps "free, wait, trim" together
  // Null: the driver has no pools, plain cudaMalloc serves.
  cudaMemPool_t scratch_ = nullptr;
  cudaMemPool_t weights_ = nullptr;
  cudaStream_t stream_ = nullptr;  // orders only allocations and frees
};

// Pinned host memory that every device can copy from and to. RESOURCE_EXHAUSTED when the host
// refuses.
absl::StatusOr<Buffer> AllocateStaging(int device, int64_t bytes);

}  // namespace awqd::cuda
