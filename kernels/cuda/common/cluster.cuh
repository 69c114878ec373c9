// Transaction barriers in shared memory, and access to the shared memory of other blocks of a
// cluster. Device code only, for sm_90 and later; below, there are no clusters and these functions
// do nothing.
//
// Only BarrierInitFence has release semantics at cluster scope. ptxas (13.0) turns such a release
// into MEMBAR.ALL.GPU, a fence of the whole GPU, which waits until L2 has acknowledged every store
// of the thread. Data is ordered by the barrier that it arrives at instead.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace awqd::cuda {

// ---- transaction barriers ----------------------------------------------------------------------

__device__ __forceinline__ void BarrierInit(uint32_t barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

// Shows fresh barriers to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void BarrierInitFence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Arrives, and announces `bytes` that will come.
__device__ __forceinline__ void BarrierExpect(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Waits for the end of the phase of parity `parity`.
__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// ---- clusters ----------------------------------------------------------------------------------

// Arrives at the cluster's barrier: this block has started, and other blocks can see its fresh
// barriers (BarrierInitFence).
__device__ __forceinline__ void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

// Waits until every thread of the cluster has called ClusterArrive.
__device__ __forceinline__ void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

// The address of the same place as `address`, but in block `rank` of the cluster.
__device__ __forceinline__ uint32_t AddressInBlock(uint32_t address, uint32_t rank) {
  uint32_t remote = address;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
#endif
  return remote;
}

// Stores into a block of the cluster, itself included; its barrier counts the four bytes when they
// are there. Both addresses from AddressInBlock.
__device__ __forceinline__ void PushWord(uint32_t remote, uint32_t word, uint32_t remote_barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote),
      "r"(word), "r"(remote_barrier)
      : "memory");
#endif
}

// The same for 16 bytes.
__device__ __forceinline__ void PushFloat4(uint32_t remote, const float* v,
                                           uint32_t remote_barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(remote),
      "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(remote_barrier)
      : "memory");
#endif
}

}  // namespace awqd::cuda
