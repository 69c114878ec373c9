// The asynchronous matrix instruction of sm_90a with A in registers, and what orders it. Device
// code only.
//
// d[64 x N] += a[64 x 16] b[16 x N] by a group of four warps: warp w holds rows 16 w .. 16 w + 15
// of a and d, each in the fragment order of mma.m16n8k16, so that a word of layout mma16 decodes
// straight into an operand. b lies in shared memory as N rows of 16 consecutive k, in 128-byte rows
// that are swizzled as the copy engine writes them.
#pragma once

#include <cstdint>

namespace awqd::cuda {

// Makes this warp group's register writes visible to the instructions that follow.
__device__ __forceinline__ void WgmmaArrive() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` of this warp group's latest groups are under way.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The lower word of the descriptor of b at `address` (1024-byte aligned tile, plus 32 bytes for
// each 16 of k).
__device__ __forceinline__ uint32_t TokensDescriptor(uint32_t address) {
  constexpr uint32_t kUnused = 1 << 16;
  return kUnused | ((address & 0x3ffff) >> 4);
}

// What to add to it for the next 16 of k.
inline constexpr uint32_t kDescriptorStep = 32 >> 4;

// With the upper word, a constant: 128-byte swizzle, 1024 bytes between groups of eight rows. One
// number of 64 bits moves on by one addition; of two words the compiler moves each as well.
__device__ __forceinline__ uint64_t WholeDescriptor(uint32_t low) {
  constexpr uint64_t kHigh = 0x40000040;
  return kHigh << 32 | low;
}

// clang-format off
#define AWQD_R8(a, b, c, d, e, f, g, h) \
  "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define AWQD_R8_0 AWQD_R8(0, 1, 2, 3, 4, 5, 6, 7)
#define AWQD_R16 AWQD_R8_0 ", " AWQD_R8(8, 9, 10, 11, 12, 13, 14, 15)
#define AWQD_R32 AWQD_R16 ", " AWQD_R8(16, 17, 18, 19, 20, 21, 22, 23) ", " \
  AWQD_R8(24, 25, 26, 27, 28, 29, 30, 31)
#define AWQD_R40 AWQD_R32 ", " AWQD_R8(32, 33, 34, 35, 36, 37, 38, 39)
#define AWQD_R48 AWQD_R40 ", " AWQD_R8(40, 41, 42, 43, 44, 45, 46, 47)
#define AWQD_R56 AWQD_R48 ", " AWQD_R8(48, 49, 50, 51, 52, 53, 54, 55)
#define AWQD_R64 AWQD_R56 ", " AWQD_R8(56, 57, 58, 59, 60, 61, 62, 63)
#define AWQD_R72 AWQD_R64 ", " AWQD_R8(64, 65, 66, 67, 68, 69, 70, 71)
#define AWQD_R80 AWQD_R72 ", " AWQD_R8(72, 73, 74, 75, 76, 77, 78, 79)
#define AWQD_R88 AWQD_R80 ", " AWQD_R8(80, 81, 82, 83, 84, 85, 86, 87)
#define AWQD_R96 AWQD_R88 ", " AWQD_R8(88, 89, 90, 91, 92, 93, 94, 95)
#define AWQD_R112 AWQD_R96 ", " AWQD_R8(96, 97, 98, 99, 100, 101, 102, 103) ", " \
  AWQD_R8(104, 105, 106, 107, 108, 109, 110, 111)
#define AWQD_R128 AWQD_R112 ", " AWQD_R8(112, 113, 114, 115, 116, 117, 118, 119) ", " \
  AWQD_R8(120, 121, 122, 123, 124, 125, 126, 127)
#define AWQD_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define AWQD_D8(i) AWQD_D4(i), AWQD_D4(i + 4)
#define AWQD_D16(i) AWQD_D8(i), AWQD_D8(i + 8)
#define AWQD_D32(i) AWQD_D16(i), AWQD_D16(i + 16)
#define AWQD_D40(i) AWQD_D32(i), AWQD_D8(i + 32)
#define AWQD_D48(i) AWQD_D32(i), AWQD_D16(i + 32)
#define AWQD_D56(i) AWQD_D48(i), AWQD_D8(i + 48)
#define AWQD_D64(i) AWQD_D32(i), AWQD_D32(i + 32)
#define AWQD_D72(i) AWQD_D64(i), AWQD_D8(i + 64)
#define AWQD_D80(i) AWQD_D64(i), AWQD_D16(i + 64)
#define AWQD_D88(i) AWQD_D80(i), AWQD_D8(i + 80)
#define AWQD_D96(i) AWQD_D64(i), AWQD_D32(i + 64)
#define AWQD_D112(i) AWQD_D96(i), AWQD_D16(i + 96)
#define AWQD_D128(i) AWQD_D64(i), AWQD_D64(i + 64)
// Operands: N / 2 of d, then a0..a3, the descriptor, and whether d counts (else it starts at 0).
#define AWQD_WGMMA(N, TYPE, REGISTERS, A0, A1, A2, A3, DESC, ADD, ...)                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n"                               \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS   \
               "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #DESC ", p, 1, 1, 0;\n}\n"      \
               : __VA_ARGS__                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(add)              \
               : "memory")
#define AWQD_WGMMA_BOTH(N, ...)                \
  if constexpr (kBf16) {                       \
    AWQD_WGMMA(N, "bf16", __VA_ARGS__);        \
  } else {                                     \
    AWQD_WGMMA(N, "f16", __VA_ARGS__);         \
  }
// clang-format on

// Starts d += a b, or d = a b when `add` is 0. `tokens`: a whole descriptor. Neither d nor a may be
// touched until WgmmaWait.
template <int kTokens, bool kBf16>
__device__ __forceinline__ void Wgmma(float (&d)[kTokens / 2], const uint32_t (&a)[4],
                                      uint64_t tokens, int add) {
  if constexpr (kTokens == 32) {
    AWQD_WGMMA_BOTH(32, AWQD_R16, 16, 17, 18, 19, 20, 21, AWQD_D16(0))
  } else if constexpr (kTokens == 64) {
    AWQD_WGMMA_BOTH(64, AWQD_R32, 32, 33, 34, 35, 36, 37, AWQD_D32(0))
  } else if constexpr (kTokens == 80) {
    AWQD_WGMMA_BOTH(80, AWQD_R40, 40, 41, 42, 43, 44, 45, AWQD_D40(0))
  } else if constexpr (kTokens == 96) {
    AWQD_WGMMA_BOTH(96, AWQD_R48, 48, 49, 50, 51, 52, 53, AWQD_D48(0))
  } else if constexpr (kTokens == 112) {
    AWQD_WGMMA_BOTH(112, AWQD_R56, 56, 57, 58, 59, 60, 61, AWQD_D56(0))
  } else if constexpr (kTokens == 128) {
    AWQD_WGMMA_BOTH(128, AWQD_R64, 64, 65, 66, 67, 68, 69, AWQD_D64(0))
  } else if constexpr (kTokens == 144) {
    AWQD_WGMMA_BOTH(144, AWQD_R72, 72, 73, 74, 75, 76, 77, AWQD_D72(0))
  } else if constexpr (kTokens == 160) {
    AWQD_WGMMA_BOTH(160, AWQD_R80, 80, 81, 82, 83, 84, 85, AWQD_D80(0))
  } else if constexpr (kTokens == 176) {
    AWQD_WGMMA_BOTH(176, AWQD_R88, 88, 89, 90, 91, 92, 93, AWQD_D88(0))
  } else if constexpr (kTokens == 192) {
    AWQD_WGMMA_BOTH(192, AWQD_R96, 96, 97, 98, 99, 100, 101, AWQD_D96(0))
  } else if constexpr (kTokens == 224) {
    AWQD_WGMMA_BOTH(224, AWQD_R112, 112, 113, 114, 115, 116, 117, AWQD_D112(0))
  } else {
    static_assert(kTokens == 256);
    AWQD_WGMMA_BOTH(256, AWQD_R128, 128, 129, 130, 131, 132, 133, AWQD_D128(0))
  }
}

#undef AWQD_R8
#undef AWQD_R8_0
#undef AWQD_R16
#undef AWQD_R32
#undef AWQD_R40
#undef AWQD_R48
#undef AWQD_R56
#undef AWQD_R64
#undef AWQD_R72
#undef AWQD_R80
#undef AWQD_R88
#undef AWQD_R96
#undef AWQD_R112
#undef AWQD_R128
#undef AWQD_D4
#undef AWQD_D8
#undef AWQD_D16
#undef AWQD_D32
#undef AWQD_D40
#undef AWQD_D48
#undef AWQD_D56
#undef AWQD_D64
#undef AWQD_D72
#undef AWQD_D80
#undef AWQD_D88
#undef AWQD_D96
#undef AWQD_D112
#undef AWQD_D128
#undef AWQD_WGMMA
#undef AWQD_WGMMA_BOTH

}  // namespace awqd::cuda
