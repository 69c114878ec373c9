// Format "awq-gemv": AutoAWQ's version gemv, 4 bits. Everything runs along K:
//
//   qweight I32 [N, K/8], eight codes to a word, the lowest bits first
//   qzeros I32 [N, Z], zero points of a column's groups likewise; optional with zero_point false
//   scales F16 or BF16 [N, 8 Z], those of groups, then 0     W[k, n] = (q - z) * scales[n, k / g]
//   bias [N], optional
//
// Z is what the groups need, rounded up (PadGroups), so that group_size has to be said.
// Facts: AutoAWQ 0.2.9, modules/linear/gemv.py; GPTQModel 7.7.0, nn_modules/qlinear/gemv_awq.py.
//
// Format "awq-gemv-fast": AutoAWQ's version gemv_fast, which is llm-awq's second, 4 bits.
//
//   qweight I16 [N/4, K], or the same bytes as I32 [N/4, K/2]: codes in the order below
//   scales F16 or BF16 [P, N], those of groups, then 0       W[k, n] = q * scales[k / g, n]
//   qzeros [P, N] of the same type: -z * scales                      + qzeros[k / g, n]
//     (AutoAWQ; llm-awq and GPTQModel call it scaled_zeros)
//   bias [N], optional
//
// P is what the groups need, rounded up (PadGroups), so that group_size has to be said. Four
// columns lie together; of each 64 rows every one of them has 16 numbers of four codes, the lowest
// bits first: of each 32 rows 0 8 16 24 1 9 17 25 ... 7 15 23 31, with 2 places for 8 and 4 for 1.
//
// Where every qzeros is -z * scale as its type rounds it, z a whole number from 0 to 15, the weight
// has those zero points and is (q - z) * scale, what the other versions of the file are. Else
// (DeepCompressor, which rounds zeros by themselves) it is the sum.
// Facts: AutoAWQ 0.2.9, modules/linear/gemv_fast.py; llm-awq, quantize/qmodule.py; DeepCompressor,
// backend/tinychat/utils.py.
#include <array>
#include <cmath>
#include <optional>

#include "absl/strings/str_cat.h"
#include "kernels/base/half.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/formats/awq/awq.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kCommon[] = {"scales", "bias"};
constexpr int64_t kInWord = 8;

// --- Scales that are padded to whole words ---

// Groups of K, and how many scales a column has: eight zero points fill a word, and of groups of
// 64, 32 and 16 the words are multiples of 2, 4 and 8.
struct PaddedGroups {
  int64_t rows = 0;
  int64_t groups = 0;
  int64_t padded = 0;
};

absl::StatusOr<PaddedGroups> PadGroups(const AwqLinear& settings, int64_t k) {
  PaddedGroups out = {.rows = settings.group_size == -1 ? k : settings.group_size};
  if (out.rows == 0) {
    return BadValue("group_size", "nothing",
                    "-1 (all of K) or at least 16: the padded scales do not tell it");
  }
  if (out.rows > k || k % out.rows != 0) {
    return BadValue("group_size", out.rows, absl::StrCat("-1 or a divisor of K = ", k));
  }
  if (out.rows < 128 && out.rows != k && out.rows != 64 && out.rows != 32 && out.rows != 16) {
    return BadValue("group_size", out.rows, "-1, 16, 32, 64, or 128 and above");
  }
  out.groups = k / out.rows;
  const int64_t words = CeilDiv(out.groups, kInWord);
  const int64_t multiple = out.rows >= 128 ? 1 : out.rows >= 64 ? 2 : out.rows >= 32 ? 4 : 8;
  out.padded = RoundUp(words, multiple) * kInWord;
  return out;
}

bool IsZero(const uint8_t* half) { return half[0] == 0 && (half[1] & 0x7f) == 0; }

