// cuBLASLt, opened at run time: a table of the few functions that are called.
//
// A machine without the library still starts; Get() then says why and the dense rows refuse with
// that reason. Types come from the header, no symbol is linked.
#pragma once

#include <cublasLt.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace awqd::cuda {

struct CublasLt {
  // Empty when every function below may be called.
  std::string unavailable;
  // "libcublasLt.so.13", and its version as cublasLtGetVersion says it.
  std::string library;
  size_t version = 0;

  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtGetVersion) get_version = nullptr;
  decltype(&cublasLtGetStatusName) status_name = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmulDescInit_internal) desc_init = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutInit_internal) layout_init = nullptr;
  decltype(&cublasLtMatmulPreferenceInit_internal) preference_init = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;

  // Opens the library on the first call; never closes it. Thread-safe.
  static const CublasLt& Get();
};

// The handle of the thread's device, made on first use and kept for the life of the process.
// Thread-safe; cuBLASLt lets threads share a handle. FAILED_PRECONDITION when unavailable.
absl::StatusOr<cublasLtHandle_t> CublasLtHandle();

// OK, RESOURCE_EXHAUSTED for a failed allocation, UNIMPLEMENTED for "not supported", else INTERNAL.
absl::Status ToStatus(cublasStatus_t status, absl::string_view call);

}  // namespace awqd::cuda
