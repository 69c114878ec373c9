// Format "comfy", as ComfyUI and its package comfy-kitchen write the layers of a single file.
//
//   float8_e4m3fn     weight F8_E4M3 [N, K]; weight_scale, or scale_weight of 2025's files, F32 []
//   mxfp8             weight F8_E4M3 [N, K]; weight_scale U8 = exponent + 127, tiled, groups of 32
//   nvfp4             weight U8 [N, K / 2], E2M1, even k in the high half of a byte; weight_scale
//                     F8_E4M3, tiled, groups of 16; weight_scale_2 F32 [], which multiplies;
//                     pre_quant_scale [K], optional: what activations are multiplied by
//   int8_tensorwise   weight I8 [N, K]; weight_scale F32 [], [N] or [N, 1]; rotated with convrot
//   convrot_w4a4      weight I8 [N, K / 2], two's complement, even k in the low half of a byte;
//                     weight_scale F32 [N] or [N, 1]; rotated
//   asym_w4a8_int8    weight I8 [N, K / 2], even k in the low half, or [N, 3K / 4]: the lower four
//                     bits of 6 likewise, and behind those of a row the upper two, four to a byte;
//                     weight_s_rel F8_E4M3 or F32 [N, K / group_size]; weight_s_channel F32 [N];
//                     weight_codebook F32 [16], optional, of 4 bits; rotated:
//                     W[k, n] = round(codebook[code] * s_rel), in -127 .. 127, * s_channel[n]
//                     without a codebook code - 8, or code - 32, stands for its value
//   awq_w4a16         weight I8 [N, K / 2], even k in the low half; weight_scale, weight_zeros F16,
//                     BF16 or F32 [K / group_size, N]:
//                     W[k, n] = (code - 8) * weight_scale + weight_zeros
//   bias [N], optional; also F8_E4M3
//   comfy_quant U8, optional: the settings as JSON, which the checkpoint reads
//
// Tiled scales are those of [N, groups], padded to multiples of 128 x 4, in tiles of 512 bytes as
// cuBLAS reads them. Codes of nvfp4 and mxfp8 are padded to multiples of 16 and 32 in both
// directions; a bias tells N, and K stays padded.
//
// Rotated: blocks of convrot_groupsize in features of x are multiplied by a Hadamard matrix that is
// the Kronecker power of [[1 1 1 -1] [1 1 -1 1] [1 -1 1 1] [-1 1 1 1]] / 2. It is Sylvester's with
// signs of rows, which become the factor, and with an order and signs of columns, which go into the
// codes. So a code that is the least of its type cannot stand where the sign is negative.
//
// Values are FP32's. The package multiplies both scales of nvfp4 first, and rounds scales to 16 bits
// for results of 16 bits: last places apart. In a request E4M3 and E8M0 are U8. Its settings:
//
//   {"layers": {"blocks.0.attn.qkv": {"format": "int8_tensorwise", "convrot": true,
//                                     "convrot_groupsize": 256}}}
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/float8.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"weight",          "weight_scale", "weight_scale_2",
                                           "scale_weight",    "weight_s_rel", "weight_s_channel",
                                           "weight_codebook", "weight_zeros", "pre_quant_scale",
                                           "comfy_quant",     "bias"};
constexpr absl::string_view kOptional[] = {
    "weight_scale",    "weight_scale_2", "scale_weight",    "weight_s_rel", "weight_s_channel",
    "weight_codebook", "weight_zeros",   "pre_quant_scale", "comfy_quant",  "bias"};
constexpr absl::string_view kUncut[] = {"weight_codebook", "comfy_quant"};
constexpr absl::string_view kWithoutEffect[] = {"scale_input"};
constexpr absl::string_view kCodeTypes[] = {"F8_E4M3", "I8", "U8"};
constexpr absl::string_view kSettings[] = {"format", "scaled", "convrot", "convrot_groupsize",
                                           "group_size"};
constexpr absl::string_view kScale = "weight_scale";
constexpr absl::string_view kOldScale = "scale_weight";
constexpr absl::string_view kCodebook = "weight_codebook";

// --- Settings ---