// Returns those of the scales FP16 or BF16 [padded, N] that belong to groups. The others have to be
// 0. No group may be 0 in all columns: then group_size is another one.
absl::StatusOr<std::vector<uint8_t>> UnpadGroups(const PaddedGroups& of, int64_t n,
                                                 absl::Span<const uint8_t> scales) {
  for (int64_t group = 0; group < of.padded; ++group) {
    int64_t zeros = 0;
    while (zeros < n && IsZero(scales.data() + 2 * (group * n + zeros))) ++zeros;
    if (group < of.groups && zeros == n) {
      return BadTensor("scales", absl::StrCat("0 in every column of group ", group),
                       absl::StrCat("scales of ", of.groups, " groups of ", of.rows));
    }
    if (group >= of.groups && zeros < n) {
      return BadTensor("scales", absl::StrCat("a scale in group ", group, " of column ", zeros),
                       absl::StrCat("0: there are ", of.groups, " groups of ", of.rows));
    }
  }
  return std::vector<uint8_t>(scales.begin(), scales.begin() + 2 * of.groups * n);
}

// --- awq-gemv ---

constexpr absl::string_view kGemvSuffixes[] = {"qweight", "qzeros", "scales", "bias"};
constexpr absl::string_view kGemvOptional[] = {"qzeros", "bias"};
constexpr absl::string_view kGemvVersions[] = {"gemv"};
constexpr AwqVersion kGemvVersion = {.names = kGemvVersions};

absl::StatusOr<QuantConfig> ReadGemv(const Setting& config) {
  return ReadAwqConfig(config, kGemvVersion);
}

absl::Status DecodeGemvZeros(const AwqLinear& settings, const LinearTensors& tensors,
                             const PaddedGroups& groups, HostWeight* out) {
  const TensorView* const qzeros = FindTensor(tensors, "qzeros");
  if (qzeros == nullptr) {
    return SetAwqZerosWithout(settings, "qzeros", "I32 [N, padded groups/8], or zero_point false",
                              out);
  }
  const int64_t words = groups.padded / kInWord;
  AWQD_RETURN_IF_ERROR(CheckTensor("qzeros", *qzeros, {"I32"}, 2));
  AWQD_RETURN_IF_ERROR(
      CheckShape("qzeros", *qzeros, {out->n, words},
                 absl::StrCat("N rows of ", groups.groups, " groups, padded, 8 to a word")));
  std::vector<uint8_t> zeros(groups.groups * out->n);
  for (int64_t group = 0; group < groups.groups; ++group) {
    for (int64_t col = 0; col < out->n; ++col) {
      const uint8_t two = qzeros->bytes[col * words * 4 + group / 2];
      zeros[group * out->n + col] = group % 2 == 0 ? two & 15 : two >> 4;
    }
  }
  return SetAwqZeros(settings, "qzeros", std::move(zeros), out);
}

