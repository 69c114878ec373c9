// Format "mlx", as Apple's MLX and mlx-lm write it. Codes follow one another along K from the low
// bits of a word on; those of 3, 5 and 6 bits cross words.
//
//   weight U32 [N, K * bits / 32]
//   affine, 1 to 6 or 8 bits: scales, biases F16, BF16, F32 [N, K / group_size]
//       W[k, n] = weight[n, k] * scales[n, k / group_size] + biases[n, k / group_size]
//   mxfp4: E2M1; scales U8 [N, K / 32] = exponent + 127
//   nvfp4: E2M1; scales U8 [N, K / 16] = E4M3; global_scale F32 [] or [1], optional: 1 / 2688 of it
//       multiplies
//   mxfp8: E4M3; scales as mxfp4
//   bias [N], optional
//
// Product and sum are FP32's, as MLX has them for FP32 scales; for others it rounds both to the
// scales' type. It rounds scale times global_scale, and not code times scale: a last place apart.
//
// In a request U32 is I32. Its settings name no quant_method. Those of a path take nothing of the
// general ones: what they leave out is MLX's default. "false" leaves a path out.
//
//   "quantization": {"group_size": 64, "bits": 4, "mode": "affine", "lm_head": false,
//                    "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}}
#include <iterator>
#include <map>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"weight", "scales", "biases", "global_scale", "bias"};
constexpr absl::string_view kOptional[] = {"biases", "global_scale", "bias"};
constexpr absl::string_view kCodeTypes[] = {"U32"};
constexpr absl::string_view kSettings[] = {"mode", "bits", "group_size", "global_scale"};
constexpr float kMostOfNvfp4 = 6 * 448;  // the largest E2M1 times the largest E4M3

struct Mode {
  absl::string_view name;
  CodeKind code;
  DType scale;         // but for affine
  int bits;            // MLX's default for affine, the only ones for the others
  int64_t group_size;  // likewise
};
constexpr Mode kModes[] = {{"affine", CodeKind::kUnsigned, DType::kFp16, 4, 64},
                           {"mxfp4", CodeKind::kE2m1, DType::kE8m0, 4, 32},
                           {"nvfp4", CodeKind::kE2m1, DType::kE4m3, 4, 16},
                           {"mxfp8", CodeKind::kE4m3, DType::kE8m0, 8, 32}};

// --- Settings ---

struct Settings {
  const Mode* mode = nullptr;
  int64_t bits = 0;
  int64_t group_size = 0;  // -1: all of K
  bool global_scale = false;

  bool affine() const { return mode->code == CodeKind::kUnsigned; }
  bool nvfp4() const { return mode->scale == DType::kE4m3; }
};

absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string name, ReadWord(object, "mode"));
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, "bits", 1, 32));
  AWQD_ASSIGN_OR_RETURN(const int64_t group_size, ReadGroupSize(object));
  AWQD_ASSIGN_OR_RETURN(const auto global_scale, ReadBool(object, "global_scale"));
  const Mode* const mode = absl::c_find_if(
      kModes, [&](const Mode& known) { return known.name == (name.empty() ? "affine" : name); });
  if (mode == std::end(kModes)) {
    return UnreadSetting("mode", Quoted(name), "affine, mxfp4, nvfp4 or mxfp8");
  }
  const Settings out = {mode, bits.value_or(mode->bits),
                        group_size == 0 ? mode->group_size : group_size,
                        global_scale.value_or(false)};
  if (out.affine() && (out.bits > 8 || out.bits == 7)) {
    return UnreadSetting("bits", absl::StrCat(out.bits), "1 to 6 or 8");
  }
  if (!out.affine() && out.bits != mode->bits) {
    return UnreadSetting("bits", absl::StrCat(out.bits),
                         absl::StrCat(mode->bits, " with mode ", mode->name));
  }
  if (!out.affine() && out.group_size != mode->group_size) {
    return UnreadSetting("group_size", absl::StrCat(out.group_size),
                         absl::StrCat(mode->group_size, " with mode ", mode->name));
  }
  return out;
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  QuantConfig out;
  std::map<std::string, LinearRule> rules;  // one for all paths of the same settings
  const auto rule_of = [&rules](const Setting& object, absl::string_view place) -> LinearRule& {
    const absl::StatusOr<Settings> settings = ReadSettings(object);
    if (!settings.ok()) {
      LinearRule& rule = rules[settings.status().ToString()];
      if (rule.unread.ok()) {
        rule.unread = absl::Status(settings.status().code(),
                                   absl::StrCat(place, settings.status().message()));
      }
      return rule;
    }
    LinearRule& rule = rules[absl::StrCat(settings->mode->name, " ", settings->bits, " ",
                                          settings->group_size, " ", settings->global_scale)];
    rule.settings.members = {{"mode", Setting::String(std::string(settings->mode->name))},
                             {"bits", Setting::Literal(settings->bits)},
                             {"group_size", Setting::Literal(settings->group_size)},
                             {"global_scale", Setting::Literal(settings->global_scale)}};
    return rule;
  };
  for (const auto& [path, entry] : config.members) {
    const ModulePattern module = {ModulePattern::Kind::kPath, path};
    if (entry == Setting::Literal(false)) out.left_out.push_back(module);
    if (entry.kind != Setting::Kind::kObject) continue;
    rule_of(entry, absl::StrCat(absl::CHexEscape(path.substr(0, 64)), "."))
        .targets.push_back(module);
    AWQD_RETURN_IF_ERROR(CheckRules(rules.size()));
  }
  for (auto& [key, rule] : rules) out.rules.push_back(std::move(rule));
  rules.clear();
  out.rules.push_back(rule_of(OnlySettings(config, kSettings), ""));
  out.rules.back().targets = {{}};
  return out;
}

