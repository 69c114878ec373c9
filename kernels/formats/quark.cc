// Format "quark", as AMD Quark exports its data types.
//
//   fp4: weight U8 [N, K / 2], E2M1, even k in the low half of a byte
//   fp6_e2m3, fp6_e3m2: weight U8 [N, K * 3 / 4], codes of 6 bits from the low bits of a byte on
//       weight_scale of both [N, K / group_size]: U8 or F8_E8M0 = exponent + 127; of scale_format
//       e5m3 U8, 5 bits of exponent (bias 15) and 3 of mantissa; else F32, BF16, F16
//       of quantised scales (scale_dtype) F8_E4M3, or U8 as e5m3; weight_scale_2 F32 [] multiplies
//   fp8_e4m3: weight F8_E4M3 [N, K]; weight_scale F32, BF16, F16: [] or [1] for all, [N] or [N, 1],
//       or of blocks [N / block_n, K / block_k]
//   int8, uint8, int4, uint4: in two's complement those with a sign
//       per_group: weight I8 or U8 [K, N], or I32 [K, N / 8]; weight_scale F32, BF16, F16
//       [K / group_size, N]; weight_zero_point as the codes [K / group_size, N or N / 8]
//       per_channel, per_tensor: weight [N, K] or [N, K / 8]; weight_scale as fp8_e4m3;
//       weight_zero_point as the codes [N] or [N / 8], or []
//       A word has eight codes, in AutoAWQ's order, or with pack_method order from the low bits on.
//       W[k, n] = (code - zero_point) * weight_scale; codes with a sign may have no zero points
//       with stage_dtype weight_scale F32 [] is one for all, and those of the codes end with _2
//   input_rotation [size, size], optional: the Hadamard matrix that blocks of activations are
//       multiplied by, I8 of 1 and -1
//   input_prescale F16, BF16 or F32 [K], optional: multiplies activations before that
//   bias [N], optional
//
// E4M3 holds every number of 6 bits, so their codes become that. Scales of e5m3 become BF16. In a
// request E4M3 is U8. Its settings of a checkpoint:
//
//   {"quant_method": "quark", "exclude": ["lm_head"], "export": {"pack_method": "reorder"},
//    "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
//    "layer_quant_config": {"*self_attn*": {"weight": {"dtype": "fp8_e4m3", ...}}}}
//
// A list of two is codes and the quantisation of their scales (scale_dtype), or FP8 that integers
// stand for (stage_dtype).
//
// "algo_config" lists the algorithms that made the weights. The tensors show what they did. A
// rotation may also be one of activations (r4, online_r1_rotation): linears whose activations are
// rotated need "input_rotation", and "input_prescale" where online_config says so.
#include <array>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "kernels/base/float8.h"
#include "kernels/base/half.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/hadamard.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kScale = "weight_scale", kScale2 = "weight_scale_2";
constexpr absl::string_view kZero = "weight_zero_point", kZero2 = "weight_zero_point_2";
constexpr absl::string_view kSuffixes[] = {"weight", kScale, kScale2,          kZero,
                                           kZero2,   "bias", "input_rotation", "input_prescale"};
constexpr auto kOptional = absl::MakeSpan(kSuffixes).subspan(2);
constexpr absl::string_view kWithoutEffect[] = {"input_scale_2"};
constexpr absl::string_view kCodeTypes[] = {"U8", "F8_E4M3", "I8", "I32"};
constexpr absl::string_view kSettings[] = {
    "block_k",     "block_n", "dtype",       "group_size",   "input_prescale", "input_rotation",
    "pack_method", "qscheme", "scale_dtype", "scale_format", "stage_dtype",    "symmetric"};
constexpr int64_t kMxGroup = 32, kMostBlock = int64_t{1} << 31;
constexpr int64_t kCodesOfWord = 8;

enum class Codes { kE2m1, kE2m3, kE3m2, kE4m3, kSigned, kUnsigned };
struct DataType {
  absl::string_view name;
  Codes codes;
  int bits;
  bool grouped;  // whether scales are those of groups where nothing says so

