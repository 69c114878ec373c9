// wgmma, the asynchronous matrix instruction of sm_90a, with A in registers or in shared memory, and
// the instructions that order it. Device code only.
//
// d[64 x N] += a[64 x 16] b[16 x N] by a warpgroup: warp w holds rows 16 w .. 16 w + 15
// of a and d, each in the fragment order of mma.m16n8k16, so that a word of layout mma16 decodes
// straight into an operand. b lies in shared memory as N rows of 16 consecutive k, in 128-byte rows
// that are swizzled as the copy engine writes them. For bytes, signed or E4M3, k is 32 instead of
// 16, and sums of signed bytes are integers modulo 2^32.
#pragma once

#include <cstdint>

namespace awqd::cuda {

// Makes this warpgroup's register writes visible to the instructions that follow.
__device__ __forceinline__ void WgmmaArrive() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the latest `kPending` commits of this warpgroup are under way.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The lower word of the descriptor of b. `address` is 1024-byte aligned, plus 32 bytes for each 16
// of k.
__device__ __forceinline__ uint32_t TokensDescriptor(uint32_t address) {
  constexpr uint32_t kUnused = 1 << 16;
  return kUnused | ((address & 0x3ffff) >> 4);
}

// The difference from that word to the word of the next 16 of k.
inline constexpr uint32_t kDescriptorStep = 32 >> 4;

// The whole descriptor. The upper word is a constant: 128-byte swizzle, 1024 bytes from eight rows
// to the next eight. As one 64-bit number it is advanced by one addition; from two words the
// compiler makes two moves more.
__device__ __forceinline__ uint64_t WholeDescriptor(uint32_t low) {
  constexpr uint64_t kHigh = 0x40000040;
  return kHigh << 32 | low;
}

// clang-format off
#define AWQD_R4(a, b, c, d) "%" #a ", %" #b ", %" #c ", %" #d
#define AWQD_R8(a, b, c, d, e, f, g, h) AWQD_R4(a, b, c, d) ", " AWQD_R4(e, f, g, h)
#define AWQD_L8 AWQD_R8(0, 1, 2, 3, 4, 5, 6, 7)
#define AWQD_L16 AWQD_L8 ", " AWQD_R8(8, 9, 10, 11, 12, 13, 14, 15)
#define AWQD_L20 AWQD_L16 ", " AWQD_R4(16, 17, 18, 19)
#define AWQD_L24 AWQD_L16 ", " AWQD_R8(16, 17, 18, 19, 20, 21, 22, 23)
#define AWQD_L28 AWQD_L24 ", " AWQD_R4(24, 25, 26, 27)
#define AWQD_L32 AWQD_L24 ", " AWQD_R8(24, 25, 26, 27, 28, 29, 30, 31)
#define AWQD_L36 AWQD_L32 ", " AWQD_R4(32, 33, 34, 35)
#define AWQD_L40 AWQD_L32 ", " AWQD_R8(32, 33, 34, 35, 36, 37, 38, 39)
#define AWQD_L44 AWQD_L40 ", " AWQD_R4(40, 41, 42, 43)
#define AWQD_L48 AWQD_L40 ", " AWQD_R8(40, 41, 42, 43, 44, 45, 46, 47)
#define AWQD_L52 AWQD_L48 ", " AWQD_R4(48, 49, 50, 51)
#define AWQD_L56 AWQD_L48 ", " AWQD_R8(48, 49, 50, 51, 52, 53, 54, 55)
#define AWQD_L60 AWQD_L56 ", " AWQD_R4(56, 57, 58, 59)
#define AWQD_L64 AWQD_L56 ", " AWQD_R8(56, 57, 58, 59, 60, 61, 62, 63)
#define AWQD_L68 AWQD_L64 ", " AWQD_R4(64, 65, 66, 67)
#define AWQD_L72 AWQD_L64 ", " AWQD_R8(64, 65, 66, 67, 68, 69, 70, 71)
#define AWQD_L76 AWQD_L72 ", " AWQD_R4(72, 73, 74, 75)
#define AWQD_L80 AWQD_L72 ", " AWQD_R8(72, 73, 74, 75, 76, 77, 78, 79)
#define AWQD_L88 AWQD_L80 ", " AWQD_R8(80, 81, 82, 83, 84, 85, 86, 87)
#define AWQD_L96 AWQD_L88 ", " AWQD_R8(88, 89, 90, 91, 92, 93, 94, 95)
#define AWQD_L104 AWQD_L96 ", " AWQD_R8(96, 97, 98, 99, 100, 101, 102, 103)
#define AWQD_L112 AWQD_L104 ", " AWQD_R8(104, 105, 106, 107, 108, 109, 110, 111)
#define AWQD_L120 AWQD_L112 ", " AWQD_R8(112, 113, 114, 115, 116, 117, 118, 119)
#define AWQD_L128 AWQD_L120 ", " AWQD_R8(120, 121, 122, 123, 124, 125, 126, 127)
#define AWQD_D4(T, i) "+" T(d[i]), "+" T(d[i + 1]), "+" T(d[i + 2]), "+" T(d[i + 3])
#define AWQD_D8(T, i) AWQD_D4(T, i), AWQD_D4(T, i + 4)
#define AWQD_D16(T, i) AWQD_D8(T, i), AWQD_D8(T, i + 8)
#define AWQD_D20(T, i) AWQD_D16(T, i), AWQD_D4(T, i + 16)
#define AWQD_D24(T, i) AWQD_D16(T, i), AWQD_D8(T, i + 16)
#define AWQD_D28(T, i) AWQD_D24(T, i), AWQD_D4(T, i + 24)
#define AWQD_D32(T, i) AWQD_D24(T, i), AWQD_D8(T, i + 24)
#define AWQD_D36(T, i) AWQD_D32(T, i), AWQD_D4(T, i + 32)
#define AWQD_D40(T, i) AWQD_D32(T, i), AWQD_D8(T, i + 32)
#define AWQD_D44(T, i) AWQD_D40(T, i), AWQD_D4(T, i + 40)
#define AWQD_D48(T, i) AWQD_D40(T, i), AWQD_D8(T, i + 40)
#define AWQD_D52(T, i) AWQD_D48(T, i), AWQD_D4(T, i + 48)
#define AWQD_D56(T, i) AWQD_D48(T, i), AWQD_D8(T, i + 48)
#define AWQD_D60(T, i) AWQD_D56(T, i), AWQD_D4(T, i + 56)
#define AWQD_D64(T, i) AWQD_D56(T, i), AWQD_D8(T, i + 56)
#define AWQD_D68(T, i) AWQD_D64(T, i), AWQD_D4(T, i + 64)
#define AWQD_D72(T, i) AWQD_D64(T, i), AWQD_D8(T, i + 64)
#define AWQD_D76(T, i) AWQD_D72(T, i), AWQD_D4(T, i + 72)
#define AWQD_D80(T, i) AWQD_D72(T, i), AWQD_D8(T, i + 72)
#define AWQD_D88(T, i) AWQD_D80(T, i), AWQD_D8(T, i + 80)
#define AWQD_D96(T, i) AWQD_D88(T, i), AWQD_D8(T, i + 88)
#define AWQD_D104(T, i) AWQD_D96(T, i), AWQD_D8(T, i + 96)
#define AWQD_D112(T, i) AWQD_D104(T, i), AWQD_D8(T, i + 104)
#define AWQD_D120(T, i) AWQD_D112(T, i), AWQD_D8(T, i + 112)
#define AWQD_D128(T, i) AWQD_D120(T, i), AWQD_D8(T, i + 120)
// Operands: N / 2 of d, then a0..a3, the descriptor, and whether d counts (else it starts at 0).
#define AWQD_WGMMA(SHAPE, TYPES, END, REGISTERS, A0, A1, A2, A3, DESC, ADD, ...)                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n"                               \
               "wgmma.mma_async.sync.aligned.m64n" SHAPE "." TYPES " {" REGISTERS               \
               "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #DESC ", p" END ";\n}\n"        \
               : __VA_ARGS__                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(add)              \
               : "memory")
