// FP16 and BF16 activations as INT16: blocks of 128 rows of a token, each with a power of two of
// its own, x ~ step * q. INT16 is two INT8 planes, q = 256 high + low, or stays whole.
//
// A value that has all its bits within the 15 topmost of its block is exact, among them every FP16
// number of a sixteenth of the greatest or more. Others are rounded to a step of at most 2^-14 of
// the greatest. A token with a block in which one value dwarfs the others (kMaxSpread) is refused:
// it is multiplied in FP32.
//
// Everything has internal linkage.
#pragma once

#include <cstring>

#include "kernels/cpu/bodies/vec.h"

namespace awqd::cpu {
namespace {

// The most that |x| of a block may be times its mean. The step is then at most 1/512 of the mean,
// where FP16 rounds a value of that size to 1/1024 of it or less.
constexpr float kMaxSpread = 32;
// The greatest |q|: its upper plane is 127.
constexpr float kMaxInt16 = 32512;

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
struct Int16Block {
  IntVec q[8];
  float step = 0;

  // Converts rows [first, first + 128) of a token, of which those from w.k on are 0. Returns false
  // where they hold a NaN or an infinity, values below 2^-96 alone, or one that dwarfs the others.
  bool Convert(const K16Weight& w, const void* x, Element type, int64_t first) {
    const int64_t count = w.k - first < kBlockRows ? w.k - first : kBlockRows;
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
      for (IntVec& lanes : q) lanes = IntVec::Set(0);
      return true;
    }
    // A NaN, or a sum that is infinite, fails the second comparison.
    if (!(most >= 0x1p-96f) || !(sum <= 0x1p120f)) return false;
    if (most * static_cast<float>(count) > kMaxSpread * sum) return false;
    step = PowerOfTwoFrom(most * (1 / kMaxInt16));
    for (int i = 0; i < 8; ++i) q[i] = IntVec::Round(Vec::Mul(values[i], Vec::Set(1 / step)));
    return true;
  }

  int32_t Sum() const {
    IntVec sum = q[0];
    for (int i = 1; i < 8; ++i) sum = sum + q[i];
    return sum.SumOfAll();
  }
};

// The lower bytes of a block of q as an INT8 plane, in the order of codes. With codes of 4 bits
// byte b of lane i has rows 32 b + i and 32 b + 16 + i; with codes of 8 bits rows follow each
// other.
inline void StorePlane(const IntVec (&q)[8], int bits, int8_t* out) {
  if (bits == 8) {
    for (int i = 0; i < 8; ++i) q[i].StoreBytes(out + 16 * i);
    return;
  }
  const IntVec byte = IntVec::Set(0xff);
  for (int half = 0; half < 2; ++half) {
    const IntVec lanes = (q[half] & byte) | (q[2 + half] & byte) << 8 | (q[4 + half] & byte) << 16 |
                         q[6 + half] << 24;
    lanes.Store(out + 64 * half);
  }
}

// A prologue: one token of FP16 or BF16. kPlanes: as two planes, the upper one first, else row
// after row.
template <bool kPlanes>
bool MakeInt16(const K16Weight& w, const void* x, Element type, const IntegerToken& out) {
  Int16Block values;
  for (int64_t block = 0; block < w.blocks; ++block) {
    if (!values.Convert(w, x, type, block * kBlockRows)) return false;
    int8_t* const q = static_cast<int8_t*>(out.q) + block * kInt16BlockBytes;
    out.steps[block] = values.step;
    out.sums[block] = values.Sum();
    if constexpr (kPlanes) {
      IntVec high[8];
      for (int i = 0; i < 8; ++i) high[i] = (values.q[i] + IntVec::Set(128)) >> 8;
      StorePlane(high, w.bits, q);
      // The rest modulo 256 is the lower plane.
      StorePlane(values.q, w.bits, q + kBlockRows);
    } else {
      for (int i = 0; i < 8; ++i) values.q[i].StoreHalves(q + 32 * i);
    }
  }
  return true;
}

}  // namespace
}  // namespace awqd::cpu