  bool integers() const { return codes == Codes::kSigned || codes == Codes::kUnsigned; }
};
constexpr DataType kDataTypes[] = {
    {"fp4", Codes::kE2m1, 4, true},      {"fp6_e2m3", Codes::kE2m3, 6, true},
    {"fp6_e3m2", Codes::kE3m2, 6, true}, {"fp8_e4m3", Codes::kE4m3, 8, false},
    {"int8", Codes::kSigned, 8, false},  {"uint8", Codes::kUnsigned, 8, false},
    {"int4", Codes::kSigned, 4, true},   {"uint4", Codes::kUnsigned, 4, true}};
// The types of scales of E2M1 and of 6 bits, by scale_format or by scale_dtype.
enum class ScaleType { kByTensor, kE8m0, kE5m3, kE4m3, kFloat };

// --- Settings ---

struct Settings {
  const DataType* type = nullptr;
  ScaleType scales = ScaleType::kByTensor;
  int64_t group_size = 0;  // -1: all of K; 0: not said
  int64_t block_n = 0, block_k = 0;
  bool grouped = false;
  bool in_order = false;  // codes of words, from the low bits on
  bool outer = false;     // weight_scale_2 multiplies weight_scale
  bool staged = false;    // weight_scale multiplies weight_scale_2
};

absl::StatusOr<const DataType*> ReadDataType(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string name, ReadWord(object, "dtype"));
  const auto* const found =
      absl::c_find_if(kDataTypes, [&](const DataType& known) { return known.name == name; });
  if (found != std::end(kDataTypes)) return found;
  const std::string expected = absl::StrJoin(
      kDataTypes, ", ",
      [](std::string* out, const DataType& known) { absl::StrAppend(out, known.name); });
  if (name.empty()) return BadValue("dtype", "nothing", absl::StrCat("one of ", expected));
  return UnreadSetting("dtype", Quoted(name), expected);
}

absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  Settings out;
  AWQD_ASSIGN_OR_RETURN(out.type, ReadDataType(object));
  AWQD_ASSIGN_OR_RETURN(out.group_size, ReadGroupSize(object));
  AWQD_ASSIGN_OR_RETURN(const std::string qscheme, ReadWord(object, "qscheme"));
  if (out.type->integers()) {
    AWQD_RETURN_IF_ERROR(CheckWord(object, "qscheme", {"per_group", "per_tensor", "per_channel"}));
    AWQD_RETURN_IF_ERROR(CheckWord(object, "stage_dtype", {"fp8_e4m3"}));
    AWQD_ASSIGN_OR_RETURN(
        const auto in_order,
        ReadChoice<bool>(object, "pack_method", {{"reorder", false}, {"order", true}}));
    out.in_order = in_order.value_or(false);
    AWQD_ASSIGN_OR_RETURN(const std::string stage, ReadWord(object, "stage_dtype"));
    out.staged = !stage.empty();
  } else if (out.type->grouped) {
    AWQD_RETURN_IF_ERROR(CheckWord(object, "qscheme", {"per_group"}));
    AWQD_ASSIGN_OR_RETURN(const auto format,
                          ReadChoice<ScaleType>(object, "scale_format",
                                                {{"e8m0", ScaleType::kE8m0},
                                                 {"e5m3", ScaleType::kE5m3},
                                                 {"float32", ScaleType::kFloat}}));
    AWQD_ASSIGN_OR_RETURN(
        const auto quantised,
        ReadChoice<ScaleType>(object, "scale_dtype",
                              {{"fp8_e4m3", ScaleType::kE4m3}, {"fp8_e5m3", ScaleType::kE5m3}}));
    out.outer = quantised.has_value();
    out.scales = quantised.value_or(format.value_or(ScaleType::kByTensor));
  } else {
    AWQD_RETURN_IF_ERROR(CheckWord(object, "qscheme", {"per_tensor", "per_channel", "per_block"}));
    AWQD_ASSIGN_OR_RETURN(const auto block_n, ReadInteger(object, "block_n", 1, kMostBlock));
    AWQD_ASSIGN_OR_RETURN(const auto block_k, ReadInteger(object, "block_k", 1, kMostBlock));
    const bool blocks = qscheme == "per_block";
    if (block_n.has_value() != blocks || block_k.has_value() != blocks) {
      return BadValue("block_n, block_k", blocks ? "nothing" : "sizes of blocks",
                      blocks ? "sizes, as qscheme is per_block" : "none but with per_block");
    }
    out.block_n = block_n.value_or(0);
    out.block_k = block_k.value_or(0);
  }
  out.grouped = qscheme.empty() ? out.type->grouped : qscheme == "per_group";
  return out;
}

