// The product of a block of vector codes, written once over Vec. Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/vec.h"

namespace awqd::cpu {
namespace {

void VectorBlock(const int8_t* codes, const float* scales, const float* x, int64_t x_stride,
                 int64_t rows, float* lanes) {
  constexpr int kRuns = 16;
  alignas(64) float weights[kRuns * 16];
  for (int run = 0; run < kRuns; ++run) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(codes + 16 * run);
    Vec::Store(weights + 16 * run, Vec::Mul(Vec::Signed(bytes), Vec::Set(scales[run])));
  }
  for (int64_t m = 0; m < rows; ++m, x += x_stride, lanes += kVectorLanes) {
    // Two chains, because an addition waits for the one before it.
    Vec::F even = Vec::Load(lanes), odd = Vec::Load(lanes + 16);
    for (int at = 0; at < kRuns * 16; at += 32) {
      even = Vec::Fma(Vec::Load(weights + at), Vec::Load(x + at), even);
      odd = Vec::Fma(Vec::Load(weights + at + 16), Vec::Load(x + at + 16), odd);
    }
    Vec::Store(lanes, even);
    Vec::Store(lanes + 16, odd);
  }
}

}  // namespace
}  // namespace awqd::cpu
