// Codes and scales of a weight, and numbers, to blocks.
#include "client/tools/encode/blocks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "client/tools/encode/target.h"
#include "kernels/base/half.h"
#include "kernels/formats/codes.h"

namespace awqd::tools {
namespace {

constexpr int kEveryWidth[] = {1, 2, 3, 4, 5, 6, 7, 8};
constexpr DType kHalf[] = {DType::kFp16};
constexpr Limits kIntegerLimits = {.widths = kEveryWidth, .scales = kHalf};
constexpr int64_t kBlockCodes = 32;

bool IsFloat4(const QuantizationScheme& d, DType scale, int64_t rows, int64_t k) {
  return d.code == CodeKind::kE2m1 && d.scale_dtype == scale &&
         d.zero_kind == ZeroKind::kConstant && d.zero == 0 && d.block_cols == 1 &&
         (d.block_rows == rows || (d.block_rows == 0 && k == rows));
}

// The least and the largest of a code less its zero.
std::pair<int, int> RangeOf(const HostWeight& weight) {
  int low = weight.scheme.zero, high = low;
  if (!weight.zeros.empty()) {
    low = *std::min_element(weight.zeros.begin(), weight.zeros.end());
    high = *std::max_element(weight.zeros.begin(), weight.zeros.end());
  }
  return {-high, (1 << weight.scheme.bits) - 1 - low};
}

std::string IntegerBlockType(HostWeight weight) {
  if (!Normalise(kIntegerLimits, &weight).ok() || weight.group_rows() % kBlockCodes != 0) return "";
  for (size_t i = 0; i < weight.scales.size(); i += 2) {
    if ((weight.scales[i + 1] & 0x7c) == 0x7c) return "";  // an infinity or NaN
  }
  const auto [low, high] = RangeOf(weight);
  return low >= -8 && high <= 7 ? "Q4_0" : low >= -128 && high <= 127 ? "Q8_0" : "";
}

// The first 16 codes in the low halves of 16 bytes, the others in the high halves.
template <int kHalfCodes>
void PackHalves(const uint8_t* codes, uint8_t* to) {
  for (int i = 0; i < kHalfCodes; ++i) {
    to[i] = static_cast<uint8_t>(codes[i] | codes[i + kHalfCodes] << 4);
  }
}

void StoreHalf(float value, uint8_t* to) {
  const uint16_t half = FloatToHalf(value);
  std::memcpy(to, &half, sizeof(half));
}

// The largest magnitude of a block, whose bits order as integers do.
float LargestOf(const float* from) {
  int32_t most = 0;
  for (int i = 0; i < kBlockCodes; ++i) {
    most = std::max(most, std::bit_cast<int32_t>(from[i]) & 0x7fffffff);
  }
  return std::bit_cast<float>(most);
}

bool QuantizeQ8(const float* from, uint8_t* to) {
  const float most = LargestOf(from);
  const float d = most / 127, inverse = d == 0 ? 0 : 1 / d;
  StoreHalf(d, to);
  if (!std::isfinite(inverse)) {  // d is 0 in FP16
    std::fill_n(to + 2, kBlockCodes, uint8_t{0});
    return true;
  }
  for (int i = 0; i < kBlockCodes; ++i) {
    // Halves go away from 0.
    const float value = from[i] * inverse, magnitude = std::fabs(value);
    const int whole = static_cast<int>(magnitude);
    const int rounded = whole + (magnitude - static_cast<float>(whole) >= 0.5f ? 1 : 0);
    to[2 + i] = static_cast<uint8_t>(value < 0 ? -rounded : rounded);
  }
  return std::isfinite(HalfToFloat(FloatToHalf(d)));
}

bool QuantizeQ4(const float* from, uint8_t* to) {
  float most = 0;
  for (int i = 0; i < kBlockCodes; ++i) {
    if (std::fabs(from[i]) > std::fabs(most)) most = from[i];
  }
  const float d = most / -8, inverse = d == 0 ? 0 : 1 / d;
  StoreHalf(d, to);
  uint8_t codes[kBlockCodes];
  for (int i = 0; i < kBlockCodes; ++i) {
    const float code = from[i] * inverse + 8.5f;  // no number where 1 / d is past FP32
    codes[i] = static_cast<uint8_t>(code > 0 ? std::min(code, 15.0f) : 0.0f);
  }
  PackHalves<16>(codes, to + 2);
  return std::isfinite(HalfToFloat(FloatToHalf(d)));
}

}  // namespace

std::string ExactBlockType(const HostWeight& weight) {
  const QuantizationScheme& d = weight.scheme;
  if (!weight.order.empty() || weight.transforms_input() || weight.k % kBlockCodes != 0) return "";
  if (IsFloat4(d, DType::kE8m0, kBlockCodes, weight.k) && d.outer == OuterKind::kNone) {
    return std::find(weight.scales.begin(), weight.scales.end(), 0xff) == weight.scales.end()
               ? "MXFP4"
               : "";
  }
  if (IsFloat4(d, DType::kE4m3, 16, weight.k) && d.outer != OuterKind::kColumn &&
      weight.k % 64 == 0) {
    // Without signs or NaN.
    return std::all_of(weight.scales.begin(), weight.scales.end(),
                       [](uint8_t s) { return s < 0x7f; })
               ? "NVFP4"
               : "";
  }
  HostWeight beside = weight;
  beside.codes.clear();
  return d.is_integer() ? IntegerBlockType(std::move(beside)) : "";
}

BlockRows::BlockRows(HostWeight weight, absl::string_view type)
    : k_(weight.k), wide_(type == "Q8_0"), type_(type) {
  const bool integers = weight.scheme.is_integer();
  if (integers) Normalise(kIntegerLimits, &weight).IgnoreError();  // ExactBlockType saw it fit
  group_rows_ = weight.group_rows();
  groups_ = weight.groups();
  codes_ = CodesByColumn(weight, wide_ ? 8 : 4, !integers ? -1 : wide_ ? 128 : 8);
  scales_ = Transposed(weight.scales, groups_, weight.n, weight.scheme.scale_bytes());
}

void BlockRows::Read(int64_t begin, int64_t end, uint8_t* to) const {
  const bool nvfp4 = type_ == "NVFP4", mxfp4 = type_ == "MXFP4";
  const int64_t scale_bytes = nvfp4 || mxfp4 ? 1 : 2, row_bytes = wide_ ? k_ : k_ / 2;
  uint8_t codes[2 * kBlockCodes];
  for (int64_t row = begin; row < end; ++row) {
    const uint8_t* from = codes_.data() + row * row_bytes;
    const uint8_t* const scales = scales_.data() + row * groups_ * scale_bytes;
    if (nvfp4) {
      for (int64_t k = 0; k < k_; k += 64, from += 32, to += 36) {
        std::memcpy(to, scales + k / 16, 4);
        UnpackStream(from, 64, 4, codes);
        for (int part = 0; part < 4; ++part) PackHalves<8>(codes + 16 * part, to + 4 + 8 * part);
      }
      continue;
    }
    for (int64_t k = 0; k < k_; k += kBlockCodes) {
      std::memcpy(to, scales + k / group_rows_ * scale_bytes, scale_bytes);
      to += scale_bytes;
      if (wide_) {
        for (int i = 0; i < kBlockCodes; ++i) to[i] = from[i] ^ 0x80;
      } else {
        UnpackStream(from, kBlockCodes, 4, codes);
        PackHalves<16>(codes, to);
      }
      from += wide_ ? 32 : 16;
      to += wide_ ? 32 : 16;
    }
  }
}

bool QuantizeBlocks(absl::string_view type, const float* from, int64_t count, uint8_t* to) {
  const bool wide = type == "Q8_0";
  bool finite = true;
  for (int64_t at = 0; at < count; at += kBlockCodes, to += wide ? 34 : 18) {
    if (!std::isfinite(LargestOf(from + at))) return false;
    finite &= wide ? QuantizeQ8(from + at, to) : QuantizeQ4(from + at, to);
  }
  return finite;
}

}  // namespace awqd::tools
