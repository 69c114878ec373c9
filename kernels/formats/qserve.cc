// Format "qserve": W4A8 as QServe (OmniServe) writes it, and SGLang reads under the name "qoq".
//
//   qweight I8 [N, K/2], codes of 4 bits in the order below
//   s1_scales F16 or BF16 [N]
//   bias [N], optional
//
//   per group     W[k, n] = (q * s2 - z) * s1[n]        s2_scales I8 [K/g, N], 0 to 17
//                                                       s2_zeros I8 [K/g, N] = -z modulo 256
//   per channel   W[k, n] = q * s1[n] - s1_szeros[n]    s1_szeros F16 or BF16 [N]
//
// qweight has tiles of 32 columns by 32 rows, 512 bytes each, those of the same columns one after
// the other. The byte 64 a + 16 b + 8 c + 4 d + e of a tile holds row 16 c + 4 b + e of column
// 8 d + a in its low half, and of column 16 + 8 d + a in its high half. Of each 32 columns,
// s2_scales and s2_zeros have 0 8 16 24 1 9 17 25 ... 7 15 23 31.
//
// Per group QServe's kernel multiplies four codes by s2 in one register, which takes products of up
// to 255, and adds -z modulo 256. What would leave a byte there is refused here, so that a weight
// that is served is the one QServe computes with.
// Facts: OmniServe, w4a8_linear.py and qgemm/w4a8_per_group/gemm_cuda.cu; SGLang,
// quantization/qoq.py.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/half.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"qweight",   "s1_scales", "s1_szeros",
                                           "s2_scales", "s2_zeros",  "bias"};
constexpr absl::string_view kOptional[] = {"s1_szeros", "s2_scales", "s2_zeros", "bias"};
constexpr absl::string_view kCodeTypes[] = {"I8"};
constexpr absl::string_view kSettings[] = {"bits", "group_size"};

constexpr int kBits = 4, kMostCode = 15;
constexpr int kMostScale = 255 / kMostCode;
constexpr int64_t kTile = 32;  // rows, and columns
constexpr int64_t kTileBytes = kTile * kTile / 2;

// --- Settings ---

struct Settings {
  std::optional<int64_t> bits;
  int64_t group_size = 0;  // -1: per channel; 0: not said
};

// UNIMPLEMENTED for other widths.
absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  Settings out;
  AWQD_ASSIGN_OR_RETURN(out.group_size, ReadGroupSize(object));
  for (absl::string_view name : {"bits", "w_bit", "wbits"}) {
    AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, name, 1, 32));
    if (bits && *bits != kBits) {
      return UnreadSetting(name, absl::StrCat(*bits), "4 (W4A8)");
    }
    if (bits) out.bits = bits;
  }
  return out;
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(config));
  if (!settings.bits) return BadValue("bits (or w_bit, or wbits)", "nothing", kBits);
  Setting rule;
  rule.members["bits"] = Setting::Literal(*settings.bits);
  if (settings.group_size != 0) {
    rule.members["group_size"] = Setting::Literal(settings.group_size);
  }
  return OneRule(config, std::move(rule));
}

// --- Codes ---

// Rows [32, 32], one code to a byte.
void UnpackTile(const uint8_t* from, uint8_t* to) {
  for (int64_t a = 0; a < 8; ++a) {
    for (int64_t b = 0; b < 4; ++b) {
      for (int64_t c = 0; c < 2; ++c) {
        for (int64_t d = 0; d < 2; ++d, from += 4) {
          uint8_t* const out = to + (16 * c + 4 * b) * kTile + 8 * d + a;
          for (int64_t e = 0; e < 4; ++e) {
            out[e * kTile] = from[e] & kMostCode;
            out[e * kTile + 16] = from[e] >> 4;
          }
        }
      }
    }
  }
}

// The least and the greatest code of each group and column.
struct Ranges {
  std::vector<uint8_t> least, most;  // [groups, N]
};

