// Format "quanto", as optimum-quanto writes weights of 8 bits.
//
//   weight._data I8 or F8_E4M3 [N, K]
//   weight._scale F32, F16, BF16 [N, 1], or [] for all      W[k, n] = weight._data[n, k] * scale
//   bias [N], optional
//
// Format "quanto-packed": its qint4 and qint2. A weight [N, K] is R = N * K / group rows of codes,
// and a tensor of bytes [S, group] has 8 / bits of them in each of its own: row r of codes is in
// row r % S of the bytes, from bit r / S * bits on.
//
//   weight._data._data U8 [S, group]
//   weight._scale F32, F16, BF16 [R, 1]
//   weight._shift, as the scale, or of integers U8 or I8 [R, 1]
//       W[k, n] = code * scale - shift, of integers (code - shift) * scale
//   bias [N], optional
//
// Product and difference are FP32's; quanto rounds both to the type of the scale.
//
// Groups have 128, 96, 64 or 32 codes, and where K is at most 128, or no multiple of those, K. The
// tensors then tell N and K where there is a bias, or the group has another size. Else config.json
// does with hidden_size, for projections whose names say that they read or write hidden states; a
// request has in_features.
//
// The settings stand in quanto_qmap.json, by path, or in quantization_config for all linears:
//
//   {"model.layers.0.mlp.up_proj": {"weights": "qint4", "activations": "none"}}
//   {"quant_method": "quanto", "weights": "int8", "modules_to_not_convert": ["lm_head"]}
#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kCodes = "weight._data", kPackedCodes = "weight._data._data";
constexpr absl::string_view kScale = "weight._scale", kShift = "weight._shift";
constexpr absl::string_view kSuffixes[] = {kCodes, kScale, "bias"};
constexpr absl::string_view kPackedSuffixes[] = {kPackedCodes, kScale, kShift, "bias"};
constexpr absl::string_view kOptional[] = {"bias"};
constexpr absl::string_view kSettings[] = {"weights"};
constexpr absl::string_view kPackedSettings[] = {"in_features", "weights"};
constexpr int64_t kMostFeatures = std::numeric_limits<int32_t>::max();
constexpr int64_t kGroups[] = {32, 64, 96, 128};

// --- Settings ---

struct Type {
  absl::string_view name, short_name;  // of quanto_qmap.json, and of quantization_config
  int bits;
  bool integers;
};
constexpr Type kTypes[] = {{"qint8", "int8", 8, true},
                           {"qint4", "int4", 4, true},
                           {"qint2", "int2", 2, true},
                           {"qfloat8_e4m3fn", "float8", 8, false}};
constexpr absl::string_view kExpected = "qint8, qint4, qint2 or qfloat8_e4m3fn";

absl::StatusOr<const Type*> ReadType(const Setting& object, absl::string_view name = "weights") {
  AWQD_ASSIGN_OR_RETURN(const std::string word, ReadWord(object, name));
  if (word.empty()) return BadValue(name, "nothing", kExpected);
  const auto* const found = absl::c_find_if(kTypes, [&](const Type& known) {
    return word == known.name || word == known.short_name ||
           word == absl::StrCat("q", known.short_name);
  });
  if (found != std::end(kTypes)) return found;
  return UnreadSetting(name, Quoted(word), kExpected);
}

// Rules of linears whose weights have the same type.
class RuleTable {
 public:
  absl::Status Add(const absl::StatusOr<const Type*>& type, absl::string_view where,
                   ModulePattern module) {
    LinearRule& rule = rules_[type.ok() ? std::string((*type)->name) : type.status().ToString()];
    if (type.ok()) {
      rule.settings.members["weights"] = Setting::String(std::string((*type)->name));
      rule.format = (*type)->bits == 8 ? &kQuantoFormat : &kQuantoPackedFormat;
    } else if (rule.unread.ok()) {
      rule.unread = Beneath(where, type.status());
    }
    rule.targets.push_back(std::move(module));
    return CheckRules(rules_.size());
  }