// Scales are those of out features, or of groups along in features.
absl::Status CheckAxis(const Setting& weight) {
  AWQD_ASSIGN_OR_RETURN(const std::string qscheme, ReadWord(weight, "qscheme"));
  AWQD_ASSIGN_OR_RETURN(const auto axis, ReadInteger(weight, "ch_axis", -2, 1));
  const bool out_features = axis == 0 || axis == -2;
  if (!axis || (qscheme != "per_channel" && qscheme != "per_group") ||
      out_features == (qscheme == "per_channel")) {
    return absl::OkStatus();
  }
  return UnreadSetting("ch_axis", absl::StrCat(*axis), out_features ? "-1" : "0");
}

// The settings of one quantisation.
absl::StatusOr<Setting> ReadStage(const Setting& stage) {
  if (stage.kind != Setting::Kind::kObject) return BadSetting("weight", stage, "an object");
  AWQD_RETURN_IF_ERROR(CheckAxis(stage));
  Setting out = OnlySettings(stage, kSettings);
  const Setting* const size = FindSetting(stage, "block_size");
  if (size == nullptr) return out;
  if (size->kind != Setting::Kind::kList || size->list.size() != 2) {
    return BadSetting("block_size", *size, "null or a list of two numbers");
  }
  out.members["block_n"] = size->list[0];
  out.members["block_k"] = size->list[1];
  return out;
}

// The settings of the weights of some linears: those of "weight", and how their codes are packed.
absl::StatusOr<Setting> ReadWeights(const Setting& layer, const std::string& pack_method) {
  const Setting& weight = *FindSetting(layer, "weight");
  const bool two = weight.kind == Setting::Kind::kList && weight.list.size() == 2;
  Setting out;
  if (two) {
    AWQD_ASSIGN_OR_RETURN(const auto of_scales, ReadBool(weight.list[1], "is_scale_quant"));
    const bool scales = of_scales.value_or(false);
    AWQD_ASSIGN_OR_RETURN(out, ReadStage(weight.list[scales ? 0 : 1]));
    const Setting& other = weight.list[scales ? 1 : 0];
    AWQD_RETURN_IF_ERROR(CheckWord(other, "qscheme", {"per_tensor"}));
    AWQD_ASSIGN_OR_RETURN(const DataType* type, ReadDataType(out));
    if (scales ? type->integers() || !type->grouped : !type->integers()) {
      return UnreadSetting("weight", absl::StrCat("a list with ", type->name),
                           "codes and their scales, or FP8 and its integers");
    }
    AWQD_ASSIGN_OR_RETURN(const std::string dtype, ReadWord(other, "dtype"));
    out.members[scales ? "scale_dtype" : "stage_dtype"] = Setting::String(dtype);
    out.members.erase("scale_format");
  } else if (weight.kind == Setting::Kind::kList) {
    return UnreadSetting("weight", absl::StrCat("a list of ", weight.list.size()),
                         "one quantisation, or two");
  } else {
    AWQD_ASSIGN_OR_RETURN(out, ReadStage(weight));
  }
  if (!pack_method.empty()) out.members["pack_method"] = Setting::String(pack_method);
  AWQD_RETURN_IF_ERROR(ReadSettings(out).status());
  return out;
}

// "re:" begins a regular expression.
ModulePattern Pattern(absl::string_view text) {
  constexpr absl::string_view kRegex = "re:";
  if (!absl::StartsWith(text, kRegex)) return WildcardPattern(text);
  return {ModulePattern::Kind::kRegex, std::string(text.substr(kRegex.size()))};
}

class ConfigReader {
 public:
  explicit ConfigReader(std::string pack_method) : pack_method_(std::move(pack_method)) {}

  // Additions for the linears whose activations an algorithm rotates.
  absl::Status AddAlgorithms(const Setting& config) {
    for (const absl::string_view key : {"algo_config", "pre_quant_opt_config"}) {
      const Setting* const found = FindSetting(config, key);
      if (found == nullptr) continue;
      const bool one = found->kind == Setting::Kind::kObject;  // as old versions have it
      for (const Setting& algorithm : one ? std::vector<Setting>{*found} : found->list) {
        const absl::StatusOr<std::string> name = ReadWord(algorithm, "name");
        if (!name.ok()) return name.status();
        if (*name == "svdquant") {
          return UnreadSetting(absl::StrCat(key, ".name"), Quoted(*name),
                               "an algorithm without a product of low rank beside the weights");
        }
        if (*name == "rotation" || *name == "quarot") AWQD_RETURN_IF_ERROR(AddRotation(algorithm));
      }
    }
    return absl::OkStatus();
  }

