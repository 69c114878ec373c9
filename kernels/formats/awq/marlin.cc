// Codes and scales in the order of Marlin's kernel, 4 bits, symmetric: W[k, n] = (q - 8) * scale.
//
//   format "gptq-marlin" (AutoGPTQ's checkpoint_format marlin, and the quant_method marlin):
//   B I32 [K/16, 2 N]; s F16 or BF16 [groups, N]; bias [N], optional
//   format "awq-marlin" (AutoAWQ's version marlin): the same as qweight, scales and bias
//
// The 128 words from 128 j on of a row of words hold 16 rows and 64 columns. Word 16 c + 4 b + a of
// them has rows 2 b + {0, 1, 8, 9} of the columns c and 8 + c of the 16 from 16 a on: its bits,
// from the low ones, are rows 0 and 8 of the first column, 0 and 8 of the second, then 1 and 9
// likewise. Scales of several groups are permuted within 64 columns, 0 8 16 ... 56 1 9 ... 63;
// those of one group within 32, 0 1 8 9 16 17 24 25 2 3 10 11 ... 30 31. Facts: AutoAWQ 0.2.9,
// modules/linear/marlin.py; AutoGPTQ, qlinear_marlin.py.
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/awq/awq.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr int64_t kRows = 16, kColumns = 64;  // of a tile
constexpr int64_t kTileBytes = kRows * kColumns / 2;
constexpr absl::string_view kCodeTypes[] = {"I32"};

// --- Tensors ---

// Rows [16, 64], one code to a byte.
void UnpackTile(const uint8_t* from, uint8_t* to) {
  for (int c = 0; c < 8; ++c) {
    for (int b = 0; b < 4; ++b) {
      for (int a = 0; a < 4; ++a, from += 4) {
        uint32_t word = LoadWord(from);
        uint8_t* const out = to + 2 * b * kColumns + 16 * a + c;
        for (int nibble = 0; nibble < 8; ++nibble, word >>= 4) {
          const int row = nibble / 4 + nibble % 2 * 8, col = nibble % 4 / 2 * 8;
          out[row * kColumns + col] = word & 15;
        }
      }
    }
  }
}

void DecodeCodes(absl::Span<const uint8_t> bytes, HostWeight* out) {
  out->codes = AllocateCodes(static_cast<int64_t>(bytes.size()));
  const uint8_t* from = bytes.data();
  uint8_t tile[kRows * kColumns];
  for (int64_t row0 = 0; row0 < out->k; row0 += kRows) {
    for (int64_t col = 0; col < out->n; col += kColumns, from += kTileBytes) {
      UnpackTile(from, tile);
      for (int64_t i = 0; i < kRows; ++i) {
        PackNibbles(tile + i * kColumns, kColumns,
                    out->codes.data() + ((row0 + i) * out->n + col) / 2);
      }
    }
  }
}

// Where the scale at `at` belongs, among all of its group.
int64_t ColumnOf(int64_t at, bool one_group) {
  if (one_group) return at / 32 * 32 + at % 32 / 8 * 2 + at % 8 / 2 * 8 + at % 2;
  return at / 64 * 64 + at % 8 * 8 + at % 64 / 8;
}

std::vector<uint8_t> InColumnOrder(absl::Span<const uint8_t> scales, int64_t groups, int64_t n) {
  std::vector<uint8_t> out(scales.size());
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t at = 0; at < n; ++at) {
      std::memcpy(out.data() + 2 * (group * n + ColumnOf(at, groups == 1)),
                  scales.data() + 2 * (group * n + at), 2);
    }
  }
  return out;
}

// By the names that a format has for them.
absl::StatusOr<HostWeight> Decode(int64_t group_size, absl::string_view codes_name,
                                  absl::string_view scales_name, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* codes,
                        NeedTensor(tensors, codes_name, "I32 [K/16, 2 N]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scales,
                        NeedTensor(tensors, scales_name, "F16 or BF16 [K/group_size, N]"));
  AWQD_RETURN_IF_ERROR(CheckTensor(codes_name, *codes, {"I32"}, 2));
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales(scales_name, *scales, 2, false));
  HostWeight out;
  out.k = codes->shape[0] * kRows;
  out.n = scales->shape[1];
  const int64_t groups = scales->shape[0];
  if (out.n % kColumns != 0) {
    return BadTensor(scales_name, absl::StrCat("N = ", out.n),
                     "a multiple of 64: 64 columns lie together");
  }
  AWQD_RETURN_IF_ERROR(
      CheckShape(codes_name, *codes, {codes->shape[0], 2 * out.n},
                 absl::StrCat("[K/16, 2 N] for N = ", out.n, " of tensor \"", scales_name, "\"")));
  AWQD_ASSIGN_OR_RETURN(const int64_t rows,
                        GroupRows(group_size, out.k, groups, scales_name, false));
  out.scheme = Symmetric(4, BlockRows(rows, out.k), type);
  out.scales = InColumnOrder(scales->bytes, groups, out.n);
  if (codes->unread()) return out;
  DecodeCodes(codes->bytes, &out);
  return out;
}

