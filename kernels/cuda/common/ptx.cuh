// The PTX instructions that the kernels are built from, one thin function each. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace awqd::cuda {

// The address of a shared-memory object as the 32-bit form that PTX takes.
__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Returns `value` in a way that the compiler cannot see through, so that it keeps the value in a
// register. Otherwise it may compute the value anew in every step of a loop.
__device__ __forceinline__ int Keep(int value) {
  return __shfl_sync(0xffffffffu, value, threadIdx.x % 32);
}

// ---- global memory -----------------------------------------------------------------------------

// 16 bytes of data that no kernel writes and that are read once.
__device__ __forceinline__ uint4 LoadStreaming(const void* pointer) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}

__device__ __forceinline__ void PrefetchL2(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

// ---- announcements between blocks, in global memory --------------------------------------------

__device__ __forceinline__ uint32_t LoadAcquire(const uint32_t* at) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ void StoreRelease(uint32_t* at, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// ---- asynchronous copies to shared memory ------------------------------------------------------

// sm_75 has none: there a copy is done when the function returns, and there is nothing to wait for.

__device__ __forceinline__ void StoreShared16(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// No L2 policy: given one, ptxas 13.0 folds a uniform part of the address into a form of the
// instruction that sm_90 refuses as illegal.
__device__ __forceinline__ void CopyAsync16(uint32_t shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global)
               : "memory");
#else
  StoreShared16(shared, *static_cast<const uint4*>(global));
#endif
}

// Copies 16 bytes, or writes 16 zero bytes without reading when `valid` is false.
__device__ __forceinline__ void CopyAsync16OrZero(uint32_t shared, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
#else
  StoreShared16(shared, valid ? *static_cast<const uint4*>(global) : uint4{});
#endif
}

__device__ __forceinline__ void CommitGroup() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the latest `kPending` commits of this thread's copies are under way.
template <int kPending>
__device__ __forceinline__ void WaitGroup() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Waits at named barrier `id`, 1..15, until `kThreads` threads of the block have come to it.
template <int kThreads>
__device__ __forceinline__ void NamedBarrier(int id) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Counts as one of these threads without waiting for the others.
template <int kThreads>
__device__ __forceinline__ void NamedBarrierArrive(int id) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// ---- shared memory -----------------------------------------------------------------------------

__device__ __forceinline__ uint4 LoadShared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

__device__ __forceinline__ uint32_t LoadShared4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ uint2 LoadShared8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

__device__ __forceinline__ uint32_t LoadShared2(uint32_t address) {
  uint32_t v;
  asm volatile("{.reg .u16 h; ld.shared.u16 h, [%1]; cvt.u32.u16 %0, h;}" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ uint32_t LoadShared1(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ void StoreShared4(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// ---- matrix instructions -----------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit elements; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void LoadMatrices(uint32_t address, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

// Transposes an 8 x 8 matrix of 16-bit elements that the warp holds, two per lane.
__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t m) {
  uint32_t t;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(m));
  return t;
}

// ---- dependent launches (sm_90 and later) ------------------------------------------------------

// Lets the next kernel of the stream start its prologue.
__device__ __forceinline__ void LaunchDependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one in the stream are done and their writes visible.
__device__ __forceinline__ void WaitForEarlierKernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace awqd::cuda
