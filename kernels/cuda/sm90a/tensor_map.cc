// Encodes tensor maps. The driver's function is looked up at run time, because the library of the
// driver is not on machines without a GPU.
#include "kernels/cuda/sm90a/tensor_map.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/cuda/core/error.h"

namespace awqd::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

absl::StatusOr<Encode> FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  AWQD_CUDA_RETURN_IF_ERROR(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) {
    return absl::FailedPreconditionError("the NVIDIA driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<Encode>(function);
}

}  // namespace

absl::Status MapTokens(const void* data, int64_t rows, int64_t cols, int64_t stride,
                       int element_bytes, int box_rows, CUtensorMap* map) {
  static const absl::StatusOr<Encode> encode = FindEncode();
  AWQD_RETURN_IF_ERROR(encode.status());
  // The engine moves bits, and counts in 16 of them: one type serves all.
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols * element_bytes / 2),
                               static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride * element_bytes)};
  const cuuint32_t box[2] = {kMapColumns, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      (*encode)(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, const_cast<void*>(data), sizes, strides,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cuTensorMapEncodeTiled: CUresult ",
                                          static_cast<int>(result), " for [", rows, ", ", cols,
                                          "], stride ", stride));
}

}  // namespace awqd::cuda