  QuantConfig Finish() && {
    QuantConfig out;
    for (auto& [key, rule] : rules_) out.rules.push_back(std::move(rule));
    return out;
  }

 private:
  std::map<std::string, LinearRule> rules_;
};

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  RuleTable rules;
  bool activations = false;
  for (const auto& [path, entry] : MembersInOrder(config)) {
    if (entry->kind != Setting::Kind::kObject || FindSetting(*entry, "weights") == nullptr)
      continue;
    AWQD_ASSIGN_OR_RETURN(const std::string weights, ReadWord(*entry, "weights"));
    AWQD_ASSIGN_OR_RETURN(const std::string of_inputs, ReadWord(*entry, "activations"));
    activations |= !of_inputs.empty() && of_inputs != "none";
    if (weights == "none") continue;  // a norm, whose outputs alone are rounded
    AWQD_RETURN_IF_ERROR(rules.Add(ReadType(*entry), absl::CHexEscape(path.substr(0, 64)),
                                   {ModulePattern::Kind::kPath, std::string(path)}));
  }
  QuantConfig out = std::move(rules).Finish();
  if (out.rules.empty()) {
    const absl::string_view name =
        FindSetting(config, "weights_dtype") == nullptr ? "weights" : "weights_dtype";
    AWQD_ASSIGN_OR_RETURN(const Type* type, ReadType(config, name));
    AWQD_ASSIGN_OR_RETURN(out, OneRule(config, {}));
    LinearRule& rule = out.rules.front();
    rule.settings = OnlySettings(config, {"in_features"});
    rule.settings.members["weights"] = Setting::String(std::string(type->name));
    rule.format = type->bits == 8 ? &kQuantoFormat : &kQuantoPackedFormat;
  }
  if (activations) out.note = "activations has no effect: they are not rounded";
  return out;
}

// --- Tensors ---

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_RETURN_IF_ERROR(NeedTensor(tensors, kCodes, "I8 or F8_E4M3 [N, K]").status());
  AWQD_ASSIGN_OR_RETURN(const Type* type, ReadType(object));
  if (type->bits != 8) {
    return BadValue("weights", Quoted(type->name), absl::StrCat("8 bits for \"", kCodes, "\""));
  }
  const Fp8Scales scales = {.name = kScale, .codes = kCodes};
  return type->integers ? DecodeInt8(scales, tensors) : DecodeFp8(scales, tensors);
}

// K of `codes` codes in groups of `group`, from what tells it: each that does has to agree.
absl::StatusOr<int64_t> FindInFeatures(const Setting& object, const TensorView& weight,
                                       const LinearTensors& tensors, int64_t codes, int64_t group) {
  AWQD_ASSIGN_OR_RETURN(const auto said, ReadInteger(object, "in_features", 1, kMostFeatures));
  const TensorView* const bias = FindTensor(tensors, "bias");
  int64_t n = weight.out_features;
  if (bias != nullptr && bias->shape.size() == 1) n = bias->shape[0];
  int64_t k = said.value_or(weight.in_features);
  const auto bad = [&](const std::string& expected) {
    return BadTensor(kPackedCodes, absl::StrCat(codes, " codes in groups of ", group), expected);
  };
  if (k == 0 && n > 0 && codes % n == 0) k = codes / n;
  if (k == 0 && n > 0) return bad(absl::StrCat("a multiple of N = ", n));
  if (k == 0 && !absl::c_linear_search(kGroups, group)) k = group;
  if (k == 0) {
    return bad("a bias [N], in_features, or a config.json whose hidden_size tells K");
  }
  if (codes % k != 0 || k % group != 0 || (n > 0 && codes / k != n)) {
    return bad(absl::StrCat("whole rows of K = ", k, " in groups",
                            n > 0 ? absl::StrCat(", N = ", n) : ""));
  }
  return k;
}