absl::StatusOr<HostWeight> DecodeGemv(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const AwqLinear settings, ReadAwqLinear(object, kGemvVersion));
  AWQD_ASSIGN_OR_RETURN(const TensorView* qweight, NeedTensor(tensors, "qweight", "I32 [N, K/8]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scales,
                        NeedTensor(tensors, "scales", "F16 or BF16 [N, padded groups]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("qweight", *qweight, {"I32"}, 2));
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales("scales", *scales, 2, false));
  HostWeight out;
  out.n = qweight->shape[0];
  out.k = qweight->shape[1] * kInWord;
  AWQD_ASSIGN_OR_RETURN(const PaddedGroups groups, PadGroups(settings, out.k));
  AWQD_RETURN_IF_ERROR(CheckShape(
      "scales", *scales, {out.n, groups.padded},
      absl::StrCat("[N, padded groups] for \"qweight\" [N, K/8] and groups of ", groups.rows)));
  out.scheme = Asymmetric(4, BlockRows(groups.rows, out.k), type);
  AWQD_ASSIGN_OR_RETURN(
      out.scales, UnpadGroups(groups, out.n, Transposed(scales->bytes, out.n, groups.padded, 2)));
  AWQD_RETURN_IF_ERROR(DecodeGemvZeros(settings, tensors, groups, &out));
  if (qweight->unread()) return out;
  out.codes = TransposedNibbles(qweight->bytes, out.n, out.k, FirstNibble::kLow);
  return out;
}

// --- awq-gemv-fast ---

constexpr absl::string_view kFastSuffixes[] = {"qweight", "scales", "qzeros", "scaled_zeros",
                                               "bias"};
constexpr absl::string_view kFastOptional[] = {"qzeros", "scaled_zeros", "bias"};
constexpr absl::string_view kFastVersions[] = {"gemv_fast", "llm-awq"};
constexpr AwqVersion kFastVersion = {.names = kFastVersions};

constexpr int64_t kColumns = 4;  // that lie together
constexpr int64_t kStride = 64;  // rows of one of them that do
constexpr int kMostCode = 15;

absl::StatusOr<QuantConfig> ReadFast(const Setting& config) {
  return ReadAwqConfig(config, kFastVersion);
}

// The nibble of each of 32 rows.
constexpr std::array<uint8_t, 32> Places() {
  std::array<uint8_t, 32> out = {};
  for (int row = 0; row < 32; ++row) {
    out[row] = static_cast<uint8_t>(row / 8 + 4 * (row % 2) + 8 * (row % 8 / 2));
  }
  return out;
}

std::vector<uint8_t> DecodeFastCodes(absl::Span<const uint8_t> bytes, int64_t k, int64_t n) {
  static constexpr std::array<uint8_t, 32> kPlaces = Places();
  return PackTransposed(n, k, 4, [&](int64_t col, int64_t row0, int64_t count, uint8_t* to) {
    for (int64_t row = row0; row < row0 + count; ++row) {
      const int64_t at = col / kColumns * kColumns * k + row / kStride * kStride * kColumns +
                         col % kColumns * kStride + row % kStride / 32 * 32 + kPlaces[row % 32];
      *to++ = bytes[at / 2] >> (at % 2 * 4) & kMostCode;
    }
  });
}

float Rounded(float value, DType type) {
  return type == DType::kFp16 ? HalfToFloat(FloatToHalf(value)) : Bf16ToFloat(FloatToBf16(value));
}

// The whole number that `zero` is minus `scale` times, as the type rounds it.
std::optional<uint8_t> ZeroPoint(float scale, float zero, DType type) {
  if (scale == 0) return zero == 0 ? std::optional<uint8_t>(0) : std::nullopt;
  const float point = std::nearbyint(-zero / scale);
  if (!(point >= 0 && point <= kMostCode) || Rounded(point * scale, type) != -zero) {
    return std::nullopt;
  }
  return static_cast<uint8_t>(point);
}

// Real ones, behind the scale: the weight's formula subtracts them.
void SetRealZeros(absl::Span<const uint8_t> zeros, DType type, HostWeight* out) {
  out->scheme.zero_kind = ZeroKind::kRealAfter;
  out->scheme.zero_dtype = type;
  out->zeros.assign(zeros.begin(), zeros.begin() + out->scales.size());
  for (size_t i = 1; i < out->zeros.size(); i += 2) out->zeros[i] ^= 0x80;
}

absl::Status DecodeFastZeros(const AwqLinear& settings, absl::string_view name,
                             const TensorView& zeros, DType type, HostWeight* out) {
  const int64_t n = out->n, cells = static_cast<int64_t>(out->scales.size()) / 2;
  std::vector<uint8_t> points(cells);
  int64_t odd = -1;  // the first that is no zero point
  for (int64_t i = 0; i < cells; ++i) {
    const float scale = LoadElement(out->scales.data(), type, i);
    const float zero = LoadElement(zeros.bytes.data(), type, i);
    const float points_away = -zero / scale;
    // Half a step of rounding each way; a zero of the wrong sign or group is mostly far from it.
    if (zero != 0 && !(points_away >= -0.5f && points_away <= kMostCode + 0.5f)) {
      return BadTensor(name, absl::StrCat(zero, " at [", i / n, ", ", i % n, "] of scale ", scale),
                       "minus 0 to 15 times the scale");
    }
    const std::optional<uint8_t> point = ZeroPoint(scale, zero, type);
    if (!point && odd < 0) odd = i;
    points[i] = point.value_or(0);
  }
  if (odd < 0) return SetAwqZeros(settings, name, std::move(points), out);
  if (settings.zero_point.value_or(true)) {
    SetRealZeros(zeros.bytes, type, out);
    return absl::OkStatus();
  }
  return BadTensor(name, absl::StrCat("no zero point at [", odd / n, ", ", odd % n, "]"),
                   "minus 8 times the scale, as zero_point is false");
}

// qzeros, or scaled_zeros.
absl::StatusOr<absl::string_view> ZerosName(const LinearTensors& tensors) {
  const bool scaled = FindTensor(tensors, "scaled_zeros") != nullptr;
  if (scaled && FindTensor(tensors, "qzeros") != nullptr) {
    return BadTensor("scaled_zeros", "a tensor", "none beside \"qzeros\"");
  }
  return absl::string_view(scaled ? "scaled_zeros" : "qzeros");
}

absl::string_view Lacks(const Setting& settings, HasTensor has) {
  return has("scaled_zeros") ? "" : AwqLacks(settings, has);
}

// K, of a tensor of bytes whose type does not matter.
absl::StatusOr<int64_t> InFeatures(const TensorView& qweight) {
  const int64_t k = qweight.dtype == "I32" ? qweight.shape[1] * 2 : qweight.shape[1];
  if (k % kStride == 0) return k;
  return BadTensor("qweight", absl::StrCat("K = ", k), "a multiple of 64: 64 rows lie together");
}

absl::StatusOr<HostWeight> DecodeFast(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const AwqLinear settings, ReadAwqLinear(object, kFastVersion));
  AWQD_ASSIGN_OR_RETURN(const TensorView* qweight, NeedTensor(tensors, "qweight", "I16 [N/4, K]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scales,
                        NeedTensor(tensors, "scales", "F16 or BF16 [padded groups, N]"));
  AWQD_ASSIGN_OR_RETURN(const absl::string_view name, ZerosName(tensors));
  AWQD_ASSIGN_OR_RETURN(const TensorView* zeros,
                        NeedTensor(tensors, name, "F16 or BF16 [padded groups, N]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("qweight", *qweight, {"I16", "I32"}, 2));
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales("scales", *scales, 2, false));
  AWQD_ASSIGN_OR_RETURN(const DType zeros_type, CheckScales(name, *zeros, 2, false));
  HostWeight out;
  out.n = qweight->shape[0] * kColumns;
  AWQD_ASSIGN_OR_RETURN(out.k, InFeatures(*qweight));
  AWQD_ASSIGN_OR_RETURN(const PaddedGroups groups, PadGroups(settings, out.k));
  AWQD_RETURN_IF_ERROR(CheckShape(
      "scales", *scales, {groups.padded, out.n},
      absl::StrCat("[padded groups, N] for \"qweight\" [N/4, K] and groups of ", groups.rows)));
  AWQD_RETURN_IF_ERROR(CheckShape(name, *zeros, {groups.padded, out.n}, "as \"scales\""));
  if (type != zeros_type) {
    return BadTensor(name, absl::StrCat("dtype ", zeros->dtype),
                     absl::StrCat(scales->dtype, ", as \"scales\""));
  }
  out.scheme = Asymmetric(4, BlockRows(groups.rows, out.k), type);
  AWQD_ASSIGN_OR_RETURN(out.scales, UnpadGroups(groups, out.n, scales->bytes));
  AWQD_RETURN_IF_ERROR(DecodeFastZeros(settings, name, *zeros, type, &out));
  if (qweight->unread()) return out;
  out.codes = DecodeFastCodes(qweight->bytes, out.k, out.n);
  return out;
}

}  // namespace

const Format kAwqGemvFormat = {.name = "awq-gemv",
                               .quant_method = "awq",
                               .suffixes = kGemvSuffixes,
                               .optional_suffixes = kGemvOptional,
                               .lacks = AwqLacks,
                               .common_suffixes = kCommon,
                               .settings = kAwqSettings,
                               .read = ReadGemv,
                               .decode_parts = DecodeGemv};

const Format kAwqGemvFastFormat = {.name = "awq-gemv-fast",
                                   .quant_method = "awq",
                                   .suffixes = kFastSuffixes,
                                   .optional_suffixes = kFastOptional,
                                   .lacks = Lacks,
                                   .common_suffixes = kCommon,
                                   .settings = kAwqSettings,
                                   .read = ReadFast,
                                   .decode_parts = DecodeFast};

}  // namespace awqd
