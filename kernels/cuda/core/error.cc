// The table of CUDA errors.
#include "kernels/cuda/core/error.h"

#include <atomic>
#include <cstdint>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

namespace awqd::cuda {
namespace {

// One bit per device; machines have at most 16 GPUs.
std::atomic<uint64_t> used_devices = 0;
std::atomic<uint64_t> poisoned_devices = 0;
thread_local int current_device = 0;

uint64_t Bit(int index) { return uint64_t{1} << (index & 63); }

// Whether the context of a device that is in use is lost: every call on it fails then.
bool IsLost(int index) {
  const cudaError_t error = cudaSetDevice(index);
  return IsSticky(error == cudaSuccess ? cudaStreamQuery(nullptr) : error);
}

// A call on one device may fail because of another. So each says for itself whether it is lost.
// Where none does, it is the thread's.
void NotePoisoned() {
  const int device = current_device;
  uint64_t lost = 0;
  for (int index = 0; index < 64; ++index) {
    if ((used_devices.load() & Bit(index)) != 0 && IsLost(index)) lost |= Bit(index);
  }
  poisoned_devices.fetch_or(lost == 0 ? Bit(device) : lost);
  (void)cudaSetDevice(device);
  (void)cudaGetLastError();
}

// Errors after which the context is lost.
constexpr cudaError_t kSticky[] = {cudaErrorECCUncorrectable,
                                   cudaErrorNvlinkUncorrectable,
                                   cudaErrorContained,
                                   cudaErrorIllegalAddress,
                                   cudaErrorLaunchTimeout,
                                   cudaErrorContextIsDestroyed,
                                   cudaErrorAssert,
                                   cudaErrorHardwareStackError,
                                   cudaErrorIllegalInstruction,
                                   cudaErrorMisalignedAddress,
                                   cudaErrorInvalidAddressSpace,
                                   cudaErrorInvalidPc,
                                   cudaErrorLaunchFailure,
                                   cudaErrorTensorMemoryLeak,
                                   cudaErrorExternalDevice,
                                   cudaErrorMpsClientTerminated,
                                   cudaErrorUnknown};

// No device, no driver, driver too old, busy.
constexpr cudaError_t kUnusable[] = {cudaErrorNoDevice,
                                     cudaErrorInvalidDevice,
                                     cudaErrorInsufficientDriver,
                                     cudaErrorCallRequiresNewerDriver,
                                     cudaErrorStubLibrary,
                                     cudaErrorDevicesUnavailable,
                                     cudaErrorDeviceNotLicensed,
                                     cudaErrorInitializationError,
                                     cudaErrorSystemNotReady,
                                     cudaErrorSystemDriverMismatch,
                                     cudaErrorCompatNotSupportedOnDevice};

// No machine code for the GPU.
constexpr cudaError_t kNoCode[] = {
    cudaErrorNoKernelImageForDevice, cudaErrorInvalidKernelImage,  cudaErrorInvalidPtx,
    cudaErrorUnsupportedPtxVersion,  cudaErrorJitCompilerNotFound, cudaErrorJitCompilationDisabled,
    cudaErrorInvalidDeviceFunction};

absl::StatusCode CodeOf(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return absl::StatusCode::kResourceExhausted;
  if (absl::c_linear_search(kUnusable, error)) return absl::StatusCode::kFailedPrecondition;
  if (absl::c_linear_search(kNoCode, error)) return absl::StatusCode::kUnimplemented;
  return absl::StatusCode::kInternal;
}

}  // namespace

bool IsSticky(cudaError_t error) { return absl::c_linear_search(kSticky, error); }

absl::Status ToStatus(cudaError_t error, absl::string_view call) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::Status(CodeOf(error), absl::StrCat(call, ": ", cudaGetErrorName(error), " (",
                                                  cudaGetErrorString(error), ")"));
}

absl::Status Report(cudaError_t error, absl::string_view call) {
  if (IsSticky(error)) {
    NotePoisoned();
  } else if (error != cudaSuccess) {
    // The call's own result is in hand; only the thread's copy of it is dropped here.
    (void)cudaGetLastError();
  }
  return ToStatus(error, call);
}

absl::Status UseDevice(int index) {
  current_device = index;
  if ((used_devices.load() & Bit(index)) == 0) used_devices.fetch_or(Bit(index));
  AWQD_CUDA_RETURN_IF_ERROR(cudaSetDevice(index));
  return absl::OkStatus();
}

int CurrentDevice() { return current_device; }

bool Poisoned(int index) { return (poisoned_devices.load() & Bit(index)) != 0; }

}  // namespace awqd::cuda
