// Validates a HostWeight, reads its elements, and looks rows up in a weight's plan.
#include "kernels/weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"

namespace awqd {
namespace {

absl::Status CheckCount(absl::string_view part, size_t got, int64_t expected,
                        absl::string_view unit) {
  if (static_cast<int64_t>(got) == expected) return absl::OkStatus();
  return BadValue(part, absl::StrCat(got, " ", unit), expected);
}

// Checks for NaN; infinities are legal.
absl::Status CheckFloats(absl::string_view part, const std::vector<float>& values,
                         int64_t expected) {
  AWQD_RETURN_IF_ERROR(CheckCount(part, values.size(), expected, "values"));
  const auto at = absl::c_find_if(values, [](float v) { return std::isnan(v); });
  if (at == values.end()) return absl::OkStatus();
  return BadValue(part, absl::StrCat("NaN at index ", at - values.begin()), "numbers");
}

absl::Status CheckZeros(const HostWeight& w, int64_t cells) {
  const QuantizationScheme& d = w.scheme;
  AWQD_RETURN_IF_ERROR(CheckCount("zeros", w.zeros.size(), cells * d.zero_bytes(), "bytes"));
  if (d.zero_kind != ZeroKind::kStored) return absl::OkStatus();
  const int most = (1 << d.bits) - 1;
  const auto bad = absl::c_find_if(w.zeros, [most](uint8_t zero) { return zero > most; });
  if (bad == w.zeros.end()) return absl::OkStatus();
  return BadValue("zeros", absl::StrCat(*bad, " at index ", bad - w.zeros.begin()),
                  absl::StrCat("0 to ", most, " for codes of ", d.bits, " bits"));
}

// Any bits are a code, but d must be finite.
absl::Status CheckBlocks(const HostWeight& w) {
  const auto scale = InfoOf(w.scheme.vector).scale;
  const int64_t bytes = VectorBlockBytes(w.scheme.vector);
  constexpr uint16_t kExponent = 0x7c00;
  const int64_t blocks = w.code_rows() * w.n;
  for (int64_t i = 0; i < blocks; ++i) {
    if ((scale(w.codes.data() + i * bytes) & kExponent) != kExponent) continue;
    return BadValue(
        "codes",
        absl::StrCat("a scale that is no number in block ", i / w.n, " of column ", i % w.n),
        "finite numbers");
  }
  return absl::OkStatus();
}

// Codes narrower than their storage must leave its upper bits clear.
absl::Status CheckCodes(const HostWeight& w) {
  AWQD_RETURN_IF_ERROR(CheckCount("codes", w.codes.size(), w.code_rows() * w.row_bytes(), "bytes"));
  if (w.scheme.code == CodeKind::kVector) return CheckBlocks(w);
  if (w.scheme.code == CodeKind::kTrellis) return absl::OkStatus();  // any bits are codes
  const int bits = w.scheme.bits, place = w.code_bits();
  if (bits == place) return absl::OkStatus();
  int above = 0;
  for (int at = 0; at < 8; at += place) above |= ((1 << place) - (1 << bits)) << at;
  const auto bad = absl::c_find_if(w.codes, [above](uint8_t byte) { return (byte & above) != 0; });
  if (bad == w.codes.end()) return absl::OkStatus();
  return BadValue("codes",
                  absl::StrCat("one above ", (1 << bits) - 1, " in row ",
                               (bad - w.codes.begin()) / w.row_bytes()),
                  absl::StrCat(bits, " bits"));
}

absl::Status CheckOrder(const HostWeight& w) {
  if (w.order.empty()) return absl::OkStatus();
  AWQD_RETURN_IF_ERROR(CheckCount("order", w.order.size(), w.k, "indices"));
  std::vector<bool> seen(w.k);
  for (int64_t i = 0; i < w.k; ++i) {
    const int32_t row = w.order[i];
    if (row < 0 || row >= w.k || seen[row]) {
      const absl::string_view twice = row >= 0 && row < w.k ? " twice" : "";
      return BadValue("order", absl::StrCat(row, twice, " at index ", i),
                      absl::StrCat("each of 0 to ", w.k - 1, " once"));
    }
    seen[row] = true;
  }
  return absl::OkStatus();
}

int64_t OuterCount(const HostWeight& w) {
  if (w.scheme.outer == OuterKind::kNone) return 0;
  return w.scheme.outer == OuterKind::kOne ? 1 : w.n;
}

constexpr float kLargestHalf = 65504;

// Octaves between the smallest and the largest nonzero finite scale of each column block. Magnitudes
// are in the order of their bits, so that the loop compares those. All of a group are read before
// the next group's, as they lie in memory. `first` to `last`: the bits of what counts.
template <typename Bits>
std::vector<int> OctavesOfColumns(const HostWeight& w, Bits sign, Bits first, Bits last) {
  const DType dtype = *w.scheme.scale_dtype;
  const int64_t blocks = w.shape().column_blocks();
  std::vector<Bits> least(blocks, last), most(blocks, first);
  std::vector<int> out(blocks);
  const uint8_t* at = w.scales.data();
  for (int64_t group = 0; group < w.groups(); ++group) {
    for (int64_t block = 0; block < blocks; ++block, at += sizeof(Bits)) {
      Bits bits;
      std::memcpy(&bits, at, sizeof(bits));
      bits = static_cast<Bits>(bits & ~sign);
      const bool counts = bits >= first && bits <= last;
      least[block] = std::min(least[block], counts ? bits : last);
      most[block] = std::max(most[block], counts ? bits : first);
    }
  }
  for (int64_t block = 0; block < blocks; ++block) {
    if (least[block] > most[block]) continue;  // nothing counts
    out[block] = std::ilogb(LoadElement(&most[block], dtype, 0)) -
                 std::ilogb(LoadElement(&least[block], dtype, 0));
  }
  return out;
}

std::vector<int> OctavesOfColumns(const HostWeight& w) {
  switch (*w.scheme.scale_dtype) {
    case DType::kFp32:
      return OctavesOfColumns<uint32_t>(w, 0x80000000, 1, 0x7f7fffff);
    case DType::kBf16:
      return OctavesOfColumns<uint16_t>(w, 0x8000, 1, 0x7f7f);
    case DType::kFp16:
      return OctavesOfColumns<uint16_t>(w, 0x8000, 1, 0x7bff);
    default:  // E8M0
      return OctavesOfColumns<uint8_t>(w, 0, 0, 0xfe);
  }
}

// The largest finite magnitude among elements of `dtype`.
float LargestFinite(const std::vector<uint8_t>& elements, DType dtype) {
  const int64_t count = static_cast<int64_t>(elements.size()) / SizeOf(dtype);
  if (dtype == DType::kFp16 || dtype == DType::kBf16) {
    const int16_t infinity = dtype == DType::kFp16 ? 0x7c00 : 0x7f80;
    int16_t most = 0;  // signed, because SSE2 compares such
    for (int64_t i = 0; i < count; ++i) {
      int16_t bits;
      std::memcpy(&bits, elements.data() + 2 * i, 2);
      bits &= 0x7fff;
      most = std::max(most, bits < infinity ? bits : int16_t{0});
    }
    return LoadElement(&most, dtype, 0);
  }
  float most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = std::fabs(LoadElement(elements.data(), dtype, i));
    most = std::max(most, std::isfinite(value) ? value : 0);
  }
  return most;
}

// Measures FP16 scales. Almost no weight has a large one, which one pass over the bits shows.
void MeasureHalfScales(const HostWeight& w, WeightShape* out) {
  out->large_scales = PassesHalf(w.scheme, LargestFinite(w.scales, DType::kFp16));
  if (!out->large_scales) return;
  const std::vector<int> octaves = OctavesOfColumns(w);
  const int64_t groups = out->groups(), step = out->block_cols();
  for (int64_t col = 0; col < w.n; col += step) {
    bool large = false;
    for (int64_t g = 0; g < groups; ++g) large |= PassesHalf(w.scheme, w.Scale(g, col));
    if (large) out->scale_octaves = std::max(out->scale_octaves, octaves[col / step]);
  }
}

// The largest magnitude of a code.
float LargestCode(const HostWeight& w) {
  constexpr float kLargestE2m1 = 6, kLargestE4m3 = 448;
  float most = 0;
  switch (w.scheme.code) {
    case CodeKind::kE2m1:
      return kLargestE2m1;
    case CodeKind::kE4m3:
      return kLargestE4m3;
    case CodeKind::kTable:
      for (const float value : w.table) {
        if (std::isfinite(value)) most = std::max(most, std::fabs(value));
      }
      return most;
    case CodeKind::kUnsigned:
    case CodeKind::kVector:  // have no scales to multiply them
    case CodeKind::kTrellis:
      break;
  }
  return static_cast<float>((1 << w.scheme.bits) - 1);
}

// Whether a product of a code and its scale, less a real zero, may be a finite number beyond FP16.
// The largest of all scales and zeros decide, because that takes one pass over each.
bool MayPassHalf(const HostWeight& w) {
  if (w.scheme.code == CodeKind::kE2m1) return false;  // its scales are of eight bits or FP16
  const float code = LargestCode(w), scale = LargestFinite(w.scales, *w.scheme.scale_dtype);
  if (!w.scheme.real_zeros()) return code * scale > kLargestHalf;
  const float zero = LargestFinite(w.zeros, w.scheme.zero_dtype);
  const bool first = w.scheme.zero_kind == ZeroKind::kRealBefore;
  return (first ? (code + zero) * scale : code * scale + zero) > kLargestHalf;
}

// The largest |code - zero|.
int64_t LargestInteger(const QuantizationScheme& d) {
  const int64_t most = (1 << d.bits) - 1;
  return d.zero_kind == ZeroKind::kConstant ? std::max<int64_t>(d.zero, most - d.zero) : most;
}

}  // namespace

