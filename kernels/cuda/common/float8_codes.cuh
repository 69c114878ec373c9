// Integers of 4 bits as E4M3, which holds them all. Host bodies give the same bits (packed.cuh).
#pragma once

#include <cstdint>

#include "kernels/cuda/common/integers.h"
#include "kernels/cuda/common/packed.cuh"

namespace awqd::cuda {

// Four codes less 8, exactly, of the lower half of `word`. The lower three bits of a code select
// from a table, its upper one selects which.
AWQD_HD uint32_t NibblesMinusEightE4m3(uint32_t word) {
  constexpr uint32_t kNegative[2] = {0xCACCCED0, 0xB8C0C4C8};  // -8 -7 -6 -5, -4 -3 -2 -1
  constexpr uint32_t kPositive[2] = {0x44403800, 0x4E4C4A48};  // 0 1 2 3, 4 5 6 7
  const uint32_t low = word & 0x7777, upper = word >> 3 & 0x1111;
  const uint32_t negative = Prmt(kNegative[0], kNegative[1], low);
  const uint32_t positive = Prmt(kPositive[0], kPositive[1], low);
  const uint32_t mask = Prmt(0xff00, 0, upper);
  return (positive & mask) | (negative & ~mask);
}

// The codes of a step as Int4Bytes has them.
AWQD_HD StepBytes Int4MinusEightE4m3(uint32_t word) {
  const uint32_t first = NibblesMinusEightE4m3(word), second = NibblesMinusEightE4m3(word >> 16);
  return {Prmt(first, second, 0x6420), Prmt(first, second, 0x7531)};
}

}  // namespace awqd::cuda