Ranges DecodeCodes(absl::Span<const uint8_t> bytes, int64_t rows_of_group, HostWeight* out) {
  const int64_t k = out->k, n = out->n, cells = k / rows_of_group * n;
  Ranges ranges = {std::vector<uint8_t>(cells, kMostCode), std::vector<uint8_t>(cells, 0)};
  out->codes = AllocateCodes(static_cast<int64_t>(bytes.size()));
  const uint8_t* from = bytes.data();
  uint8_t tile[kTile * kTile];
  for (int64_t col = 0; col < n; col += kTile) {
    for (int64_t row0 = 0; row0 < k; row0 += kTile, from += kTileBytes) {
      UnpackTile(from, tile);
      for (int64_t i = 0; i < kTile; ++i) {
        const uint8_t* const codes = tile + i * kTile;
        PackNibbles(codes, kTile, out->codes.data() + ((row0 + i) * n + col) / 2);
        const int64_t cell = (row0 + i) / rows_of_group * n + col;
        for (int64_t j = 0; j < kTile; ++j) {
          ranges.least[cell + j] = std::min(ranges.least[cell + j], codes[j]);
          ranges.most[cell + j] = std::max(ranges.most[cell + j], codes[j]);
        }
      }
    }
  }
  return ranges;
}

// --- Scales and zeros ---

// Bytes [groups, N] from the order of each 32 columns to theirs.
std::vector<uint8_t> InColumnOrder(absl::Span<const uint8_t> from) {
  std::vector<uint8_t> out(from.size());
  for (size_t i = 0; i < from.size(); ++i) out[i / 32 * 32 + i % 4 * 8 + i % 32 / 4] = from[i];
  return out;
}

std::string Place(absl::string_view what, int64_t cell, int64_t n) {
  return absl::StrCat(what, " in group ", cell / n, " of column ", cell % n);
}

// Checks that QServe's kernel makes the same of every product and every integer of the weight.
// `zeros` are z, 0 to 255.
absl::Status CheckBytes(const std::vector<uint8_t>& scales, const std::vector<uint8_t>& zeros,
                        const Ranges& ranges, int64_t n) {
  for (size_t i = 0; i < scales.size(); ++i) {
    const int64_t cell = static_cast<int64_t>(i);
    if (scales[i] > kMostScale) {
      return BadTensor("s2_scales", Place(absl::StrCat(static_cast<int8_t>(scales[i])), cell, n),
                       absl::StrCat("0 to ", kMostScale, ": 15 times it has to fit in 8 bits"));
    }
    const int least = ranges.least[i] * scales[i] - zeros[i];
    const int most = ranges.most[i] * scales[i] - zeros[i];
    if (least < -128 || most > 127) {
      return BadTensor("s2_zeros",
                       Place(absl::StrCat("integers from ", least, " to ", most), cell, n),
                       "-128 to 127, which INT8 holds");
    }
  }
  return absl::OkStatus();
}

// Where the zero of a group is no multiple of its scale, none of its codes is zero, and its zero
// point is a whole number behind the scale. Else zero points are codes.
void SetZeros(const std::vector<uint8_t>& zeros, HostWeight* out) {
  const std::vector<uint8_t>& scales = out->scales;
  std::vector<uint8_t> codes(zeros.size());
  bool whole = true;
  for (size_t i = 0; i < zeros.size(); ++i) {
    codes[i] = scales[i] == 0 ? 0 : zeros[i] / scales[i];
    whole &= codes[i] <= kMostCode && codes[i] * scales[i] == zeros[i];
  }
  if (whole) {
    out->zeros = std::move(codes);
    return;
  }
  out->scheme.zero_kind = ZeroKind::kRealAfter;
  out->zeros.resize(2 * zeros.size());
  for (size_t i = 0; i < zeros.size(); ++i) {
    const uint16_t half = FloatToHalf(zeros[i]);  // which holds every one
    std::memcpy(out->zeros.data() + 2 * i, &half, sizeof(half));
  }
}