std::string WhyNoIntegers(const WeightShape& shape) {
  constexpr int64_t kMostInt32 = std::numeric_limits<int32_t>::max(), kMostInt8 = 128;
  const QuantizationScheme& d = shape.scheme;
  if (!d.is_integer() || d.real_zeros()) {
    return absl::StrCat("codes and zeros are no integers: ", ToString(d));
  }
  if (d.scale_dtype || d.outer != OuterKind::kNone) {
    return absl::StrCat("the weight has scales: ", ToString(d));
  }
  const int64_t each = kMostInt8 * LargestInteger(d);
  if (shape.k <= kMostInt32 / std::max<int64_t>(1, each)) return "";
  return absl::StrCat("sums of ", ToString(d), " may pass INT32 from K = ", kMostInt32 / each + 1,
                      " on, got ", shape.k);
}

std::string WhyNoQuantizedActivations(const WeightShape& shape) {
  if (shape.scheme.is_integer()) return "";
  return absl::StrCat("codes are no integers: ", ToString(shape.scheme));
}

absl::string_view Name(Part part) {
  constexpr absl::string_view kNames[kParts] = {"codes", "scales", "zeros",  "table",
                                                "outer", "order",  "factor", "bias"};
  return kNames[static_cast<int>(part)];
}

uint64_t HostWeight::EightCodes(int64_t row, int64_t col) const {
  const uint8_t* const from = codes.data() + row * row_bytes() + col * code_bits() / 8;
  uint64_t out = 0;
  if (col + 8 <= n && code_bits() == 4) {  // loads of constant size
    std::memcpy(&out, from, 4);
  } else if (col + 8 <= n && code_bits() == 8) {
    std::memcpy(&out, from, 8);
  } else {
    std::memcpy(&out, from, CeilDiv(std::min<int64_t>(8, n - col) * code_bits(), 8));
  }
  return out;
}

