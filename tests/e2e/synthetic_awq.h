// Random weights in the AutoAWQ gemm layout, with their own plain decoder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "awqd/v1/tensor.pb.h"

namespace awqd {

struct SyntheticAwq {
  int64_t k = 0, n = 0, group = 0;
  std::vector<uint32_t> qweight;  // [k, n/8]
  std::vector<uint32_t> qzeros;   // [k/group, n/8]
  std::vector<uint16_t> scales;   // [k/group, n], fp16

  static SyntheticAwq Random(int64_t k, int64_t n, int64_t group, uint32_t seed);

  // fp16 bits of (q - z) * s, rounded once.
  uint16_t At(int64_t row, int64_t column) const;
  v1::PackedWeight ToPacked() const;
  // A model folder with this as its only weight, "layer".
  void Write(const std::string& folder) const;
};

}  // namespace awqd