enum class Codes { kFp8, kMxfp8, kNvfp4, kInt8, kInt4, kLevels, kAwq };
struct LayerFormat {
  absl::string_view name;
  Codes codes;
  bool rotated;        // whatever the setting convrot says
  int64_t group_size;  // where no setting says another; 0: none may
  // The tensors that it needs beside the weight.
  std::array<absl::string_view, 2> needs = {};
};
constexpr LayerFormat kFormats[] = {
    {"float8_e4m3fn", Codes::kFp8, false, 0},
    {"mxfp8", Codes::kMxfp8, false, 0, {kScale}},
    {"nvfp4", Codes::kNvfp4, false, 0, {kScale, "weight_scale_2"}},
    {"int8_tensorwise", Codes::kInt8, false, 0, {kScale}},
    {"convrot_w4a4", Codes::kInt4, true, 0, {kScale}},
    {"asym_w4a8_int8", Codes::kLevels, true, 16, {"weight_s_rel", "weight_s_channel"}},
    {"awq_w4a16", Codes::kAwq, false, 64, {kScale, "weight_zeros"}}};
constexpr int64_t kRotation = 256;  // where nothing says another

struct Settings {
  const LayerFormat* layout = nullptr;
  bool scaled = true;
  int64_t rotation = 0;  // 0: none
  int64_t group_size = 0;
};

// A member of the layer, or of "params" in it.
const Setting& ObjectOf(const Setting& layer, absl::string_view name) {
  const Setting* const params = FindSetting(layer, "params");
  const bool inner = FindSetting(layer, name) == nullptr && params != nullptr &&
                     params->kind == Setting::Kind::kObject;
  return inner ? *params : layer;
}

absl::StatusOr<Settings> ReadSettings(const Setting& layer) {
  if (layer.kind != Setting::Kind::kObject) {
    return BadSetting("comfy_quant", layer, "an object");
  }
  AWQD_ASSIGN_OR_RETURN(const std::string name, ReadWord(layer, "format"));
  const auto* const layout =
      absl::c_find_if(kFormats, [&](const LayerFormat& known) { return known.name == name; });
  if (layout == std::end(kFormats)) {
    const std::string expected = absl::StrJoin(
        kFormats, ", ",
        [](std::string* out, const LayerFormat& known) { absl::StrAppend(out, known.name); });
    if (name.empty()) return BadValue("format", "nothing", absl::StrCat("one of ", expected));
    return UnreadSetting("format", Quoted(name), expected);
  }
  Settings out = {.layout = layout, .group_size = layout->group_size};
  AWQD_ASSIGN_OR_RETURN(const auto scaled, ReadBool(layer, "scaled"));
  out.scaled = scaled.value_or(true);
  AWQD_ASSIGN_OR_RETURN(const auto convrot, ReadBool(ObjectOf(layer, "convrot"), "convrot"));
  AWQD_ASSIGN_OR_RETURN(const auto size, ReadInteger(ObjectOf(layer, "convrot_groupsize"),
                                                     "convrot_groupsize", 4, Hadamard::kMostRows));
  if (convrot.value_or(false) && !layout->rotated && layout->codes != Codes::kInt8) {
    return UnreadSetting("convrot", "true", absl::StrCat("false with format ", layout->name));
  }
  if (layout->rotated || convrot.value_or(false)) {
    out.rotation = size.value_or(kRotation);
    const auto bits = static_cast<uint64_t>(out.rotation);
    if (!std::has_single_bit(bits) || std::countr_zero(bits) % 2 != 0) {
      return BadValue("convrot_groupsize", out.rotation, "a power of 4");
    }
  }
  if (layout->group_size == 0) return out;
  AWQD_ASSIGN_OR_RETURN(const auto group,
                        ReadInteger(ObjectOf(layer, "group_size"), "group_size", 1, 1 << 30));
  out.group_size = group.value_or(layout->group_size);
  return out;
}

Setting ToSetting(const Settings& settings) {
  Setting out;
  out.members["format"] = Setting::String(std::string(settings.layout->name));
  if (!settings.scaled) out.members["scaled"] = Setting::Literal(false);
  if (settings.rotation > 0) {
    out.members["convrot"] = Setting::Literal(true);
    out.members["convrot_groupsize"] = Setting::Literal(settings.rotation);
  }
  if (settings.group_size > 0) out.members["group_size"] = Setting::Literal(settings.group_size);
  return out;
}