float HostWeight::RealZero(int64_t group, int64_t col) const {
  return LoadElement(zeros.data(), scheme.zero_dtype, Cell(group, col));
}

float HostWeight::Scale(int64_t group, int64_t col) const {
  if (!scheme.scale_dtype) return 1;
  return LoadElement(scales.data(), *scheme.scale_dtype, Cell(group, col));
}

absl::Status Validate(const Hadamard& hadamard, int64_t k) {
  const auto [size, scale] = hadamard;
  if (size == 0) return absl::OkStatus();
  if (size < 2 || size > Hadamard::kMostRows || (size & (size - 1)) != 0 || k % size != 0) {
    return BadValue(
        "hadamard_size", absl::StrCat(size),
        absl::StrCat("a power of two from 2 to ", Hadamard::kMostRows, " that divides K = ", k));
  }
  if (scale > 0 && std::isfinite(scale)) return absl::OkStatus();
  return BadValue("scale of the transform", absl::StrCat(scale), "a positive number");
}

absl::Status Validate(const HostWeight& w) {
  AWQD_RETURN_IF_ERROR(Validate(w.scheme, w.k, w.n));
  AWQD_RETURN_IF_ERROR(CheckCodes(w));
  return ValidateBesideCodes(w);
}

absl::Status ValidateBesideCodes(const HostWeight& w) {
  AWQD_RETURN_IF_ERROR(Validate(w.scheme, w.k, w.n));
  const int64_t cells = w.shape().cells();
  AWQD_RETURN_IF_ERROR(CheckZeros(w, cells));
  AWQD_RETURN_IF_ERROR(
      CheckCount("scales", w.scales.size(), cells * w.scheme.scale_bytes(), "bytes"));
  AWQD_RETURN_IF_ERROR(CheckFloats("table", w.table, w.scheme.code == CodeKind::kTable ? 16 : 0));
  AWQD_RETURN_IF_ERROR(CheckFloats("outer", w.outer, OuterCount(w)));
  AWQD_RETURN_IF_ERROR(CheckOrder(w));
  if (!w.factor.empty()) AWQD_RETURN_IF_ERROR(CheckFloats("factor", w.factor, w.k));
  AWQD_RETURN_IF_ERROR(Validate(w.hadamard, w.k));
  if (!w.bias.empty()) AWQD_RETURN_IF_ERROR(CheckCount("bias", w.bias.size(), w.n, "values"));
  return absl::OkStatus();
}

