// DeviceMemory over cudaMallocFromPoolAsync, and pinned staging buffers.
#include "kernels/cuda/core/memory.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/core/error.h"

namespace awqd::cuda {
namespace {

absl::Status CheckSize(int device, int64_t bytes) {
  if (bytes >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("cuda:", device, " memory: got ", bytes, " bytes, expected 0 or more"));
}

// CUDA answers null for nothing; a buffer of no bytes still has an address here, as on the CPU.
size_t AtLeastOne(int64_t bytes) { return static_cast<size_t>(std::max<int64_t>(bytes, 1)); }

absl::StatusOr<Buffer> AllocatePageable(int64_t bytes) {
  constexpr int64_t kAlign = 4096;
  void* const data = std::aligned_alloc(kAlign, RoundUp(std::max<int64_t>(bytes, 1), kAlign));
  if (data == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("host memory: no room for a buffer of ", bytes, " bytes"));
  }
  return Buffer(data, bytes, [](void* memory, int64_t) { std::free(memory); });
}

}  // namespace

absl::StatusOr<std::shared_ptr<DeviceMemory>> DeviceMemory::Create(int device,
                                                                   int64_t budget_bytes) {
  std::shared_ptr<DeviceMemory> out(new DeviceMemory(device, budget_bytes));
  AWQD_RETURN_IF_ERROR(out->Open());
  return out;
}

absl::Status DeviceMemory::Open() {
  int has_pools = 0;
  AWQD_CUDA_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&has_pools, cudaDevAttrMemoryPoolsSupported, device_));
  if (has_pools == 0) return absl::OkStatus();
  AWQD_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  AWQD_ASSIGN_OR_RETURN(scratch_, CreatePool());
  AWQD_ASSIGN_OR_RETURN(weights_, CreatePool());
  return absl::OkStatus();
}

absl::StatusOr<cudaMemPool_t> DeviceMemory::CreatePool() const {
  cudaMemPool_t pool = nullptr;
  cudaMemPoolProps props = {};
  props.allocType = cudaMemAllocationTypePinned;
  props.location.type = cudaMemLocationTypeDevice;
  props.location.id = device_;
  AWQD_CUDA_RETURN_IF_ERROR(cudaMemPoolCreate(&pool, &props));
  uint64_t threshold = 0;  // keep nothing across a synchronisation
  const cudaError_t set =
      cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold);
  if (set == cudaSuccess) return pool;
  (void)Report(cudaMemPoolDestroy(pool), "cudaMemPoolDestroy");
  return Report(set, "cudaMemPoolSetAttribute");
}

DeviceMemory::~DeviceMemory() {
  // Errors are recorded by Report; there is nobody left to return them to.
  if (!UseDevice(device_).ok()) return;
  for (cudaMemPool_t pool : {scratch_, weights_}) {
    if (pool != nullptr) (void)Report(cudaMemPoolDestroy(pool), "cudaMemPoolDestroy");
  }
  if (stream_ != nullptr) (void)Report(cudaStreamDestroy(stream_), "cudaStreamDestroy");
}

absl::Status DeviceMemory::NoRoom(int64_t bytes) const {
  return absl::ResourceExhaustedError(absl::StrCat("cuda:", device_, " memory: asked for ", bytes,
                                                   " bytes, ", FreeBytes(), " bytes are free"));
}

bool DeviceMemory::Reserve(int64_t bytes) {
  int64_t used = used_;
  do {
    const int64_t budget = budget_;
    if (budget != 0 && bytes > budget - used) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes));
  return true;
}

absl::StatusOr<void*> DeviceMemory::AllocateFrom(cudaMemPool_t pool, int64_t bytes) {
  void* data = nullptr;
  if (pool == nullptr) {
    AWQD_CUDA_RETURN_IF_ERROR(cudaMalloc(&data, AtLeastOne(bytes)));
    return data;
  }
  MutexLock lock(&mutex_);
  AWQD_CUDA_RETURN_IF_ERROR(cudaMallocFromPoolAsync(&data, AtLeastOne(bytes), pool, stream_));
  // Only after this may other streams touch it.
  AWQD_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_));
  return data;
}

absl::StatusOr<Buffer> DeviceMemory::Allocate(MemoryKind kind, int64_t bytes) {
  AWQD_RETURN_IF_ERROR(CheckSize(device_, bytes));
  AWQD_RETURN_IF_ERROR(UseDevice(device_));
  if (!Reserve(bytes)) return NoRoom(bytes);
  const cudaMemPool_t pool = kind == MemoryKind::kWeights ? weights_ : scratch_;
  absl::StatusOr<void*> data = AllocateFrom(pool, bytes);
  if (!data.ok()) {
    used_ -= bytes;
    return absl::IsResourceExhausted(data.status()) ? NoRoom(bytes) : data.status();
  }
  return Buffer(*data, bytes, [self = shared_from_this(), pool](void* memory, int64_t size) {
    self->Free(pool, memory, size);
  });
}

void DeviceMemory::Free(cudaMemPool_t pool, void* data, int64_t bytes) {
  used_ -= bytes;
  // A device that is gone has already freed everything; Report has noted it.
  if (!UseDevice(device_).ok()) return;
  if (pool == nullptr) {
    (void)Report(cudaFree(data), "cudaFree");
    return;
  }
  MutexLock lock(&mutex_);
  if (!Report(cudaFreeAsync(data, stream_), "cudaFreeAsync").ok()) return;
  if (!Report(cudaStreamSynchronize(stream_), "cudaStreamSynchronize").ok()) return;
  (void)Report(cudaMemPoolTrimTo(pool, 0), "cudaMemPoolTrimTo");
}

int64_t DeviceMemory::FreeBytes() const {
  size_t free = 0, total = 0;
  if (!UseDevice(device_).ok() || !Report(cudaMemGetInfo(&free, &total), "cudaMemGetInfo").ok()) {
    return 0;
  }
  const int64_t physical = static_cast<int64_t>(free);
  const int64_t budget = budget_;
  return budget == 0 ? physical : std::min(physical, std::max<int64_t>(0, budget - used_));
}

absl::StatusOr<Buffer> AllocateStaging(int device, int64_t bytes) {
  AWQD_RETURN_IF_ERROR(CheckSize(device, bytes));
  AWQD_RETURN_IF_ERROR(UseDevice(device));
  void* data = nullptr;
  const cudaError_t error = cudaHostAlloc(&data, AtLeastOne(bytes), cudaHostAllocPortable);
  if (error != cudaSuccess) {
    const absl::Status status = Report(error, absl::StrCat("cudaHostAlloc of ", bytes));
    // Once another device is lost, memory is no longer pinned: copies are slower, and go on.
    if (IsSticky(error) && !Poisoned(device)) return AllocatePageable(bytes);
    return status;
  }
  return Buffer(data, bytes, [device](void* memory, int64_t) {
    if (UseDevice(device).ok()) (void)Report(cudaFreeHost(memory), "cudaFreeHost");
  });
}

}  // namespace awqd::cuda
