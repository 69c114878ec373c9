// FP16 and BF16 activations as 16-bit integers: blocks of 128 rows of a token, each with a power of
// two of its own, x ~ step * q.
//
// A value that has all its bits within the 15 topmost of its block is exact, among them every FP16
// number of a sixteenth of the greatest or more. Others are rounded to a step of at most 2^-14 of
// the greatest. A token whose block holds one that dwarfs the others (kMostSpread) is not taken.
//
// Included by body files behind their Vec; everything has internal linkage.
#pragma once

#include <cstring>

#include "kernels/cpu/bodies/integers/int_vec.h"
#include "kernels/cpu/bodies/register_tile.h"

namespace awqd::cpu {
namespace {

// The most that |x| of a block may be times its mean. The step is then at most 1/512 of the mean,
// where FP16 rounds a value of that size to 1/1024 of it or less.
constexpr float kMostSpread = 32;
// The greatest |q|: the upper of its digits is 127 (column_product.h).
constexpr float kMostInteger = 32512;

// 16 elements from `index`, of which the first `count` are read; 0 for the others.
inline Vec::F LoadSome(const void* in, Element type, int64_t index, int64_t count) {
  if (count >= 16) return Vec::Load16Of(in, type, index);
  alignas(64) float values[16] = {};
  for (int64_t i = 0; i < count; ++i) values[i] = Load1(in, type, index + i);
  return Vec::Load(values);
}

// The power of two that is at least `v`, a positive normal number.
inline float PowerOfTwoFrom(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  bits = (bits + 0x7fffff) & 0xff800000;
  std::memcpy(&v, &bits, sizeof(v));
  return v;
}

// Rows 16 i .. 16 i + 15 of a block in q[i].
struct BlockIntegers {
  Pairs q[8];
  float step = 0;

  // Of rows [first, first + 128) of a token, of which those from w.k on are 0. False where the
  // token is not taken: it holds a NaN or an infinity, values below 2^-96, or one that dwarfs the
  // others of its block.
  bool Make(const K16Weight& w, const void* x, Element type, int64_t first) {
    const int64_t count = w.k - first < kIntegerRows ? w.k - first : kIntegerRows;
    Vec::F values[8], greatest = Vec::Zero(), total = Vec::Zero();
    for (int i = 0; i < 8; ++i) {
      values[i] = LoadSome(x, type, first + 16 * i, count - 16 * i);
      const Vec::F size = Vec::Abs(values[i]);
      greatest = Vec::Max(greatest, size);
      total = Vec::Add(total, size);
    }
    const float most = Vec::MaxOfAll(greatest), sum = Vec::SumOfAll(total);
    if (sum == 0) {
      step = 0;
      for (Pairs& lanes : q) lanes = Pairs::Set(0);
      return true;
    }
    // A NaN, or a sum that is infinite, fails the second comparison.
    if (!(most >= 0x1p-96f) || !(sum <= 0x1p120f)) return false;
    if (most * static_cast<float>(count) > kMostSpread * sum) return false;
    step = PowerOfTwoFrom(most * (1 / kMostInteger));
    for (int i = 0; i < 8; ++i) q[i] = Pairs::Rounded(Vec::Mul(values[i], Vec::Set(1 / step)));
    return true;
  }

  // As 16-bit integers, row after row.
  void Store16(void* out) const {
    for (int i = 0; i < 8; ++i) q[i].StoreHalves(static_cast<int16_t*>(out) + 16 * i);
  }
  int32_t Sum() const {
    Pairs sum = q[0];
    for (int i = 1; i < 8; ++i) sum = sum.Plus(q[i]);
    return sum.SumOfAll();
  }
};

}  // namespace
}  // namespace awqd::cpu