// One rule for all layers of the same settings.
absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(const Setting* layers, ReadObject(config, "layers"));
  if (layers == nullptr || layers->members.empty()) {
    return BadValue("layers", "nothing", "at least one layer");
  }
  std::map<std::string, LinearRule> rules;
  for (const auto& [path, layer] : layers->members) {
    const absl::StatusOr<Settings> settings = ReadSettings(layer);
    LinearRule& rule =
        rules[settings.ok() ? absl::StrCat(settings->layout->name, " ", settings->scaled, " ",
                                           settings->rotation, " ", settings->group_size)
                            : settings.status().ToString()];
    rule.targets.push_back({ModulePattern::Kind::kPath, path});
    if (settings.ok()) {
      rule.settings = ToSetting(*settings);
    } else {
      rule.unread = settings.status();
    }
    AWQD_RETURN_IF_ERROR(CheckRules(rules.size()));
  }
  QuantConfig out;
  for (auto& [key, rule] : rules) out.rules.push_back(std::move(rule));
  return out;
}

absl::string_view Lacks(const Setting& object, HasTensor has) {
  const absl::StatusOr<Settings> settings = ReadSettings(object);
  if (!settings.ok()) return "";
  if (settings->layout->codes == Codes::kFp8 && settings->scaled) {
    return has(kOldScale) || has(kScale) ? "" : kScale;
  }
  for (const absl::string_view suffix : settings->layout->needs) {
    if (!suffix.empty() && !has(suffix)) return suffix;
  }
  return "";
}

// --- Tensors ---

// As DecodeE2m1 and DecodeFp8 take them.
struct PlainScales {
  TensorView tensor;
  std::vector<uint8_t> bytes;
};

// Scales of one byte in tiles, as rows [N, groups] of the first N.
absl::StatusOr<PlainScales> Untile(const TensorView& tiled, int64_t n, int64_t groups,
                                   absl::string_view dtype) {
  constexpr int64_t kTileRows = 128, kTileColumns = 4, kTile = kTileRows * kTileColumns;
  AWQD_RETURN_IF_ERROR(CheckTensor(kScale, tiled, {dtype, "U8"}, 2));
  const int64_t columns = CeilDiv(groups, kTileColumns);
  AWQD_RETURN_IF_ERROR(
      CheckShape(kScale, tiled, {RoundUp(n, kTileRows), columns * kTileColumns},
                 absl::StrCat("[", n, ", ", groups, "] (N, groups) in tiles of 128 x 4, padded")));
  PlainScales out = {{std::string(dtype), {n, groups}}, std::vector<uint8_t>(n * groups)};
  for (int64_t row = 0; row < n; ++row) {
    const int64_t in_tile = row % 32 * 16 + row % kTileRows / 32 * kTileColumns;
    const int64_t begin = row / kTileRows * columns * kTile + in_tile;
    for (int64_t group = 0; group < groups; ++group) {
      out.bytes[row * groups + group] =
          tiled.bytes[begin + group / kTileColumns * kTile + group % kTileColumns];
    }
  }
  out.tensor.bytes = out.bytes;
  return out;
}

// Leaves the rows of codes [N, ...] out that a bias shows to be padding.
void CutPadding(const LinearTensors& tensors, int64_t padded_to, TensorView* codes) {
  const TensorView* const bias = FindTensor(tensors, "bias");
  if (bias == nullptr || bias->shape.size() != 1) return;
  const int64_t n = bias->shape[0], rows = codes->shape[0];
  if (n < 1 || n >= rows || RoundUp(n, padded_to) != rows) return;
  const auto bytes = static_cast<size_t>(n * codes->shape[1]);
  codes->shape[0] = n;
  codes->bytes = absl::Span<const uint8_t>(codes->bytes.data(), bytes);
}

// A tensor of codes, whose bytes are those of its shape.
absl::StatusOr<TensorView> FindCodes(const LinearTensors& tensors, absl::string_view dtype,
                                     absl::string_view shape) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* codes,
                        NeedTensor(tensors, "weight", absl::StrCat(dtype, " ", shape)));
  if (dtype == "F8_E4M3") {
    AWQD_RETURN_IF_ERROR(CheckTensor("weight", *codes, {dtype, "U8"}, 2));
  } else {
    AWQD_RETURN_IF_ERROR(CheckTensor("weight", *codes, {dtype}, 2));
  }
  return *codes;
}