  // The linears of single names first, then those of wildcards, as they follow one another.
  absl::Status AddLayers(const Setting& config) {
    AWQD_ASSIGN_OR_RETURN(const Setting* layers, ReadObject(config, "layer_quant_config"));
    if (layers == nullptr) return absl::OkStatus();
    for (const bool wildcards : {false, true}) {
      for (const auto& [name, layer] : MembersInOrder(*layers)) {
        ModulePattern pattern = Pattern(name);
        if ((pattern.kind == ModulePattern::Kind::kRegex) != wildcards) continue;
        AWQD_RETURN_IF_ERROR(
            Add(std::move(pattern), *layer,
                absl::StrCat("layer_quant_config.", absl::CHexEscape(name.substr(0, 64)))));
      }
      rule_of_.clear();
    }
    return absl::OkStatus();
  }

  // The settings of every linear that no name above matches.
  absl::Status AddOthers(const Setting& config) {
    AWQD_ASSIGN_OR_RETURN(const Setting* types, ReadObject(config, "layer_type_quant_config"));
    AWQD_ASSIGN_OR_RETURN(const Setting* global, ReadObject(config, "global_quant_config"));
    const Setting* const linear = types == nullptr ? nullptr : FindSetting(*types, "Linear");
    if (linear != nullptr) return Add({}, *linear, "layer_type_quant_config.Linear");
    return global == nullptr ? absl::OkStatus() : Add({}, *global, "global_quant_config");
  }

  QuantConfig Finish() && { return std::move(out_); }

 private:
  absl::Status AddRotation(const Setting& rotation) {
    AWQD_ASSIGN_OR_RETURN(const auto r4, ReadBool(rotation, "r4"));
    AWQD_ASSIGN_OR_RETURN(const auto online_r1, ReadBool(rotation, "online_r1_rotation"));
    Setting rotated;
    rotated.members["input_rotation"] = Setting::Literal(true);
    AWQD_ASSIGN_OR_RETURN(const Setting* online, ReadObject(rotation, "online_config"));
    if (online != nullptr) {
      AWQD_ASSIGN_OR_RETURN(const auto prescale, ReadBool(*online, "use_input_prescale"));
      if (prescale.value_or(false)) rotated.members["input_prescale"] = Setting::Literal(true);
    }
    if (r4.value_or(false)) {
      out_.additions.push_back({{.targets = {WildcardPattern("*down_proj")}, .settings = rotated}});
    }
    if (!online_r1.value_or(false)) return absl::OkStatus();
    LinearRule rule = {.settings = rotated};
    AWQD_ASSIGN_OR_RETURN(const Setting* layers, ReadObject(rotation, "scaling_layers"));
    const Setting none;
    for (const auto& [place, list] : (layers == nullptr ? none : *layers).members) {
      for (const Setting& modules : list.list) {
        const bool narrowed = FindSetting(modules, "target_modules") != nullptr;
        AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                              ReadStrings(modules, narrowed ? "target_modules" : "next_modules"));
        for (const std::string& name : names) {
          rule.targets.push_back(WildcardPattern(
              absl::StrReplaceAll(name, {{"pre_layer_id", "*"}, {"layer_id", "*"}})));
        }
      }
    }
    if (rule.targets.empty()) {
      return UnreadSetting("algo_config.scaling_layers", "nothing",
                           "the linears of online_r1_rotation");
    }
    out_.additions.push_back({std::move(rule)});
    return CheckRules(out_.additions.size());
  }

  // One rule for all patterns of the same settings; of wildcards only where they are neighbours,
  // as the first that matches counts.
  absl::Status Add(ModulePattern pattern, const Setting& layer, const std::string& where) {
    if (layer.kind != Setting::Kind::kObject) {
      return BadSetting(where, layer, "an object");
    }
    if (FindSetting(layer, "weight") == nullptr) {
      out_.left_out.push_back(std::move(pattern));
      return absl::OkStatus();
    }
    LinearRule rule;
    std::string key;
    absl::StatusOr<Setting> settings = ReadWeights(layer, pack_method_);
    if (settings.ok()) {
      for (const auto& [name, value] : settings->members) {
        absl::StrAppend(&key, name, " ", value.text, " ");
      }
      rule.settings = *std::move(settings);
    } else {
      key = settings.status().ToString();
      rule.unread = Beneath(absl::StrCat(where, ".weight"), settings.status());
    }
    if (pattern.kind == ModulePattern::Kind::kRegex && !rule_of_.contains(key)) rule_of_.clear();
    const auto [found, is_new] = rule_of_.emplace(std::move(key), out_.rules.size());
    if (is_new) out_.rules.push_back(std::move(rule));
    out_.rules[found->second].targets.push_back(std::move(pattern));
    return CheckRules(out_.rules.size());
  }

  std::string pack_method_;
  std::map<std::string, size_t> rule_of_;  // indices of rules that may take more patterns
  QuantConfig out_;
};

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(const Setting* exported, ReadObject(config, "export"));
  std::string pack_method;
  if (exported != nullptr) {
    AWQD_ASSIGN_OR_RETURN(pack_method, ReadWord(*exported, "pack_method"));
  }
  ConfigReader reader(std::move(pack_method));
  AWQD_RETURN_IF_ERROR(reader.AddAlgorithms(config));
  AWQD_RETURN_IF_ERROR(reader.AddLayers(config));
  AWQD_RETURN_IF_ERROR(reader.AddOthers(config));
  QuantConfig out = std::move(reader).Finish();
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> excluded, ReadStrings(config, "exclude"));
  for (const std::string& module : excluded) out.left_out.push_back(Pattern(module));
  if (out.rules.empty()) {
    return BadValue("global_quant_config", "no quantisation of weights, nor in layer_quant_config",
                    "one");
  }
  return out;
}

