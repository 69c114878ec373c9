// Blocks: rows of a weight in GGUF's types Q4_0, Q8_0, MXFP4 and NVFP4. Their formulas are in
// kernels/formats/gguf/gguf.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/weight.h"

namespace awqd::tools {

// The type of the fewest bits whose blocks hold every element bit for bit, but for the sign of a
// zero of MXFP4 and NVFP4; empty where none does. A weight without its codes, else valid, will do.
// NVFP4 leaves the weight's outer scale to the tensor "<path>.scale".
std::string ExactBlockType(const HostWeight& weight);

// A weight that a block type holds. Not thread-safe.
class BlockRows {
 public:
  // `type` is of ExactBlockType, or Q8_0 in the place of Q4_0.
  BlockRows(HostWeight weight, absl::string_view type);

  // The blocks of columns [begin, end) of W, each one row of K elements.
  void Read(int64_t begin, int64_t end, uint8_t* to) const;

 private:
  int64_t k_, group_rows_, groups_;
  bool wide_;  // 8 bits
  absl::string_view type_;
  std::vector<uint8_t> codes_;   // [N, K] in 4 or 8 bits each
  std::vector<uint8_t> scales_;  // [N, groups]
};

// Rounds `count` numbers, whole blocks, to "Q8_0" or "Q4_0", as PyPI gguf's quants.quantize does bit
// for bit:
//
//   Q8_0   d = max |w| / 127, q = round(w * (1 / d)), halves away from 0
//   Q4_0   d = the w of the largest |w|, the first of them, / -8; q = trunc(w * (1 / d) + 8.5), at
//          most 15
//
// All in FP32, an operation at a time; d is rounded to FP16 last. False where a number or d is not
// finite.
bool QuantizeBlocks(absl::string_view type, const float* from, int64_t count, uint8_t* to);

}  // namespace awqd::tools
