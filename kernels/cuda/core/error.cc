// The table of CUDA errors.
#include "kernels/cuda/core/error.h"

#include <atomic>
#include <cstdint>

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

absl::StatusCode CodeOf(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return absl::StatusCode::kOk;
    case cudaErrorMemoryAllocation:
      return absl::StatusCode::kResourceExhausted;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorCallRequiresNewerDriver:
    case cudaErrorStubLibrary:
    case cudaErrorDevicesUnavailable:
    case cudaErrorDeviceNotLicensed:
    case cudaErrorInitializationError:
    case cudaErrorSystemNotReady:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
      return absl::StatusCode::kFailedPrecondition;
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidKernelImage:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
    case cudaErrorInvalidDeviceFunction:
      return absl::StatusCode::kUnimplemented;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

bool IsSticky(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorExternalDevice:
    case cudaErrorMpsClientTerminated:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

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
