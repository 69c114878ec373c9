// The CUDA backend: the list of its rows, and its devices.
#include "kernels/backends.h"
#include "kernels/cuda/core/device.h"
#include "kernels/cuda/dense/matmul.h"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/cuda/sm90a/rows.h"

namespace awqd {

absl::Span<const KernelRow* const> CudaKernels() {
  static const KernelRow* const rows[] = {
      // sm90a/: compute capability 9.0 alone
      &cuda::PersistentA16Row(),
      &cuda::FixedOrderA16Row(),
      &cuda::PersistentA8Row(),
      &cuda::PersistentA8ScaledRow(),
      &cuda::PersistentFloat8Row(),
      &cuda::PersistentGroupedRow(),
      &cuda::PersistentGroupedFloat8Row(),
      &cuda::TrellisA16Row(),
      &cuda::VectorsA16Row(),
      // sm80/: every GPU from compute capability 7.5
      &cuda::QMatmulA16(),
      &cuda::ScaledSumsA16(),
      &cuda::QMatmulA8(),
      &cuda::QMatmulA8Scaled(),
      &cuda::QMatmulFloat8(),
      &cuda::QMatmulGrouped(),
      &cuda::DequantizeRow(),
      &cuda::PlainMatmulRow(),
      &cuda::PlainQMatmulA8Row(),
      &cuda::PlainQMatmulA8ScaledRow(),
      &cuda::PlainDequantizeRow(),
      &cuda::VectorsDequantizeRow(),
      &cuda::VectorsMatmulRow(),
      &cuda::VectorsGroupedRow(),
      &cuda::TrellisDequantizeRow(),
      &cuda::TrellisMatmulRow(),
      // dense/
      &dense::MatmulA16Row(),
      &dense::MatmulFp16Row(),
  };
  return rows;
}

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(int index, int64_t budget_bytes,
                                                       bool batch_invariant,
                                                       const std::string& id_suffix) {
  return cuda::CudaDevice::Open(index, budget_bytes, batch_invariant, id_suffix);
}

}  // namespace awqd