bool PassesHalf(const QuantizationScheme& d, float scale) {
  return d.scale_dtype == DType::kFp16 && d.is_integer() && !d.real_zeros() &&
         std::isfinite(scale) &&
         std::fabs(scale) * static_cast<float>(LargestInteger(d)) > kLargestHalf;
}

WeightShape ShapeOf(const HostWeight& w) {
  WeightShape out = w.shape();
  const std::optional<DType> scale = w.scheme.scale_dtype;
  if (w.scales.empty()) return out;  // not read yet
  const bool integers = w.scheme.is_integer() && !w.scheme.real_zeros();
  if (scale == DType::kFp16 && integers) MeasureHalfScales(w, &out);
  if (!integers || scale == DType::kFp32) out.large_scales = MayPassHalf(w);
  if (scale != DType::kBf16 && scale != DType::kFp32 && scale != DType::kE8m0) return out;
  const std::vector<int> octaves = OctavesOfColumns(w);
  out.scale_octaves = *absl::c_max_element(octaves);
  return out;
}

namespace {

const KernelRow* RowFor(const std::vector<PlanEntry>& entries, Path path, int64_t m) {
  for (const PlanEntry& entry : entries) {
    if (entry.path == path && m >= entry.min_m && (entry.max_m < 0 || m <= entry.max_m)) {
      return entry.row;
    }
  }
  return nullptr;
}

}  // namespace

const KernelRow* WeightPlan::Matmul(Path path, int64_t m) const { return RowFor(matmul, path, m); }

const KernelRow* WeightPlan::Integer(int64_t m) const { return RowFor(integer, Path::kFused, m); }

const KernelRow* WeightPlan::Quantized(int64_t m) const {
  return RowFor(quantized, Path::kFused, m);
}

const KernelRow* WeightPlan::Float8(int64_t m) const { return RowFor(float8, Path::kFused, m); }

const KernelRow* WeightPlan::Grouped(int64_t rows) const {
  return RowFor(grouped, Path::kFused, rows);
}
const KernelRow* WeightPlan::GroupedFloat8(int64_t rows) const {
  return RowFor(grouped_float8, Path::kFused, rows);
}

}  // namespace awqd