absl::Status DecodeGroups(const Settings& settings, const LinearTensors& tensors,
                          const TensorView& qweight, HostWeight* out) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* scales,
                        NeedTensor(tensors, "s2_scales", "I8 [K/group_size, N]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* zeros,
                        NeedTensor(tensors, "s2_zeros", "I8 [K/group_size, N]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("s2_scales", *scales, {"I8"}, 2));
  AWQD_RETURN_IF_ERROR(CheckTensor("s2_zeros", *zeros, {"I8"}, 2));
  const int64_t groups = scales->shape[0];
  AWQD_RETURN_IF_ERROR(
      CheckShape("s2_scales", *scales, {groups, out->n}, "[groups, N] for \"qweight\" [N, K/2]"));
  AWQD_RETURN_IF_ERROR(
      CheckShape("s2_zeros", *zeros, {groups, out->n}, "[groups, N], as \"s2_scales\""));
  AWQD_ASSIGN_OR_RETURN(const int64_t rows,
                        GroupRows(settings.group_size, out->k, groups, "s2_scales", false));
  out->scheme = Asymmetric(kBits, BlockRows(rows, out->k), DType::kInt8);
  out->scheme.outer = OuterKind::kColumn;
  AWQD_ASSIGN_OR_RETURN(out->outer, ToFloats("s1_scales", tensors.find("s1_scales")->second));
  out->scales = InColumnOrder(scales->bytes);
  std::vector<uint8_t> z = InColumnOrder(zeros->bytes);
  for (uint8_t& zero : z) zero = static_cast<uint8_t>(-zero);
  if (!qweight.unread()) {
    const Ranges ranges = DecodeCodes(qweight.bytes, rows, out);
    AWQD_RETURN_IF_ERROR(CheckBytes(out->scales, z, ranges, out->n));
  }
  SetZeros(z, out);
  return absl::OkStatus();
}

absl::Status DecodeChannels(const Settings& settings, const LinearTensors& tensors,
                            const TensorView& qweight, HostWeight* out) {
  if (settings.group_size > 0) {
    return BadTensor("s2_scales", "nothing",
                     absl::StrCat("I8 [K/group_size, N], as group_size is ", settings.group_size));
  }
  AWQD_ASSIGN_OR_RETURN(
      const TensorView* zeros,
      NeedTensor(tensors, "s1_szeros", "F16 or BF16 [N], or s2_scales and s2_zeros"));
  const TensorView& scales = tensors.find("s1_scales")->second;
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales("s1_szeros", *zeros, 1, false));
  AWQD_RETURN_IF_ERROR(CheckShape("s1_szeros", *zeros, {out->n}, "[N], as \"s1_scales\""));
  out->scheme = {.bits = kBits,
                 .zero_kind = ZeroKind::kRealAfter,
                 .zero_dtype = type,
                 .scale_dtype = FloatType(scales)};
  out->scales.assign(scales.bytes.begin(), scales.bytes.end());
  out->zeros.assign(zeros->bytes.begin(), zeros->bytes.end());
  if (!qweight.unread()) DecodeCodes(qweight.bytes, out->k, out);
  return absl::OkStatus();
}

absl::Status CheckLevels(const Settings& settings, const LinearTensors& tensors, bool groups) {
  if (!groups) return absl::OkStatus();
  if (FindTensor(tensors, "s1_szeros") != nullptr) {
    return BadTensor("s1_szeros", "a tensor", "none beside \"s2_scales\" and \"s2_zeros\"");
  }
  if (settings.group_size != -1) return absl::OkStatus();
  return BadTensor("s2_scales", "a tensor", "none, as group_size is -1");
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(object));
  AWQD_ASSIGN_OR_RETURN(const TensorView* qweight, NeedTensor(tensors, "qweight", "I8 [N, K/2]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* s1, NeedTensor(tensors, "s1_scales", "F16 or BF16 [N]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("qweight", *qweight, {"I8"}, 2));
  AWQD_RETURN_IF_ERROR(CheckScales("s1_scales", *s1, 1, false).status());
  HostWeight out;
  out.n = qweight->shape[0];
  out.k = 2 * qweight->shape[1];
  if (out.n % kTile != 0 || out.k % kTile != 0) {
    return BadTensor("qweight", absl::StrCat("K = ", out.k, ", N = ", out.n),
                     "multiples of 32: a tile is 32 by 32");
  }
  AWQD_RETURN_IF_ERROR(CheckShape("s1_scales", *s1, {out.n}, "[N] for \"qweight\" [N, K/2]"));
  const bool groups =
      FindTensor(tensors, "s2_scales") != nullptr || FindTensor(tensors, "s2_zeros") != nullptr;
  AWQD_RETURN_IF_ERROR(CheckLevels(settings, tensors, groups));
  AWQD_RETURN_IF_ERROR(groups ? DecodeGroups(settings, tensors, *qweight, &out)
                              : DecodeChannels(settings, tensors, *qweight, &out));
  out.activations.how = ActivationQuantization::kPerToken;
  return out;
}

}  // namespace

const Format kQServeFormat = {.name = "qserve",
                              .quant_method = "qserve",
                              .other_quant_method = "qoq",
                              .suffixes = kSuffixes,
                              .optional_suffixes = kOptional,
                              .code_dtypes = kCodeTypes,
                              .settings = kSettings,
                              .read = Read,
                              .decode_parts = Decode};

}  // namespace awqd
