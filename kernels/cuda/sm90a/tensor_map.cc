// Tensor maps of activations.
#include "kernels/cuda/sm90a/tensor_map.h"

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/cuda/core/error.h"
#include "kernels/cuda/sm90a/qmatmul.h"

namespace awqd::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function is looked up at run time, because the library of the driver is not on
// machines without a GPU.
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

absl::Status MapTokens(const ConstMatrixView& x, int64_t x_stride, int box_rows, CUtensorMap* map) {
  static const absl::StatusOr<Encode> encode = FindEncode();
  AWQD_RETURN_IF_ERROR(encode.status());
  const int64_t stride = x_stride == 0 ? x.cols : x_stride, bytes = SizeOf(x.dtype);
  // The engine moves bits, and counts in 16 of them: one type serves all.
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(stride * bytes / 2),
                               static_cast<cuuint64_t>(x.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride * bytes)};
  const cuuint32_t box[2] = {kMapColumns, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      (*encode)(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, const_cast<void*>(x.data), sizes, strides,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cuTensorMapEncodeTiled: CUresult ",
                                          static_cast<int>(result), " for [", x.rows, ", ", stride,
                                          "]"));
}

}  // namespace awqd::cuda
