// Memory and events of other processes (CUDA IPC).
#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/cuda/core/device.h"
#include "kernels/cuda/core/error.h"

namespace awqd::cuda {
namespace {

// CUDA's answers to a wrong handle differ, and some are those of a lost device. So a failure is the
// handle's, and the next call finds out about the device.
absl::Status NoHandle(absl::string_view what, const DeviceInfo& device, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("got a handle that ", device.id, " cannot open (",
                                                 why, "), expected that of ", what,
                                                 " on this GPU, exported by another process"));
}

// Reads the bytes of a handle, and opens it.
template <typename Handle, typename Open>
absl::Status OpenHandle(absl::string_view bytes, absl::string_view what, const DeviceInfo& device,
                        Open open) {
  if (bytes.size() != sizeof(Handle)) {
    return absl::InvalidArgumentError(
        absl::StrCat("got a handle of ", bytes.size(), " bytes, expected ", sizeof(Handle)));
  }
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  Handle handle;
  std::memcpy(&handle, bytes.data(), sizeof(Handle));
  const cudaError_t error = open(handle);
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();
  if (error == cudaErrorMemoryAllocation) return ToStatus(error, "open a handle");
  return NoHandle(what, device, cudaGetErrorName(error));
}

// The bytes of the allocation that begins at `data`. The runtime does not tell, the driver does.
absl::StatusOr<int64_t> AllocatedBytes(void* data) {
  using GetAddressRange = int (*)(unsigned long long* base, size_t* bytes, unsigned long long at);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  AWQD_CUDA_RETURN_IF_ERROR(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function,
                                                             12000, cudaEnableDefault, &found));
  unsigned long long base = 0;
  size_t bytes = 0;
  if (found != cudaDriverEntryPointSuccess ||
      reinterpret_cast<GetAddressRange>(function)(
          &base, &bytes, reinterpret_cast<unsigned long long>(data)) != 0) {
    return absl::InternalError("the driver does not tell how large imported memory is");
  }
  return static_cast<int64_t>(bytes);
}

class CudaEvent final : public SharedEvent {
 public:
  CudaEvent(int device, cudaEvent_t event) : device_(device), event_(event) {}
  ~CudaEvent() override {
    if (UseDevice(device_).ok()) (void)Report(cudaEventDestroy(event_), "cudaEventDestroy");
  }
  absl::Status Wait(StreamView stream) override {
    AWQD_CUDA_RETURN_IF_ERROR(
        cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.handle), event_, 0));
    return absl::OkStatus();
  }
  absl::Status Record(StreamView stream) override {
    AWQD_CUDA_RETURN_IF_ERROR(cudaEventRecord(event_, static_cast<cudaStream_t>(stream.handle)));
    return absl::OkStatus();
  }

 private:
  const int device_;
  const cudaEvent_t event_;
};

}  // namespace

absl::StatusOr<Buffer> CudaDevice::ImportMemory(absl::string_view handle) {
  void* data = nullptr;
  AWQD_RETURN_IF_ERROR(OpenHandle<cudaIpcMemHandle_t>(
      handle, "memory of cudaMalloc", info_, [&](const cudaIpcMemHandle_t& opened) {
        return cudaIpcOpenMemHandle(&data, opened, cudaIpcMemLazyEnablePeerAccess);
      }));
  const auto close = [device = info_.index](void* memory, int64_t) {
    if (UseDevice(device).ok()) {
      (void)Report(cudaIpcCloseMemHandle(memory), "cudaIpcCloseMemHandle");
    }
  };
  absl::StatusOr<int64_t> bytes = AllocatedBytes(data);
  Buffer out(data, bytes.ok() ? *bytes : 0, close);
  AWQD_RETURN_IF_ERROR(bytes.status());
  return out;
}

absl::StatusOr<std::unique_ptr<SharedEvent>> CudaDevice::ImportEvent(absl::string_view handle) {
  cudaEvent_t event = nullptr;
  AWQD_RETURN_IF_ERROR(OpenHandle<cudaIpcEventHandle_t>(
      handle, "an interprocess event", info_,
      [&](const cudaIpcEventHandle_t& opened) { return cudaIpcOpenEventHandle(&event, opened); }));
  return std::make_unique<CudaEvent>(info_.index, event);
}

absl::StatusOr<std::unique_ptr<SharedEvent>> CudaDevice::CreateEvent() {
  AWQD_RETURN_IF_ERROR(UseDevice(info_.index));
  cudaEvent_t event = nullptr;
  AWQD_CUDA_RETURN_IF_ERROR(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return std::make_unique<CudaEvent>(info_.index, event);
}

}  // namespace awqd::cuda