// --- awq-marlin ---

constexpr absl::string_view kAwqSuffixes[] = {"qweight", "scales", "qzeros", "bias"};
constexpr absl::string_view kAwqOptional[] = {"qzeros", "bias"};
constexpr absl::string_view kAwqCommon[] = {"scales", "bias"};
constexpr absl::string_view kAwqVersions[] = {"marlin"};
constexpr AwqVersion kAwqVersion = {.names = kAwqVersions};

absl::Status CheckNoZeroPoints(const AwqLinear& settings) {
  if (!settings.zero_point.value_or(false)) return absl::OkStatus();
  return BadValue("zero_point", "true", "false: version marlin has no zero points");
}

absl::StatusOr<QuantConfig> ReadAwq(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(QuantConfig out, ReadAwqConfig(config, kAwqVersion));
  AWQD_ASSIGN_OR_RETURN(const AwqLinear settings, ReadAwqLinear(config, kAwqVersion));
  AWQD_RETURN_IF_ERROR(CheckNoZeroPoints(settings));
  return out;
}

absl::StatusOr<HostWeight> DecodeAwq(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const AwqLinear settings, ReadAwqLinear(object, kAwqVersion));
  AWQD_RETURN_IF_ERROR(CheckNoZeroPoints(settings));
  if (FindTensor(tensors, "qzeros") != nullptr) {
    return BadTensor("qzeros", "a tensor", "none: version marlin has no zero points");
  }
  return Decode(settings.group_size, "qweight", "scales", tensors);
}

// --- gptq-marlin ---

constexpr absl::string_view kGptqSuffixes[] = {"B", "s", "bias"};
constexpr absl::string_view kGptqOptional[] = {"bias"};
constexpr absl::string_view kGptqSettings[] = {"bits", "desc_act", "group_size", "sym"};

absl::Status CheckMarlin(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(const std::string method, ReadWord(config, "quant_method"));
  AWQD_ASSIGN_OR_RETURN(const auto flag, ReadBool(config, "is_marlin_format"));
  bool marlin = flag.value_or(method == "marlin");
  for (absl::string_view name : {"checkpoint_format", "format"}) {
    AWQD_ASSIGN_OR_RETURN(const std::string format, ReadWord(config, name));
    if (format.empty()) continue;
    const std::string shown = Quoted(format);
    if (format != "marlin" && marlin) {
      return BadValue(name, shown, flag ? "\"marlin\", as is_marlin_format is true" : "\"marlin\"");
    }
    if (format != "marlin") return UnreadSetting(name, shown, "\"marlin\"");
    marlin = true;
  }
  if (marlin) return absl::OkStatus();
  return UnreadSetting("checkpoint_format", "nothing", "\"marlin\"");
}

// Its group size.
absl::StatusOr<int64_t> ReadGptqSettings(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, "bits", 1, 32));
  AWQD_ASSIGN_OR_RETURN(const auto sym, ReadBool(object, "sym"));
  AWQD_ASSIGN_OR_RETURN(const auto desc_act, ReadBool(object, "desc_act"));
  if (bits.value_or(4) != 4) return BadValue("bits", *bits, "4: Marlin's codes have 4 bits");
  if (!sym.value_or(true)) {
    return BadValue("sym", "false", "true: checkpoint_format marlin has no zero points");
  }
  if (desc_act.value_or(false)) {
    return BadValue("desc_act", "true", "false: checkpoint_format marlin has no g_idx");
  }
  return ReadGroupSize(object);
}

absl::StatusOr<QuantConfig> ReadGptq(const Setting& config) {
  AWQD_RETURN_IF_ERROR(CheckMarlin(config));
  AWQD_ASSIGN_OR_RETURN(const int64_t group_size, ReadGptqSettings(config));
  if (group_size == 0) return BadValue("group_size", "nothing", "-1 (all of K) or at least 1");
  return OneRule(config, OnlySettings(config, kGptqSettings));
}

absl::StatusOr<HostWeight> DecodeGptq(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const int64_t group_size, ReadGptqSettings(object));
  return Decode(group_size, "B", "s", tensors);
}

}  // namespace

const Format kAwqMarlinFormat = {.name = "awq-marlin",
                                 .quant_method = "awq",
                                 .suffixes = kAwqSuffixes,
                                 .optional_suffixes = kAwqOptional,
                                 .common_suffixes = kAwqCommon,
                                 .settings = kAwqSettings,
                                 .read = ReadAwq,
                                 .decode_parts = DecodeAwq};

const Format kGptqMarlinFormat = {.name = "gptq-marlin",
                                  .quant_method = "gptq",
                                  .other_quant_method = "marlin",
                                  .suffixes = kGptqSuffixes,
                                  .optional_suffixes = kGptqOptional,
                                  .code_dtypes = kCodeTypes,
                                  .settings = kGptqSettings,
                                  .read = ReadGptq,
                                  .decode_parts = DecodeGptq};

}  // namespace awqd
