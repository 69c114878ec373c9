// wgmma of signed bytes, with A in registers: d[64 x N] += a[64 x 32] b[32 x N] by a warpgroup,
// modulo 2^32. b lies in shared memory as N rows of 32 consecutive k, in 128-byte rows that are
// swizzled as the copy engine writes them. Device code only.
#pragma once

#include <cstdint>

#include "kernels/cuda/sm90a/wgmma.cuh"

namespace awqd::cuda {

// clang-format off
#define AWQD_L8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define AWQD_L16 AWQD_L8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define AWQD_L32 AWQD_L16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define AWQD_L64 AWQD_L32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
                          ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define AWQD_D8(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), \
                   "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
#define AWQD_D32(i) AWQD_D8(i), AWQD_D8(i + 8), AWQD_D8(i + 16), AWQD_D8(i + 24)
#define AWQD_D64(i) AWQD_D32(i), AWQD_D32(i + 32)
// Operands: N / 2 of d, then a0..a3, the descriptor, and whether d counts (else it starts at 0).
#define AWQD_WGMMA(N, REGISTERS, A0, A1, A2, A3, DESC, ADD, ...)                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n"                                  \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" REGISTERS                  \
               "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #DESC ", p;\n}\n"                  \
               : __VA_ARGS__                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(add)                 \
               : "memory")
// clang-format on

// Starts d += a b, or d = a b when `add` is 0. `tokens`: a whole descriptor. Neither d nor a may be
// touched until WgmmaWait.
template <int kTokens>
__device__ __forceinline__ void WgmmaInt8(int (&d)[kTokens / 2], const uint32_t (&a)[4],
                                          uint64_t tokens, int add) {
  if constexpr (kTokens == 64) {
    AWQD_WGMMA(64, AWQD_L32, 32, 33, 34, 35, 36, 37, AWQD_D32(0));
  } else {
    static_assert(kTokens == 128);
    AWQD_WGMMA(128, AWQD_L64, 64, 65, 66, 67, 68, 69, AWQD_D64(0));
  }
}

#undef AWQD_L8
#undef AWQD_L16
#undef AWQD_L32
#undef AWQD_L64
#undef AWQD_D8
#undef AWQD_D32
#undef AWQD_D64
#undef AWQD_WGMMA

}  // namespace awqd::cuda
