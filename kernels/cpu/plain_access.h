// Reading a weight in layout plain, row by row: for the simple rows.
#pragma once

#include <vector>

#include "kernels/registry.h"

namespace awqd::cpu {

// Some columns of a weight, decoded as kernels/exact.h says. `weight` must outlive it.
class PlainColumns {
 public:
  PlainColumns(const DeviceWeight& weight, int64_t col_begin, int64_t cols);

  // The weights of a stored row, valid until the next call. Fast where rows come in their order.
  const float* Row(int64_t row);

 private:
  void LoadGroup(int64_t group);

  const DeviceWeight& weight_;
  const QuantizationScheme& scheme_;
  const int64_t col_begin_;
  float values_[256];  // of codes
  int64_t group_ = -1;
  std::vector<float> scales_, zeros_;  // of the group, by column
  std::vector<float> row_;
};

}  // namespace awqd::cpu
