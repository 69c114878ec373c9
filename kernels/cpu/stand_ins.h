// Tokens of FP16 or BF16 as the integers that stand in for them in a product
// (bodies/int16_block.h): their memory, and which of them integers hold well.
#pragma once

#include <cstdint>

#include "kernels/cpu/k16_access.h"

namespace awqd::cpu {

class StandIns {
 public:
  using MakeFn = decltype(StandInBodies::make);

  // Of `rows` tokens; a multiple of 64.
  static int64_t Bytes(const K16Weight& weight, int64_t rows);
  // `memory`: Bytes, aligned to 64. Both must outlive this.
  StandIns(const K16Weight& weight, int64_t rows, void* memory);

  // Makes those of tokens [begin, begin + count) of x, at most `rows`; token 0 is `begin`.
  void Make(MakeFn make, const ConstMatrixView& x, int64_t begin, int64_t count, CpuDevice& device);
  TokenIntegers Of(int64_t token) const;

  // act(first, count, made) for neighbours of the `count` tokens that were made, and that were not.
  template <typename Act>
  void ForNeighbours(int64_t count, Act act) const {
    for (int64_t begin = 0, end = 0; begin < count; begin = end) {
      while (end < count && made_[end] == made_[begin]) ++end;
      act(begin, end - begin, made_[begin]);
    }
  }

 private:
  const K16Weight& weight_;
  TokenIntegers all_;
  bool* made_;  // [rows]
};

}  // namespace awqd::cpu