// --- Tensors ---

absl::Status CheckNoZeroPoint(const LinearTensors& tensors) {
  const TensorView* const zero = FindTensor(tensors, kZero);
  if (zero == nullptr || absl::c_all_of(zero->bytes, [](uint8_t byte) { return byte == 0; })) {
    return absl::OkStatus();
  }
  return BadTensor(kZero, "other values than 0", "0: codes that are no integers have none");
}

// `count` codes of a row from `col` on, one to a byte and without sign. Those of words are whole
// words.
void ReadIntegers(const Settings& settings, const uint8_t* row, int64_t col, int64_t count,
                  uint8_t* to) {
  constexpr int kAutoAwq[] = {0, 2, 4, 6, 1, 3, 5, 7};
  const bool with_sign = settings.type->codes == Codes::kSigned;
  const auto flip = static_cast<uint8_t>(with_sign ? 1 << (settings.type->bits - 1) : 0);
  if (settings.type->bits == 8) {
    for (int64_t i = 0; i < count; ++i) to[i] = row[col + i] ^ flip;
    return;
  }
  for (int64_t at = 0; at < count; at += kCodesOfWord) {
    const uint32_t word = LoadWord(row, (col + at) / kCodesOfWord);
    for (int i = 0; i < kCodesOfWord; ++i) {
      to[at + (settings.in_order ? i : kAutoAwq[i])] = (word >> 4 * i & 15) ^ flip;
    }
  }
}