// Checks that K is whole groups, and returns their number.
absl::StatusOr<int64_t> CountGroups(const TensorView& codes, int64_t k, int64_t size) {
  if (k % size == 0) return k / size;
  return BadTensor("weight", absl::StrCat("shape ", ShapeText(codes.shape)),
                   absl::StrCat("a K in groups of ", size, ", not ", k));
}

absl::StatusOr<HostWeight> DecodePlainFp8(bool scaled, const LinearTensors& tensors) {
  static constexpr float kOne = 1;
  const bool old = FindTensor(tensors, kOldScale) != nullptr;
  if (old && FindTensor(tensors, kScale) != nullptr) {
    return BadTensor(kOldScale, "it beside \"weight_scale\"", "only one of them");
  }
  if (scaled) return DecodeFp8({.name = old ? kOldScale : kScale}, tensors);
  LinearTensors with_one = tensors;
  with_one[std::string(kScale)] = {
      "F32", {}, absl::MakeSpan(reinterpret_cast<const uint8_t*>(&kOne), sizeof(kOne))};
  return DecodeFp8({.name = kScale}, with_one);
}

absl::StatusOr<HostWeight> DecodeMxfp8(const LinearTensors& tensors) {
  constexpr int64_t kGroup = 32;
  AWQD_ASSIGN_OR_RETURN(TensorView codes, FindCodes(tensors, "F8_E4M3", "[N, K]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale, NeedTensor(tensors, kScale, "U8 in tiles"));
  AWQD_ASSIGN_OR_RETURN(const int64_t groups, CountGroups(codes, codes.shape[1], kGroup));
  AWQD_ASSIGN_OR_RETURN(const PlainScales scales,
                        Untile(*scale, codes.shape[0], groups, "F8_E8M0"));
  TensorView used = scales.tensor;
  CutPadding(tensors, kGroup, &codes);
  used.shape[0] = codes.shape[0];
  used.bytes = used.bytes.first(codes.shape[0] * groups);
  return DecodeFp8({kScale, 1, kGroup, true},
                   {{"weight", std::move(codes)}, {std::string(kScale), std::move(used)}});
}

absl::StatusOr<HostWeight> DecodeNvfp4(const LinearTensors& tensors) {
  constexpr int64_t kGroup = 16;
  AWQD_ASSIGN_OR_RETURN(TensorView codes, FindCodes(tensors, "U8", "[N, K/2]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale, NeedTensor(tensors, kScale, "F8_E4M3 in tiles"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* outer, NeedTensor(tensors, "weight_scale_2", "F32 []"));
  AWQD_ASSIGN_OR_RETURN(const float number, ReadNumber("weight_scale_2", *outer));
  AWQD_ASSIGN_OR_RETURN(const int64_t groups, CountGroups(codes, codes.shape[1] * 2, kGroup));
  AWQD_ASSIGN_OR_RETURN(const PlainScales scales,
                        Untile(*scale, codes.shape[0], groups, "F8_E4M3"));
  TensorView used = scales.tensor;
  CutPadding(tensors, kGroup, &codes);
  used.shape[0] = codes.shape[0];
  used.bytes = used.bytes.first(codes.shape[0] * groups);
  AWQD_ASSIGN_OR_RETURN(
      HostWeight out,
      DecodeE2m1({.group_size = kGroup, .first = FirstNibble::kHigh},
                 {{"weight", std::move(codes)}, {std::string(kScale), std::move(used)}}));
  out.scheme.outer = OuterKind::kOne;
  out.outer = {number};
  const TensorView* const factor = FindTensor(tensors, "pre_quant_scale");
  if (factor == nullptr) return out;
  AWQD_RETURN_IF_ERROR(CheckScales("pre_quant_scale", *factor, 1, true).status());
  AWQD_RETURN_IF_ERROR(CheckShape("pre_quant_scale", *factor, {out.k}, "K"));
  AWQD_ASSIGN_OR_RETURN(out.factor, ToFloats("pre_quant_scale", *factor));
  return out;
}

// Scales of columns: [N], or [N, 1].
absl::Status DecodeColumnScales(absl::string_view name, const TensorView& scale, HostWeight* out) {
  const size_t rank = scale.shape.size() == 2 ? 2 : 1;
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales(name, scale, rank, true));
  if (rank == 1) {
    AWQD_RETURN_IF_ERROR(CheckShape(name, scale, {out->n}, "N"));
  } else {
    AWQD_RETURN_IF_ERROR(CheckShape(name, scale, {out->n, 1}, "N, 1"));
  }
  out->scheme.scale_dtype = type;
  out->scales.assign(scale.bytes.begin(), scale.bytes.end());
  return absl::OkStatus();
}

absl::StatusOr<HostWeight> DecodeInt4(const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView codes, FindCodes(tensors, "I8", "[N, K/2]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale, NeedTensor(tensors, kScale, "F32 [N]"));
  HostWeight out;
  out.n = codes.shape[0];
  out.k = codes.shape[1] * 2;
  out.scheme = Symmetric(4, 0, DType::kFp32);
  AWQD_RETURN_IF_ERROR(DecodeColumnScales(kScale, *scale, &out));
  if (codes.unread()) return out;
  std::vector<uint8_t> pairs(codes.bytes.begin(), codes.bytes.end());
  for (uint8_t& pair : pairs) pair ^= 0x88;  // two's complement to 0 .. 15
  out.codes = TransposedNibbles(pairs, out.n, out.k, FirstNibble::kLow);
  return out;
}

// The level, an integer from -127 to 127, as an unsigned code with a zero of 128.
uint8_t LevelCode(float value, float scale) {
  const float level = std::clamp(std::nearbyint(value * scale), -127.0f, 127.0f);
  return static_cast<uint8_t>(128 + static_cast<int>(level));
}

// Codes of 4 bits, or of 6, whose upper two bits follow the lower four of all the row.
absl::StatusOr<HostWeight> DecodeLevels(int64_t group_size, const LinearTensors& tensors) {
  constexpr absl::string_view kRelative = "weight_s_rel", kChannel = "weight_s_channel";
  AWQD_ASSIGN_OR_RETURN(const TensorView codes, FindCodes(tensors, "I8", "[N, K/2] or [N, 3K/4]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* group_scales,
                        NeedTensor(tensors, kRelative, "F8_E4M3 or F32 [N, K/group_size]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale, NeedTensor(tensors, kChannel, "F32 [N]"));
  std::vector<float> relative;
  if (group_scales->dtype == "F32") {
    AWQD_RETURN_IF_ERROR(CheckTensor(kRelative, *group_scales, {"F32"}, 2));
    AWQD_ASSIGN_OR_RETURN(relative, ToFloats(kRelative, *group_scales));
  } else {
    AWQD_RETURN_IF_ERROR(CheckByteScales(kRelative, *group_scales, DType::kE4m3, 2));
    for (const uint8_t bits : group_scales->bytes) relative.push_back(E4m3ToFloat(bits));
  }
  HostWeight out;
  out.n = codes.shape[0];
  const int64_t groups = group_scales->shape[1], row_bytes = codes.shape[1];
  AWQD_RETURN_IF_ERROR(
      CheckShape(kRelative, *group_scales, {out.n, groups}, "[N, K / group_size]"));
  // Both factors are small enough: a tensor has that many elements, and a setting is below 2^31.
  out.k = groups * group_size;
  const int bits = row_bytes * 4 == out.k * 3 ? 6 : 4;
  if (row_bytes * 8 != out.k * bits) {
    return BadTensor("weight", absl::StrCat("shape ", ShapeText(codes.shape)),
                     absl::StrCat("rows of K = ", out.k, " codes of 4 or 6 bits (", groups,
                                  " groups of ", group_size, ")"));
  }
  out.scheme = Symmetric(8, 0, DType::kFp32);
  AWQD_RETURN_IF_ERROR(DecodeColumnScales(kChannel, *scale, &out));
  std::vector<float> values(1 << bits);
  for (int code = 0; code < 1 << bits; ++code) {
    values[code] = static_cast<float>(code - (1 << (bits - 1)));
  }
  if (const TensorView* const codebook = FindTensor(tensors, kCodebook)) {
    AWQD_RETURN_IF_ERROR(CheckTensor(kCodebook, *codebook, {"F32"}, 1));
    AWQD_RETURN_IF_ERROR(CheckShape(kCodebook, *codebook, {1 << 4}, "one for each code of 4 bits"));
    if (bits == 6) return BadTensor(kCodebook, "it", "none with codes of 6 bits");
    AWQD_ASSIGN_OR_RETURN(values, ToFloats(kCodebook, *codebook));
  }
  if (codes.unread()) return out;
  const auto read = [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
    const uint8_t* const low = codes.bytes.data() + row * row_bytes;
    const uint8_t* const high = low + out.k / 2;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t k = col + i;
      int code = k % 2 == 0 ? low[k / 2] & 15 : low[k / 2] >> 4;
      if (bits == 6) code |= (high[k / 4] >> k % 4 * 2 & 3) << 4;
      to[i] = LevelCode(values[code], relative[row * groups + k / group_size]);
    }
  };
  out.codes = PackTransposed(out.n, out.k, 8, read);
  return out;
}

absl::StatusOr<HostWeight> DecodeAwq(int64_t group_size, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView codes, FindCodes(tensors, "I8", "[N, K/2]"));
  constexpr absl::string_view kZeros = "weight_zeros";
  constexpr absl::string_view kExpected = "F16, BF16 or F32 [K/group_size, N]";
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale, NeedTensor(tensors, kScale, kExpected));
  AWQD_ASSIGN_OR_RETURN(const TensorView* zeros, NeedTensor(tensors, kZeros, kExpected));
  HostWeight out;
  out.n = codes.shape[0];
  out.k = codes.shape[1] * 2;
  AWQD_ASSIGN_OR_RETURN(const int64_t groups, CountGroups(codes, out.k, group_size));
  out.scheme = {.block_rows = BlockRows(group_size, out.k),
                .zero_kind = ZeroKind::kRealAfter,
                .zero_dtype = DType::kFp32};
  AWQD_ASSIGN_OR_RETURN(out.scheme.scale_dtype, CheckScales(kScale, *scale, 2, true));
  AWQD_RETURN_IF_ERROR(CheckScales(kZeros, *zeros, 2, true).status());
  AWQD_ASSIGN_OR_RETURN(const std::vector<float> scales, ToFloats(kScale, *scale));
  AWQD_ASSIGN_OR_RETURN(const std::vector<float> offsets, ToFloats(kZeros, *zeros));
  AWQD_RETURN_IF_ERROR(CheckShape(kScale, *scale, {groups, out.n}, "K / group_size, N"));
  AWQD_RETURN_IF_ERROR(CheckShape(kZeros, *zeros, {groups, out.n}, "as \"weight_scale\""));
  out.scales.assign(scale->bytes.begin(), scale->bytes.end());
  std::vector<float> after(scales.size());
  for (size_t i = 0; i < after.size(); ++i) after[i] = 8 * scales[i] - offsets[i];
  out.zeros.resize(after.size() * sizeof(float));
  std::memcpy(out.zeros.data(), after.data(), out.zeros.size());
  if (codes.unread()) return out;
  out.codes = TransposedNibbles(codes.bytes, out.n, out.k, FirstNibble::kLow);
  return out;
}

// --- Rotation ---

// The sign of a row or column of the matrix against Sylvester's: odd numbers of digits 3 to base 4.
bool IsNegative(int64_t index) {
  return std::popcount(static_cast<uint64_t>(index & index >> 1 & 0x5555555555555555)) % 2 != 0;
}

// The column of Sylvester's matrix: the bits of each digit to base 4 change places.
int64_t SylvesterColumn(int64_t column) {
  return (column & 0x5555555555555555) << 1 | (column >> 1 & 0x5555555555555555);
}

// Negates codes of `bits` bits with a zero of 2^(bits-1), N of a row. False where one is the least.
bool Negate(int bits, int64_t n, uint8_t* row) {
  bool negated = true;
  for (int64_t i = 0; i < n; ++i) {
    if (bits == 8) {
      negated &= row[i] != 0;
      row[i] = static_cast<uint8_t>(-row[i]);
      continue;
    }
    const int shift = static_cast<int>(i % 2 * 4);
    const int code = row[i / 2] >> shift & 15;
    negated &= code != 0;
    row[i / 2] = static_cast<uint8_t>((row[i / 2] & 0xf0 >> shift) | (-code & 15) << shift);
  }
  return negated;
}

// Makes the transform of a weight whose scales are by column, and its rows those of Sylvester's
// matrix.
absl::Status Rotate(int64_t size, HostWeight* out) {
  out->hadamard = {size, static_cast<float>(1 / std::sqrt(static_cast<double>(size)))};
  if (out->k % size != 0) {
    return BadValue("convrot_groupsize", size, absl::StrCat("a divisor of K = ", out->k));
  }
  AWQD_RETURN_IF_ERROR(Validate(out->hadamard, out->k));
  out->factor.resize(out->k);
  for (int64_t k = 0; k < out->k; ++k) out->factor[k] = IsNegative(k % size) ? -1.0f : 1.0f;
  if (out->codes.empty()) return absl::OkStatus();
  const int bits = out->code_bits();
  const int64_t row_bytes = out->row_bytes();
  for (int64_t k = 0; k < out->k; ++k) {
    uint8_t* const row = out->codes.data() + k * row_bytes;
    const int64_t other = k - k % size + SylvesterColumn(k % size);
    if (other > k) std::swap_ranges(row, row + row_bytes, row + (other - k) * row_bytes);
    if (!IsNegative(k % size) || Negate(bits, out->n, row)) continue;
    return BadTensor("weight", absl::StrCat(-(1 << (bits - 1)), " in column ", other),
                     absl::StrCat(1 - (1 << (bits - 1)), " to ", (1 << (bits - 1)) - 1,
                                  ", as the rotation negates the column"));
  }
  return absl::OkStatus();
}

absl::StatusOr<HostWeight> DecodeCodes(const Settings& settings, const LinearTensors& tensors) {
  switch (settings.layout->codes) {
    case Codes::kFp8:
      return DecodePlainFp8(settings.scaled, tensors);
    case Codes::kMxfp8:
      return DecodeMxfp8(tensors);
    case Codes::kNvfp4:
      return DecodeNvfp4(tensors);
    case Codes::kInt8:
      return DecodeInt8(tensors);
    case Codes::kInt4:
      return DecodeInt4(tensors);
    case Codes::kLevels:
      return DecodeLevels(settings.group_size, tensors);
    case Codes::kAwq:
      return DecodeAwq(settings.group_size, tensors);
  }
  return BadValue("format", settings.layout->name, "one that is read");
}

// A tensor of another format would change what the codes mean.
absl::Status CheckNoOthers(const Settings& settings, const LinearTensors& tensors) {
  const bool fp8 = settings.layout->codes == Codes::kFp8;
  for (const auto& [suffix, tensor] : tensors) {
    if (suffix == "weight" || suffix == "bias" || suffix == "comfy_quant" ||
        absl::c_linear_search(settings.layout->needs, suffix) ||
        (fp8 && settings.scaled && (suffix == kScale || suffix == kOldScale)) ||
        (settings.layout->codes == Codes::kNvfp4 && suffix == "pre_quant_scale") ||
        (settings.layout->codes == Codes::kLevels && suffix == kCodebook)) {
      continue;
    }
    return BadTensor(suffix, "it", absl::StrCat("none with format ", settings.layout->name));
  }
  return absl::OkStatus();
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(object));
  AWQD_RETURN_IF_ERROR(CheckNoOthers(settings, tensors));
  AWQD_ASSIGN_OR_RETURN(HostWeight out, DecodeCodes(settings, tensors));
  if (settings.rotation > 0) AWQD_RETURN_IF_ERROR(Rotate(settings.rotation, &out));
  return out;
}

}  // namespace

const Format kComfyFormat = {.name = "comfy",
                             .quant_method = "comfy_quant",
                             .suffixes = kSuffixes,
                             .optional_suffixes = kOptional,
                             .lacks = Lacks,
                             .code_dtypes = kCodeTypes,
                             .uncut_suffixes = kUncut,
                             .suffixes_without_effect = kWithoutEffect,
                             .spare_bytes_per_code = 1,
                             .settings = kSettings,
                             .read = Read,
                             .decode_parts = Decode};

}  // namespace awqd