absl::StatusOr<HostWeight> DecodePacked(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* weight,
                        NeedTensor(tensors, kPackedCodes, "U8 [N * K * bits / 8 / group, group]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale,
                        NeedTensor(tensors, kScale, "F32, F16 or BF16 [N * K / group, 1]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* shift,
                        NeedTensor(tensors, kShift, "as the scale, or U8 or I8"));
  AWQD_ASSIGN_OR_RETURN(const Type* type, ReadType(object));
  if (type->bits == 8) {
    return BadValue("weights", Quoted(type->name),
                    absl::StrCat("qint4 or qint2 for \"", kPackedCodes, "\""));
  }
  AWQD_RETURN_IF_ERROR(CheckTensor(kPackedCodes, *weight, {"U8"}, 2));
  AWQD_ASSIGN_OR_RETURN(const DType scale_type, CheckScales(kScale, *scale, 2, true));
  const int bits = type->bits;
  const int64_t rows = scale->shape[0], words = weight->shape[0], group = weight->shape[1];
  AWQD_RETURN_IF_ERROR(CheckShape(kScale, *scale, {rows, 1}, "[N * K / group, 1]"));
  AWQD_RETURN_IF_ERROR(CheckTensor(kShift, *shift, {"F32", "F16", "BF16", "U8", "I8"}, 2));
  AWQD_RETURN_IF_ERROR(CheckShape(kShift, *shift, {rows, 1}, "[N * K / group, 1]"));
  if (words != CeilDiv(rows * bits, 8)) {
    return BadTensor(kPackedCodes, absl::StrCat("shape ", ShapeText(weight->shape)),
                     absl::StrCat(CeilDiv(rows * bits, 8), " rows, as \"", kScale, "\" has ", rows,
                                  " of codes of ", bits, " bits"));
  }
  AWQD_ASSIGN_OR_RETURN(const int64_t k,
                        FindInFeatures(object, *weight, tensors, rows * group, group));
  HostWeight out;
  out.k = k;
  out.n = rows * group / k;
  const int64_t groups = k / group;
  out.scheme = Asymmetric(bits, BlockRows(group, k), scale_type);
  out.scales = Transposed(scale->bytes, out.n, groups, SizeOf(scale_type));
  if (shift->dtype == "U8" || shift->dtype == "I8") {
    const auto outside =
        absl::c_find_if(shift->bytes, [bits](uint8_t zero) { return zero >> bits != 0; });
    if (outside != shift->bytes.end()) {
      return BadTensor(kShift, absl::StrCat(static_cast<int>(*outside)),
                       absl::StrCat("0 to ", (1 << bits) - 1));
    }
    out.zeros = Transposed(shift->bytes, out.n, groups, 1);
  } else {
    AWQD_ASSIGN_OR_RETURN(out.scheme.zero_dtype, CheckScales(kShift, *shift, 2, true));
    out.scheme.zero_kind = ZeroKind::kRealAfter;
    out.zeros = Transposed(shift->bytes, out.n, groups, SizeOf(out.scheme.zero_dtype));
  }
  if (weight->unread()) return out;
  const auto read = [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
    for (const int64_t end = col + count; col < end;) {
      const int64_t stored = row * groups + col / group, first = col % group;
      const int64_t run = std::min(end - col, group - first);
      const uint8_t* const from = weight->bytes.data() + stored % words * group + first;
      const auto shift_by = static_cast<int>(stored / words * bits);
      for (int64_t i = 0; i < run; ++i) to[i] = from[i] >> shift_by & ((1 << bits) - 1);
      col += run;
      to += run;
    }
  };
  out.codes = PackTransposed(out.n, k, bits, read);
  return out;
}

}  // namespace

const Format kQuantoFormat = {.name = "quanto",
                              .quant_method = "quanto",
                              .suffixes = kSuffixes,
                              .optional_suffixes = kOptional,
                              .settings = kSettings,
                              .read = Read,
                              .decode_parts = Decode};

const Format kQuantoPackedFormat = {.name = "quanto-packed",
                                    .quant_method = "quanto",
                                    .suffixes = kPackedSuffixes,
                                    .optional_suffixes = kOptional,
                                    .needs_features = true,
                                    .settings = kPackedSettings,
                                    .read = Read,
                                    .decode_parts = DecodePacked};

}  // namespace awqd