// Zero points [groups, column blocks]. Where all are those of codes with a sign and none, the
// scheme has a constant.
absl::Status DecodeZeros(const Settings& settings, absl::string_view name, HostWeight* out,
                         const LinearTensors& tensors, absl::string_view dtype) {
  const int half = 1 << (settings.type->bits - 1);
  const TensorView* const tensor = FindTensor(tensors, name);
  if (tensor == nullptr && settings.type->codes == Codes::kUnsigned) {
    return BadTensor(name, "nothing", "the zero points of codes without sign");
  }
  if (tensor != nullptr) {
    const int64_t cols = out->shape().column_blocks(), rows = out->groups();
    const int64_t per_row = settings.type->bits == 4 ? CeilDiv(cols, kCodesOfWord) : cols;
    AWQD_RETURN_IF_ERROR(CheckTensor(name, *tensor, {dtype}, tensor->shape.size()));
    const auto row_bytes = static_cast<int64_t>(tensor->bytes.size()) / rows;
    if (settings.grouped) {
      AWQD_RETURN_IF_ERROR(CheckShape(name, *tensor, {rows, per_row}, "a row for each group"));
    } else if (!tensor->shape.empty()) {
      AWQD_RETURN_IF_ERROR(CheckShape(name, *tensor, {per_row}, "as weight_scale"));
    } else if (cols > 1) {
      return BadTensor(name, "shape []", absl::StrCat("[", per_row, "], as weight_scale"));
    }
    std::vector<uint8_t> row(RoundUp(cols, kCodesOfWord));
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t count = settings.type->bits == 4 ? RoundUp(cols, kCodesOfWord) : cols;
      ReadIntegers(settings, tensor->bytes.data() + i * row_bytes, 0, count, row.data());
      out->zeros.insert(out->zeros.end(), row.begin(), row.begin() + cols);
    }
    if (!absl::c_all_of(out->zeros, [half](uint8_t zero) { return zero == half; })) {
      return absl::OkStatus();
    }
  }
  out->zeros.clear();
  out->scheme.zero_kind = ZeroKind::kConstant;
  out->scheme.zero = half;
  return absl::OkStatus();
}

absl::StatusOr<HostWeight> DecodeIntegers(const Settings& settings, const LinearTensors& tensors) {
  const int bits = settings.type->bits;
  const int64_t in_word = bits == 4 ? kCodesOfWord : 1;
  const absl::string_view name = settings.staged ? kScale2 : kScale;
  const absl::string_view dtype = bits == 4                                ? "I32"
                                  : settings.type->codes == Codes::kSigned ? "I8"
                                                                           : "U8";
  AWQD_ASSIGN_OR_RETURN(const TensorView* weight,
                        NeedTensor(tensors, "weight",
                                   absl::StrCat(dtype, settings.grouped ? " [K, N" : " [N, K",
                                                in_word > 1 ? "/8]" : "]")));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale,
                        NeedTensor(tensors, name, "F32, BF16 or F16 scales"));
  AWQD_RETURN_IF_ERROR(CheckTensor("weight", *weight, {dtype}, 2));
  const std::vector<int64_t>& shape = scale->shape;
  AWQD_ASSIGN_OR_RETURN(const DType type,
                        CheckScales(name, *scale, settings.grouped ? 2 : shape.size(), true));
  HostWeight out;
  out.scheme = Asymmetric(bits, 0, type);
  if (settings.grouped) {
    out.k = weight->shape[0];
    out.n = shape[1];
    AWQD_RETURN_IF_ERROR(CheckShape("weight", *weight, {out.k, CeilDiv(out.n, in_word)},
                                    absl::StrCat("N = ", out.n, " of \"", name, "\"")));
    AWQD_ASSIGN_OR_RETURN(const int64_t rows,
                          GroupRows(settings.group_size, out.k, shape[0], name, false));
    out.scheme.block_rows = BlockRows(rows, out.k);
  } else {
    out.n = weight->shape[0];
    out.k = weight->shape[1] * in_word;  // as many bytes as the shape says: it fits
    const bool one = shape.empty() || shape == std::vector<int64_t>{1};
    if (one) out.scheme.block_cols = 0;
    if (!one && shape != std::vector<int64_t>{out.n} && shape != std::vector<int64_t>{out.n, 1}) {
      return BadTensor(name, absl::StrCat("shape ", ShapeText(shape)),
                       absl::StrCat("[], [1], [", out.n, "] or [", out.n, ", 1] (N)"));
    }
  }
  out.scales.assign(scale->bytes.begin(), scale->bytes.end());
  AWQD_RETURN_IF_ERROR(
      DecodeZeros(settings, settings.staged ? kZero2 : kZero, &out, tensors, dtype));
  if (settings.staged) {
    AWQD_ASSIGN_OR_RETURN(const TensorView* outer, NeedTensor(tensors, kScale, "F32 []"));
    AWQD_ASSIGN_OR_RETURN(const float number, ReadNumber(kScale, *outer));
    out.scheme.outer = OuterKind::kOne;
    out.outer = {number};
  }
  if (weight->unread()) return out;
  const int64_t row_bytes = weight->shape[1] * (bits == 4 ? 4 : 1);
  if (!settings.grouped) {
    const auto read = [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
      ReadIntegers(settings, weight->bytes.data() + row * row_bytes, col, count, to);
    };
    out.codes = PackTransposed(out.n, out.k, bits, read);
    return out;
  }
  out.codes = AllocateCodes(out.k * out.row_bytes());
  std::vector<uint8_t> row(RoundUp(out.n, kCodesOfWord));
  for (int64_t k = 0; k < out.k; ++k) {
    const uint8_t* const from = weight->bytes.data() + k * row_bytes;
    uint8_t* const to = out.codes.data() + k * out.row_bytes();
    if (bits == 8) {
      ReadIntegers(settings, from, 0, out.n, to);
      continue;
    }
    ReadIntegers(settings, from, 0, static_cast<int64_t>(row.size()), row.data());
    if (out.n % 2 != 0) row[out.n] = 0;
    PackNibbles(row.data(), RoundUp(out.n, 2), to);
  }
  return out;
}

