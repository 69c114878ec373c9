// The fused product of FP16 and BF16 activations by digits (bodies/column_product.h), where the CPU
// has the instruction and the weight the shape for it.
#pragma once

#include <cstdint>

#include "kernels/cpu/stand_ins.h"

namespace awqd::cpu {

// Whether the weight's codes and groups suit digits.
bool SuitDigits(const K16Weight& weight);

// Tokens as digits, and the memory that their product needs.
class Digits {
 public:
  // Of up to `rows` tokens; a multiple of 64.
  static int64_t Bytes(const K16Weight& weight, int64_t threads, int64_t rows);

  // `memory`: Bytes, aligned to 64. All must outlive this.
  Digits(const K16Weight& weight, CpuDevice& device, void* memory, int64_t rows);

  // Tokens [begin, begin + count) of x, at most `rows`.
  const StandIns& Make(const ConstMatrixView& x, int64_t begin, int64_t count);
  // y = x @ W + bias for `count` tokens from `first` on, all of which were made. `y`: row 0 is that
  // of token `first`.
  void Multiply(int64_t first, int64_t count, const float* bias, const MatrixView& y);

 private:
  const K16Weight& weight_;
  CpuDevice& device_;
  const StandInBodies& bodies_;
  StandIns tokens_;
  float* scratch_;  // [threads][scratch_floats_]
  int64_t scratch_floats_;
};

}  // namespace awqd::cpu