// --- Tensors ---

absl::string_view Lacks(const Setting& object, HasTensor has) {
  const absl::StatusOr<Settings> settings = ReadSettings(object);
  if (!settings.ok()) return "";
  if (settings->affine() && !has("biases")) return "biases";
  return settings->global_scale && !has("global_scale") ? "global_scale" : "";
}

absl::StatusOr<HostWeight> DecodeAffine(int bits, int64_t k, int64_t group,
                                        const TensorView& weight, const TensorView& scales,
                                        const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* biases,
                        NeedTensor(tensors, "biases", "F16, BF16 or F32 [N, K/group_size]"));
  HostWeight out;
  out.n = weight.shape[0];
  out.k = k;
  out.scheme = {.bits = bits, .block_rows = BlockRows(group, k), .zero_kind = ZeroKind::kRealAfter};
  AWQD_ASSIGN_OR_RETURN(out.scheme.scale_dtype, CheckScales("scales", scales, 2, true));
  AWQD_ASSIGN_OR_RETURN(out.scheme.zero_dtype, CheckScales("biases", *biases, 2, true));
  AWQD_RETURN_IF_ERROR(CheckShape("biases", *biases, {out.n, k / group}, "as \"scales\""));
  out.scales = Transposed(scales.bytes, out.n, k / group, out.scheme.scale_bytes());
  out.zeros = Transposed(biases->bytes, out.n, k / group, out.scheme.zero_bytes());
  // The zero is taken away: the bias with the other sign, in the last byte.
  const auto bytes = static_cast<size_t>(out.scheme.zero_bytes());
  for (size_t i = bytes - 1; i < out.zeros.size(); i += bytes) out.zeros[i] ^= 0x80;
  if (weight.unread()) return out;
  const int64_t row_bytes = weight.shape[1] * 4;
  out.codes =
      PackTransposed(out.n, k, bits, [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
        UnpackStream(weight.bytes.data() + row * row_bytes + col / 8 * bits, count, bits, to);
      });
  return out;
}

// The words are bytes of E4M3, or of two E2M1.
absl::StatusOr<HostWeight> DecodeFloats(const Mode& mode, LinearTensors tensors) {
  TensorView& weight = tensors.find("weight")->second;
  weight.dtype = "U8";
  weight.shape[1] *= 4;
  if (mode.code == CodeKind::kE4m3) {
    return DecodeFp8({"scales", 1, mode.group_size, true}, tensors);
  }
  AWQD_ASSIGN_OR_RETURN(HostWeight out, DecodeE2m1({.codes = "weight",
                                                    .scales = "scales",
                                                    .scale = mode.scale,
                                                    .group_size = mode.group_size},
                                                   tensors));
  const TensorView* const outer = FindTensor(tensors, "global_scale");
  if (outer == nullptr) return out;
  AWQD_ASSIGN_OR_RETURN(const float number, ReadNumber("global_scale", *outer));
  out.scheme.outer = OuterKind::kOne;
  out.outer = {number / kMostOfNvfp4};
  return out;
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  const absl::StatusOr<Settings> settings = ReadSettings(object);
  if (!settings.ok()) return absl::InvalidArgumentError(settings.status().message());
  const auto bits = static_cast<int>(settings->bits);
  AWQD_ASSIGN_OR_RETURN(const TensorView* weight,
                        NeedTensor(tensors, "weight", "U32 [N, K * bits / 32]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scales,
                        NeedTensor(tensors, "scales", "scales [N, K/group_size]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("weight", *weight, {"U32", "I32"}, 2));
  for (const auto& [name, known] :
       {std::pair("biases", settings->affine()), std::pair("global_scale", settings->nvfp4())}) {
    if (known || FindTensor(tensors, name) == nullptr) continue;
    return BadTensor(name, "it", absl::StrCat("none with mode ", settings->mode->name));
  }
  const int64_t words = weight->shape[1], k = words * 32 / bits;
  if (words * 32 % bits != 0) {
    return BadTensor("weight", absl::StrCat("rows of ", words, " words"),
                     absl::StrCat("whole codes of ", bits, " bits"));
  }
  const int64_t group = settings->group_size == -1 ? k : settings->group_size;
  if (k % group != 0) {
    return BadValue("group_size", group,
                    absl::StrCat("-1 or a divisor of K = ", k, ", as rows of ", words,
                                 " words have it with ", bits, " bits"));
  }
  AWQD_RETURN_IF_ERROR(CheckShape("scales", *scales, {weight->shape[0], k / group},
                                  absl::StrCat("[N, K/group_size]: rows of ", words,
                                               " words have K = ", k, " with ", bits, " bits")));
  return settings->affine() ? DecodeAffine(bits, k, group, *weight, *scales, tensors)
                            : DecodeFloats(*settings->mode, tensors);
}

}  // namespace

const Format kMlxFormat = {.name = "mlx",
                           .quant_method = "mlx",
                           .suffixes = kSuffixes,
                           .optional_suffixes = kOptional,
                           .lacks = Lacks,
                           .code_dtypes = kCodeTypes,
                           .settings = kSettings,
                           .read = Read,
                           .decode_parts = Decode};

}  // namespace awqd