// The codes of E4M3 for those of 6 bits with so many bits of mantissa.
std::array<uint8_t, 64> WidenedCodes(int mantissa_bits) {
  const int bias = mantissa_bits == 3 ? 1 : 3, whole = 1 << mantissa_bits;
  std::array<uint8_t, 64> out;
  for (int code = 0; code < 64; ++code) {
    const int exponent = (code & 31) >> mantissa_bits, mantissa = code & (whole - 1);
    const int units = exponent == 0 ? mantissa : (whole + mantissa) << (exponent - 1);
    const float magnitude = static_cast<float>(units) / static_cast<float>(whole << (bias - 1));
    out[code] = FloatToE4m3(magnitude) | static_cast<uint8_t>((code & 32) << 2);
  }
  return out;
}

absl::StatusOr<HostWeight> DecodeSixBits(const Settings& settings, LinearTensors tensors) {
  constexpr int kBits = 6;
  AWQD_ASSIGN_OR_RETURN(const TensorView* found, NeedTensor(tensors, "weight", "U8 [N, K*3/4]"));
  const TensorView weight = *found;
  AWQD_RETURN_IF_ERROR(CheckTensor("weight", weight, {"U8"}, 2));
  const int64_t n = weight.shape[0], row_bytes = weight.shape[1], k = row_bytes / 3 * 4;
  if (row_bytes % 3 != 0) {
    return BadTensor("weight", absl::StrCat("shape ", ShapeText(weight.shape)),
                     "rows of whole codes, four in three bytes");
  }
  // All beside the codes is as with the codes that these become.
  tensors["weight"] = {
      "F8_E4M3", {n, k}, absl::Span<const uint8_t>(static_cast<const uint8_t*>(nullptr), n * k)};
  AWQD_ASSIGN_OR_RETURN(
      HostWeight out,
      DecodeFp8({kScale, 1, settings.group_size == 0 ? kMxGroup : settings.group_size, true},
                tensors));
  if (weight.unread()) return out;
  const std::array<uint8_t, 64> widened =
      WidenedCodes(settings.type->codes == Codes::kE2m3 ? 3 : 2);
  const auto read = [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
    UnpackStream(weight.bytes.data() + row * row_bytes + col / 4 * 3, count, kBits, to);
    for (int64_t i = 0; i < count; ++i) to[i] = widened[to[i]];
  };
  out.codes = PackTransposed(n, k, 8, read);
  return out;
}

