// The one mapping from CUDA errors to absl::Status, and the record of devices that a sticky error
// has poisoned.
//
// A sticky error (illegal address, launch failure, ECC ...) destroys the device's context: every
// later call on that device fails too, and no result that was in flight can be trusted. It is
// remembered per device, and Device::healthy() reports it. Of a kernel's faults CUDA says that the
// process must be restarted, and means it: after an illegal address on one of two H100s (driver
// 580.159) every call fails on the other as well, with the same error. So each device in use is
// asked whether it is lost.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace awqd::cuda {

// Pure. OK for cudaSuccess, else
//   out of memory                                  RESOURCE_EXHAUSTED
//   no device, no driver, driver too old, busy     FAILED_PRECONDITION
//   no machine code for the GPU                    UNIMPLEMENTED
//   everything else                                INTERNAL
// `call` is the text of the call that failed; the message holds it and CUDA's name of the error.
absl::Status ToStatus(cudaError_t error, absl::string_view call);

// Pure. True for the errors after which the context is lost.
bool IsSticky(cudaError_t error);

// ToStatus, and: a sticky error marks as poisoned the devices whose contexts are lost, or the
// calling thread's (UseDevice) where none is. The error is cleared so that the next launch check,
// which may be on another device, does not find it again.
absl::Status Report(cudaError_t error, absl::string_view call);

// Makes `index` the calling thread's device. Costs nothing worth counting when it already is.
absl::Status UseDevice(int index);

// The device that UseDevice chose last on this thread; 0 before that.
int CurrentDevice();

// Whether a sticky error was reported on this device. Lasts as long as the process.
bool Poisoned(int index);

}  // namespace awqd::cuda

// Returns Report(call) from the enclosing function unless the CUDA call succeeded.
#define AWQD_CUDA_RETURN_IF_ERROR(call)                                               \
  do {                                                                                \
    if (const cudaError_t awqd_cuda_error = (call); awqd_cuda_error != cudaSuccess) { \
      return ::awqd::cuda::Report(awqd_cuda_error, #call);                            \
    }                                                                                 \
  } while (false)
