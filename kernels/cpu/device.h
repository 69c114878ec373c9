// CpuDevice: the host's memory and cores behind the Device interface.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "kernels/backends.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/device.h"
#include "kernels/lending/arena.h"

namespace awqd {

// The best instruction set that this machine and this build have. The environment variable
// AWQD_CPU_ISA (portable; on x86-64 avx2, avxvnni, avx512, avx512vnni or amx, on aarch64 neon or
// neondot) lowers it, so that one machine can test every body; it never raises it, and another
// value, one of another architecture too, is ignored.
CpuIsa DetectIsa();

// Thread-safe. Must outlive the buffers, streams and weights made on it.
class CpuDevice final : public Device, public MemoryExporter {
 public:
  CpuDevice(const DeviceOptions& options, std::optional<int> index);

  const DeviceInfo& info() const override { return info_; }
  int64_t FreeBytes() const override;
  void SetBudget(int64_t bytes) override { budget_ = bytes; }
  int64_t UsedBytes() const override { return used_; }
  absl::StatusOr<Buffer> Allocate(MemoryKind kind, int64_t bytes) override;
  // A memfd that nobody can resize, nor write but through this process's mapping.
  absl::StatusOr<ExportedMemory> Export(int64_t bytes) override;
  absl::StatusOr<Buffer> Import(const UniqueFd& descriptor, int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override;
  absl::Status CopyToDevice(void* device, const void* host, int64_t bytes,
                            StreamView stream) override;
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes,
                          StreamView stream) override;
  absl::Status CopyPieces(absl::Span<const CopyPiece> pieces, StreamView stream) override;
  bool host_addressable() const override { return true; }
  bool healthy() const override { return true; }

  ThreadPool& pool() { return pool_; }

  // The device under a weight that a CPU row was given.
  static CpuDevice& Of(Device* device) { return *static_cast<CpuDevice*>(&device->backend()); }

 private:
  void* AlignedBytes(int64_t bytes) const;
  // Takes `bytes` from the budget; false when they do not fit.
  bool Reserve(int64_t bytes);

  DeviceInfo info_;
  const bool interleave_;
  ThreadPool pool_;
  std::atomic<int64_t> budget_;
  // Shared with the deleters of buffers.
  std::atomic<int64_t> used_{0};
};

}  // namespace awqd