absl::StatusOr<HostWeight> DecodeFp4(const Settings& settings, LinearTensors tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* found,
                        NeedTensor(tensors, kScale, "scales [N, K/group_size]"));
  TensorView& scale = tensors.find(kScale)->second;
  E2m1Tensors names = {.scale = DType::kE8m0, .group_size = settings.group_size};
  const bool floats = scale.dtype == "F32" || scale.dtype == "BF16" || scale.dtype == "F16";
  std::vector<uint16_t> wide;
  if (settings.scales == ScaleType::kE4m3) {
    names.scale = DType::kE4m3;
  } else if (settings.scales == ScaleType::kE5m3) {
    AWQD_RETURN_IF_ERROR(CheckTensor(kScale, *found, {"U8"}, 2));
    for (const uint8_t bits : scale.bytes) {
      if (bits == 0xff) return BadTensor(kScale, "NaN", "numbers");
      const int exponent = bits >> 3, mantissa = bits & 7;
      const float value = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-17f
                                        : static_cast<float>(8 + mantissa) * 0x1p-18f *
                                              static_cast<float>(uint64_t{1} << exponent);
      wide.push_back(FloatToBf16(value));
    }
    scale.dtype = "BF16";
    scale.bytes = absl::MakeSpan(reinterpret_cast<const uint8_t*>(wide.data()), wide.size() * 2);
    names.scale = DType::kFp32;
  } else if (settings.scales == ScaleType::kFloat ||
             (settings.scales != ScaleType::kE8m0 && floats)) {
    names.scale = DType::kFp32;
  } else if (names.group_size == 0) {
    names.group_size = kMxGroup;
  }
  AWQD_ASSIGN_OR_RETURN(HostWeight out, DecodeE2m1(names, tensors));
  if (!settings.outer) return out;
  AWQD_ASSIGN_OR_RETURN(const TensorView* outer, NeedTensor(tensors, kScale2, "F32 []"));
  AWQD_ASSIGN_OR_RETURN(const float number, ReadNumber(kScale2, *outer));
  out.scheme.outer = OuterKind::kOne;
  out.outer = {number};
  return out;
}

absl::StatusOr<HostWeight> DecodeStored(const Settings& settings, const LinearTensors& tensors) {
  for (const auto& [name, known] : {std::pair(kScale2, settings.outer || settings.staged),
                                    std::pair(kZero2, settings.staged)}) {
    if (known || FindTensor(tensors, name) == nullptr) continue;
    return BadTensor(name, "it", "none but with two quantisations");
  }
  if (settings.type->integers()) return DecodeIntegers(settings, tensors);
  AWQD_RETURN_IF_ERROR(CheckNoZeroPoint(tensors));
  switch (settings.type->codes) {
    case Codes::kE2m1:
      return DecodeFp4(settings, tensors);
    case Codes::kE2m3:
    case Codes::kE3m2:
      return DecodeSixBits(settings, tensors);
    default:
      return DecodeFp8({kScale, settings.block_n, settings.block_k}, tensors);
  }
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(object));
  AWQD_ASSIGN_OR_RETURN(HostWeight out, DecodeStored(settings, tensors));
  if (const TensorView* const scale = FindTensor(tensors, "input_prescale"); scale != nullptr) {
    AWQD_RETURN_IF_ERROR(CheckScales("input_prescale", *scale, 1, true).status());
    AWQD_RETURN_IF_ERROR(CheckShape("input_prescale", *scale, {out.k}, "K"));
    AWQD_ASSIGN_OR_RETURN(out.factor, ToFloats("input_prescale", *scale));
  }
  if (const TensorView* const matrix = FindTensor(tensors, "input_rotation"); matrix != nullptr) {
    AWQD_RETURN_IF_ERROR(DecodeHadamard("input_rotation", *matrix, &out));
  }
  return out;
}

absl::string_view Lacks(const Setting& settings, HasTensor has) {
  for (const absl::string_view suffix : {"input_rotation", "input_prescale"}) {
    const absl::StatusOr<std::optional<bool>> said = ReadBool(settings, suffix);
    if (said.ok() && said->value_or(false) && !has(suffix)) return suffix;
  }
  const absl::StatusOr<Settings> read = ReadSettings(settings);
  if (!read.ok()) return "";
  if ((read->outer || read->staged) && !has(kScale2)) return kScale2;
  const absl::StatusOr<std::optional<bool>> symmetric = ReadBool(settings, "symmetric");
  const bool asymmetric = symmetric.ok() && !symmetric->value_or(true);
  const absl::string_view zero = read->staged ? kZero2 : kZero;
  const bool needed = asymmetric || read->type->codes == Codes::kUnsigned;
  return read->type->integers() && needed && !has(zero) ? zero : "";
}

}  // namespace

const Format kQuarkFormat = {.name = "quark",
                             .quant_method = "quark",
                             .suffixes = kSuffixes,
                             .optional_suffixes = kOptional,
                             .lacks = Lacks,
                             .code_dtypes = kCodeTypes,
                             .suffixes_without_effect = kWithoutEffect,
                             .settings = kSettings,
                             .read = Read,
                             .decode_parts = Decode};

}  // namespace awqd