// One case of Wgmma.
#define AWQD_WGMMA_CASE(N, ...)                                        \
  if constexpr (kTokens == N && kBf16) {                               \
    AWQD_WGMMA(#N "k16", "f32.bf16.bf16", ", 1, 1, 0", __VA_ARGS__);   \
  } else if constexpr (kTokens == N) {                                 \
    AWQD_WGMMA(#N "k16", "f32.f16.f16", ", 1, 1, 0", __VA_ARGS__);     \
  } else

// Starts d += a b, or d = a b when `add` is 0. `tokens`: a whole descriptor. Neither d nor a may be
// touched until WgmmaWait.
template <int kTokens, bool kBf16>
__device__ __forceinline__ void Wgmma(float (&d)[kTokens / 2], const uint32_t (&a)[4],
                                      uint64_t tokens, int add) {
  AWQD_WGMMA_CASE(16, AWQD_L8, 8, 9, 10, 11, 12, 13, AWQD_D8("f", 0))
  AWQD_WGMMA_CASE(32, AWQD_L16, 16, 17, 18, 19, 20, 21, AWQD_D16("f", 0))
  AWQD_WGMMA_CASE(40, AWQD_L20, 20, 21, 22, 23, 24, 25, AWQD_D20("f", 0))
  AWQD_WGMMA_CASE(48, AWQD_L24, 24, 25, 26, 27, 28, 29, AWQD_D24("f", 0))
  AWQD_WGMMA_CASE(56, AWQD_L28, 28, 29, 30, 31, 32, 33, AWQD_D28("f", 0))
  AWQD_WGMMA_CASE(64, AWQD_L32, 32, 33, 34, 35, 36, 37, AWQD_D32("f", 0))
  AWQD_WGMMA_CASE(72, AWQD_L36, 36, 37, 38, 39, 40, 41, AWQD_D36("f", 0))
  AWQD_WGMMA_CASE(80, AWQD_L40, 40, 41, 42, 43, 44, 45, AWQD_D40("f", 0))
  AWQD_WGMMA_CASE(88, AWQD_L44, 44, 45, 46, 47, 48, 49, AWQD_D44("f", 0))
  AWQD_WGMMA_CASE(96, AWQD_L48, 48, 49, 50, 51, 52, 53, AWQD_D48("f", 0))
  AWQD_WGMMA_CASE(104, AWQD_L52, 52, 53, 54, 55, 56, 57, AWQD_D52("f", 0))
  AWQD_WGMMA_CASE(112, AWQD_L56, 56, 57, 58, 59, 60, 61, AWQD_D56("f", 0))
  AWQD_WGMMA_CASE(120, AWQD_L60, 60, 61, 62, 63, 64, 65, AWQD_D60("f", 0))
  AWQD_WGMMA_CASE(128, AWQD_L64, 64, 65, 66, 67, 68, 69, AWQD_D64("f", 0))
  AWQD_WGMMA_CASE(136, AWQD_L68, 68, 69, 70, 71, 72, 73, AWQD_D68("f", 0))
  AWQD_WGMMA_CASE(144, AWQD_L72, 72, 73, 74, 75, 76, 77, AWQD_D72("f", 0))
  AWQD_WGMMA_CASE(152, AWQD_L76, 76, 77, 78, 79, 80, 81, AWQD_D76("f", 0))
  AWQD_WGMMA_CASE(160, AWQD_L80, 80, 81, 82, 83, 84, 85, AWQD_D80("f", 0))
  AWQD_WGMMA_CASE(176, AWQD_L88, 88, 89, 90, 91, 92, 93, AWQD_D88("f", 0))
  AWQD_WGMMA_CASE(192, AWQD_L96, 96, 97, 98, 99, 100, 101, AWQD_D96("f", 0))
  AWQD_WGMMA_CASE(208, AWQD_L104, 104, 105, 106, 107, 108, 109, AWQD_D104("f", 0))
  AWQD_WGMMA_CASE(224, AWQD_L112, 112, 113, 114, 115, 116, 117, AWQD_D112("f", 0))
  AWQD_WGMMA_CASE(256, AWQD_L128, 128, 129, 130, 131, 132, 133, AWQD_D128("f", 0))
  { static_assert(kTokens == 0, "add a case for this number of tokens"); }
}

#define AWQD_WGMMA_SHARED(N, TYPES, REGISTERS, A, B, ADD, ...)                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n"                       \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16." TYPES " {" REGISTERS       \
               "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}\n"                               \
               : __VA_ARGS__                                                            \
               : "l"(a), "l"(tokens), "r"(add)                                          \
               : "memory")
#define AWQD_WGMMA_SHARED_CASE(N, ...)                                 \
  if constexpr (kTokens == N && kBf16) {                               \
    AWQD_WGMMA_SHARED(N, "f32.bf16.bf16", __VA_ARGS__);                \
  } else if constexpr (kTokens == N) {                                 \
    AWQD_WGMMA_SHARED(N, "f32.f16.f16", __VA_ARGS__);                  \
  } else

// The same with a in shared memory too: 64 rows of 16 consecutive k, as b lies. A warp goes on while
// the tensor cores work, where with a in registers it waits until they have taken it.
template <int kTokens, bool kBf16>
__device__ __forceinline__ void WgmmaShared(float (&d)[kTokens / 2], uint64_t a, uint64_t tokens,
                                            int add) {
  AWQD_WGMMA_SHARED_CASE(32, AWQD_L16, 16, 17, 18, AWQD_D16("f", 0))
  AWQD_WGMMA_SHARED_CASE(64, AWQD_L32, 32, 33, 34, AWQD_D32("f", 0))
  AWQD_WGMMA_SHARED_CASE(128, AWQD_L64, 64, 65, 66, AWQD_D64("f", 0))
  AWQD_WGMMA_SHARED_CASE(256, AWQD_L128, 128, 129, 130, AWQD_D128("f", 0))
  { static_assert(kTokens == 0, "add a case for this number of tokens"); }
}

#define AWQD_WGMMA_INT8_CASE(N, ...)                      \
  if constexpr (kTokens == N) {                           \
    AWQD_WGMMA(#N "k32", "s32.s8.s8", "", __VA_ARGS__);   \
  } else

// The same for signed bytes.
template <int kTokens>
__device__ __forceinline__ void WgmmaInt8(uint32_t (&d)[kTokens / 2], const uint32_t (&a)[4],
                                          uint64_t tokens, int add) {
  AWQD_WGMMA_INT8_CASE(64, AWQD_L32, 32, 33, 34, 35, 36, 37, AWQD_D32("r", 0))
  AWQD_WGMMA_INT8_CASE(96, AWQD_L48, 48, 49, 50, 51, 52, 53, AWQD_D48("r", 0))
  AWQD_WGMMA_INT8_CASE(128, AWQD_L64, 64, 65, 66, 67, 68, 69, AWQD_D64("r", 0))
  AWQD_WGMMA_INT8_CASE(192, AWQD_L96, 96, 97, 98, 99, 100, 101, AWQD_D96("r", 0))
  AWQD_WGMMA_INT8_CASE(256, AWQD_L128, 128, 129, 130, 131, 132, 133, AWQD_D128("r", 0))
  { static_assert(kTokens == 0, "add a case for this number of tokens"); }
}

#define AWQD_WGMMA_E4M3_CASE(N, ...)                             \
  if constexpr (kTokens == N) {                                  \
    AWQD_WGMMA(#N "k32", "f32.e4m3.e4m3", ", 1, 1", __VA_ARGS__); \
  } else

// The same for E4M3, with sums in FP32 of which about 14 bits are kept.
template <int kTokens>
__device__ __forceinline__ void WgmmaE4m3(float (&d)[kTokens / 2], const uint32_t (&a)[4],
                                          uint64_t tokens, int add) {
  AWQD_WGMMA_E4M3_CASE(32, AWQD_L16, 16, 17, 18, 19, 20, 21, AWQD_D16("f", 0))
  AWQD_WGMMA_E4M3_CASE(64, AWQD_L32, 32, 33, 34, 35, 36, 37, AWQD_D32("f", 0))
  AWQD_WGMMA_E4M3_CASE(80, AWQD_L40, 40, 41, 42, 43, 44, 45, AWQD_D40("f", 0))
  AWQD_WGMMA_E4M3_CASE(96, AWQD_L48, 48, 49, 50, 51, 52, 53, AWQD_D48("f", 0))
  AWQD_WGMMA_E4M3_CASE(128, AWQD_L64, 64, 65, 66, 67, 68, 69, AWQD_D64("f", 0))
  { static_assert(kTokens == 0, "add a case for this number of tokens"); }
}
// clang-format on

}  // namespace awqd::cuda
