// CudaDevice: one GPU as the Device of kernels/device.h.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/cuda/core/memory.h"
#include "kernels/device.h"
#include "kernels/lending/arena.h"

namespace awqd::cuda {

// Every public call makes this GPU the calling thread's device, so that any thread may use any
// device. There is no default stream: work without a stream is refused.
class CudaDevice final : public Device, public MemoryExporter {
 public:
  // FAILED_PRECONDITION, in one line, when there is no driver, it is older than this build's CUDA,
  // there is no GPU `index`, it is older than compute capability 7.5, or this build has no code for
  // it (WhyNoCode). Without a driver it answers at once. `budget_bytes` 0: no cap.
  static absl::StatusOr<std::unique_ptr<Device>> Open(int index, int64_t budget_bytes,
                                                      bool batch_invariant = false,
                                                      const std::string& id_suffix = "");

  const DeviceInfo& info() const override { return info_; }
  int64_t FreeBytes() const override { return memory_->FreeBytes(); }
  void SetBudget(int64_t bytes) override { memory_->SetBudget(bytes); }
  int64_t UsedBytes() const override { return memory_->UsedBytes(); }
  absl::StatusOr<Buffer> Allocate(MemoryKind kind, int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override;
  // A stream without counters: freeing counters (cudaFree) would wait for the whole device.
  absl::StatusOr<std::unique_ptr<Stream>> CreateCopyStream() override;
  absl::Status CopyToDevice(void* device, const void* host, int64_t bytes,
                            StreamView stream) override;
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes,
                          StreamView stream) override;
  absl::Status CopyPieces(absl::Span<const CopyPiece> pieces, StreamView stream) override;
  absl::StatusOr<Buffer> ImportMemory(absl::string_view handle) override;
  absl::StatusOr<Buffer> ImportMemory(const UniqueFd& descriptor, int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<SharedEvent>> ImportEvent(absl::string_view handle) override;
  absl::StatusOr<std::unique_ptr<SharedEvent>> CreateEvent() override;
  // Memory of the driver's own (VMM), apart from the pools, in units of its granularity, 2 MiB.
  absl::StatusOr<ExportedMemory> Export(int64_t bytes) override;
  absl::StatusOr<Buffer> Import(const UniqueFd& descriptor, int64_t bytes) override;
  bool host_addressable() const override { return false; }
  bool healthy() const override;

 private:
  CudaDevice(DeviceInfo info, std::shared_ptr<DeviceMemory> memory)
      : info_(std::move(info)), memory_(std::move(memory)) {}

  // `bytes`: a multiple of the granularity. `access`: a CUmemAccess_flags. INVALID_ARGUMENT says
  // why the descriptor is not one of memory of this GPU.
  absl::StatusOr<Buffer> MapDescriptor(const UniqueFd& descriptor, int64_t bytes, int access);

  const DeviceInfo info_;
  const std::shared_ptr<DeviceMemory> memory_;
};

// Asks what code this binary holds for the thread's device, without launching anything: returns the
// compute capability x 10 (80, 90) that the code was compiled for, less than the device's own where
// the driver translates portable code. UNIMPLEMENTED when there is no code for it. All folders but
// sm90a, whose rows ask for 9.0 itself, are compiled for the same architectures, so that one kernel
// speaks for all.
absl::StatusOr<int> ProbeKernelImage();

// The reason why no GPU `index` can be used with that driver, or empty. Pure, so that it is tested
// without one: versions as CUDA spells them (13000), 0 for no driver; `gpus` < 0 when the driver
// gave no count.
std::string WhyNotUsable(int index, int driver_version, int runtime_version, int gpus);

// The reason why a GPU of compute capability `arch` / 10 cannot run this build, or empty. `code`:
// what the code for it was compiled for, alike, 0 for none.
std::string WhyNoCode(int arch, int code);

// The architecture that kernels are chosen by, for a GPU of compute capability `gpu` / 10 whose
// code was compiled for `code`: the code's, where that lacks what the GPU has. Code for less
// than 9.0 knows no clusters and no overlapping launches, for less than 8.0 no asynchronous copies.
// `wish` lowers it, for tests: the text of AWQD_CUDA_ARCH, or empty. INVALID_ARGUMENT for a wish
// that is no architecture from 7.5 on, or below 8.0 for code that is not.
absl::StatusOr<int> ArchOf(int gpu, int code, absl::string_view wish);

}  // namespace awqd::cuda
