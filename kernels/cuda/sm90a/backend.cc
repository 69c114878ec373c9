// The list of rows of kernels/cuda/sm90a/.
#include "kernels/cuda/sm90a/backend.h"

#include "kernels/cuda/sm90a/rows.h"

namespace awqd {

absl::Span<const KernelRow* const> Sm90aKernels() {
  static const KernelRow* const rows[] = {&cuda::PersistentA16Row(), &cuda::FixedOrderA16Row(),
                                          &cuda::PersistentA8ScaledRow(),
                                          &cuda::PersistentGroupedRow()};
  return rows;
}

}  // namespace awqd
