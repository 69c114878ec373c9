// The formula of a weight over layout plain. Compiled without contraction: a fused multiply-add
// would leave out a rounding (CMakeLists.txt).
#include "kernels/cpu/plain_access.h"

#include "kernels/exact.h"

namespace awqd::cpu {

PlainColumns::PlainColumns(const DeviceWeight& weight, int64_t col_begin, int64_t cols)
    : weight_(weight),
      scheme_(weight.shape.scheme),
      col_begin_(col_begin),
      scales_(cols, 1.0f),
      zeros_(cols, static_cast<float>(scheme_.zero)),
      row_(cols) {
  for (int code = 0; code < 256; ++code) {
    values_[code] = DecodeCode(scheme_.code, weight.table(), code);
  }
}

void PlainColumns::LoadGroup(int64_t group) {
  group_ = group;
  const int64_t step = weight_.shape.block_cols(), blocks = weight_.shape.column_blocks();
  for (size_t c = 0; c < row_.size(); ++c) {
    const int64_t cell = group * blocks + (col_begin_ + static_cast<int64_t>(c)) / step;
    if (scheme_.scale_dtype) {
      scales_[c] = LoadElement(weight_.scales(), *scheme_.scale_dtype, cell);
    }
    if (scheme_.real_zeros()) {
      zeros_[c] = LoadElement(weight_.zeros(), scheme_.zero_dtype, cell);
    } else if (scheme_.zero_kind == ZeroKind::kStored) {
      zeros_[c] = weight_.zeros()[cell];
    }
  }
}

const float* PlainColumns::Row(int64_t row) {
  const int64_t group = row / weight_.shape.group_rows();
  if (group != group_) LoadGroup(group);
  const int bits = CodeBits(scheme_.bits), mask = (1 << bits) - 1;
  const bool after = scheme_.zero_kind == ZeroKind::kRealAfter;
  const uint8_t* codes = weight_.codes() + row * CeilDiv(weight_.shape.n * bits, 8);
  for (size_t c = 0; c < row_.size(); ++c) {
    const int64_t bit = (col_begin_ + static_cast<int64_t>(c)) * bits;
    const float value = values_[codes[bit / 8] >> (bit % 8) & mask];
    row_[c] = after ? value * scales_[c] - zeros_[c] : (value - zeros_[c]) * scales_[c];
  }
  if (const float* outer = weight_.outer(); outer != nullptr) {
    for (size_t c = 0; c < row_.size(); ++c) row_[c] *= outer[col_begin_ + c];
  }
  return row_.data();
}

}  // namespace awqd::cpu
