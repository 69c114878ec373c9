// 4-bit codes of KV4 to numbers by bit tricks. Sequential: element 0 is the lowest four bits of a
// word. Host bodies give the same bits (packed.cuh).
#pragma once

#include <cstdint>

#include "kernels/cuda/common/dequant.cuh"
#include "kernels/kv4_math.h"

namespace awqd::cuda {

// A code is the low bits of 2^23 + code.
AWQD_HD float Kv4CodeToFloat(uint32_t code) {
  return kv4::Add(kv4::FloatOf(0x4B000000u | code), -0x1p23f);
}

// QServe's fused form of 8 codes: fma(u, factor, addend) in FP16. `factor` and `addend` hold their
// number twice. One mask finds the pairs (0, 4), (1, 5), (2, 6) and (3, 7), which are put in order
// at the end. 17 operations.
AWQD_HD Pairs FusedKv4Word(uint32_t word, uint32_t factor, uint32_t addend) {
  constexpr uint32_t kLowZero = 0x64006400, kHighZero = 0xD400D400;  // 1024 and -64
  constexpr uint32_t kLowHalves = 0x5410, kHighHalves = 0x7632;
  const Pairs u = Int4MinusZeroFp16(word, {kLowZero, kHighZero, kLowZero, kHighZero});
  const uint32_t v04 = Fma2Fp16(u.v[0], factor, addend), v15 = Fma2Fp16(u.v[1], factor, addend);
  const uint32_t v26 = Fma2Fp16(u.v[2], factor, addend), v37 = Fma2Fp16(u.v[3], factor, addend);
  return {{Prmt(v04, v15, kLowHalves), Prmt(v26, v37, kLowHalves), Prmt(v04, v15, kHighHalves),
           Prmt(v26, v37, kHighHalves)}};
}

}  // namespace awqd::cuda
