// The sm_90 instructions that producers and consumers use beside wgmma: bulk copies, arrivals,
// register counts. Device code only.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/common/cluster.cuh"

namespace awqd::cuda {

// ---- arrivals -----------------------------------------------------------------------------------

// Arrives at the barrier at the same address in block `rank` of the cluster. It has no release at
// cluster scope, which would be a fence of the whole GPU: 1900 cycles a step instead of 400. None
// is needed, because it orders reads only, by instructions that have completed.
__device__ __forceinline__ void BarrierArrive(uint32_t barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(AddressInBlock(barrier, rank))
               : "memory");
}

// ---- copies to shared memory that complete on a barrier ----------------------------------------

// `bytes` is a multiple of 16, both addresses are 16-byte aligned.
__device__ __forceinline__ void BulkCopy(uint32_t shared, const void* global, int bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// The box of a 2-D map at (x, y) = (column, row); past the tensor's edge it reads zeros.
__device__ __forceinline__ void TensorCopy(uint32_t shared, const CUtensorMap* map, int x, int y,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

// The same into every block of the cluster whose bit is set in `blocks`, at the same address; each
// block's own barrier counts the bytes.
__device__ __forceinline__ void TensorCopyMulticast(uint32_t shared, const CUtensorMap* map, int x,
                                                    int y, uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- registers ---------------------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void GrowRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void ShrinkRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace awqd::cuda
