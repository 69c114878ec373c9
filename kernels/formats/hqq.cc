// Format "hqq": half-quadratic quantisation, with zeros and scales that are real numbers.
//
// The weight [N, K] is R = N * K / group_size rows of group_size codes (axis 1), and a tensor of
// words [S, group_size] has P rows of codes in each of its own: row r of codes is in row r % S of
// the words, r / S from the highest bits down. P = 8 / bits in bytes, 10 of 3 bits in 32, and 1 for
// 5, 6 and 8 bits. W = (code - zero) * scale
//
//   W_q U8 or I32 [S, group_size], or the same bytes as F16, BF16, F32 (view_as_float)
//   scale, zero F16, BF16, F32 [R, 1]
//   shape I64 or I32 [2], N and K
//   nbits, group_size, axis I32 []: those of this linear, where the settings are another's
//   bias [N], optional
//
// Its settings of a checkpoint; "quant_config" may have such an object for each tag of linears
// ("self_attn.q_proj"), or null, instead:
//
//   {"quant_method": "hqq", "skip_modules": ["lm_head"],
//    "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1, ...}}}
#include <cstring>
#include <limits>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"W_q",   "scale",      "zero", "shape",
                                           "nbits", "group_size", "axis", "bias"};
constexpr absl::string_view kOptional[] = {"nbits", "group_size", "axis", "bias"};
constexpr absl::string_view kWithoutEffect[] = {
    "packing",      "view_as_float", "unpack_view_dtype",   "compute_dtype",
    "channel_wise", "optimize",      "round_zero",          "quant_scale",
    "quant_zero",   "offload_meta",  "stores_quant_config", "encoded_state_dict"};
constexpr absl::string_view kSettings[] = {"nbits", "group_size", "axis"};
constexpr int64_t kMostFeatures = std::numeric_limits<int32_t>::max();

// --- Settings ---

struct Settings {
  int bits = 0;            // 0: not said
  int64_t group_size = 0;  // -1: all of K; 0: not said
  int64_t axis = 1;
};

absl::Status CheckBits(int64_t bits) {
  if (bits >= 1 && bits <= 8 && bits != 7) return absl::OkStatus();
  return UnreadSetting("nbits", absl::StrCat(bits), "1, 2, 3, 4, 5, 6 or 8");
}

absl::Status CheckAxis(int64_t axis) {
  if (axis == 1) return absl::OkStatus();
  return UnreadSetting("axis", absl::StrCat(axis),
                       "1: groups of axis 0 run across out features, not along K");
}

absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  Settings out;
  const Setting* const bits = FindSetting(object, "nbits");
  if (bits != nullptr && bits->text == "1.58") return UnreadSetting("nbits", "1.58", "1 to 8");
  AWQD_ASSIGN_OR_RETURN(const auto whole, ReadInteger(object, "nbits", 1, 32));
  AWQD_ASSIGN_OR_RETURN(out.group_size, ReadGroupSize(object));
  AWQD_ASSIGN_OR_RETURN(const auto axis, ReadInteger(object, "axis", 0, 1));
  if (whole) AWQD_RETURN_IF_ERROR(CheckBits(*whole));
  AWQD_RETURN_IF_ERROR(CheckAxis(axis.value_or(1)));
  out.bits = static_cast<int>(whole.value_or(0));
  return out;
}

absl::StatusOr<Setting> ReadParams(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const Setting* params, ReadObject(object, "weight_quant_params"));
  if (params == nullptr) return BadValue("weight_quant_params", "nothing", "an object");
  AWQD_RETURN_IF_ERROR(ReadSettings(*params).status());
  for (const absl::string_view name : {"scale_quant_params", "zero_quant_params"}) {
    if (FindSetting(object, name) == nullptr) continue;
    return UnreadSetting(name, "an object", "null: scales and zeros as they are");
  }
  return OnlySettings(*params, kSettings);
}

// The linears whose path ends with the tag's components.
ModulePattern Tagged(absl::string_view tag) {
  std::string regex = "(.*\\.)?";
  for (const char c : tag) {
    if (absl::string_view("\\^$.|?*+()[]{}").find(c) != absl::string_view::npos) regex += '\\';
    regex += c;
  }
  return {ModulePattern::Kind::kRegex, regex + "$"};
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(const Setting* params, ReadObject(config, "quant_config"));
  if (params == nullptr) return BadValue("quant_config", "nothing", "an object");
  AWQD_ASSIGN_OR_RETURN(QuantConfig out, OneRule(config, {}, {"skip_modules"}));
  if (params->members.contains("weight_quant_params")) {
    AWQD_ASSIGN_OR_RETURN(out.rules[0].settings, ReadParams(*params));
    return out;
  }
  out.rules.clear();
  for (const auto& [tag, object] : params->members) {
    if (object.kind == Setting::Kind::kNull) continue;
    absl::StatusOr<Setting> settings = ReadParams(object);
    LinearRule& rule = out.rules.emplace_back(LinearRule{.targets = {Tagged(tag)}});
    if (settings.ok()) {
      rule.settings = *std::move(settings);
    } else {
      rule.unread = Beneath(absl::StrCat("quant_config.", absl::CHexEscape(tag.substr(0, 64))),
                            settings.status());
    }
    AWQD_RETURN_IF_ERROR(CheckRules(out.rules.size()));
  }
  return out;
}

// --- Tensors ---

// The number of a tensor [], which has to be `said` where that is not 0; else `said`.
absl::StatusOr<int64_t> Agreed(const LinearTensors& tensors, absl::string_view name, int64_t said) {
  const TensorView* const tensor = FindTensor(tensors, name);
  if (tensor == nullptr) return said;
  AWQD_RETURN_IF_ERROR(CheckTensor(name, *tensor, {"I32", "I64"}, 0));
  const int64_t value = LoadInteger(*tensor, 0);
  if (said == 0 || said == value) return value;
  return BadTensor(name, absl::StrCat(value), absl::StrCat(said, ", as the settings say"));
}

absl::StatusOr<Settings> ReadAll(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(Settings out, ReadSettings(object));
  AWQD_ASSIGN_OR_RETURN(const int64_t bits, Agreed(tensors, "nbits", out.bits));
  if (bits == 0) return BadValue("nbits", "nothing", "1, 2, 3, 4, 5, 6 or 8");
  out.bits = static_cast<int>(bits);
  AWQD_ASSIGN_OR_RETURN(out.group_size, Agreed(tensors, "group_size", out.group_size));
  AWQD_ASSIGN_OR_RETURN(const int64_t axis, Agreed(tensors, "axis", out.axis));
  AWQD_RETURN_IF_ERROR(CheckBits(bits));
  AWQD_RETURN_IF_ERROR(CheckAxis(axis));
  return out;
}

absl::Status ReadShape(const LinearTensors& tensors, HostWeight* out) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* shape, NeedTensor(tensors, "shape", "I64 [2]: N and K"));
  AWQD_RETURN_IF_ERROR(CheckTensor("shape", *shape, {"I64", "I32"}, 1));
  AWQD_RETURN_IF_ERROR(CheckShape("shape", *shape, {2}, "N and K"));
  out->n = LoadInteger(*shape, 0);
  out->k = LoadInteger(*shape, 1);
  for (const int64_t features : {out->n, out->k}) {
    if (features >= 1 && features <= kMostFeatures) continue;
    return BadTensor("shape", absl::StrCat("[", out->n, ", ", out->k, "]"),
                     "numbers from 1 to 2^31 - 1");
  }
  return absl::OkStatus();
}

// Where the codes of a weight lie.
struct Packing {
  int bits;
  int64_t group;       // codes of a row
  int64_t rows;        // of codes
  int64_t word_bytes;  // 4 for 3 bits
  int64_t per_word;
  int64_t word_rows;

  Packing(int bits, int64_t group, int64_t rows)
      : bits(bits),
        group(group),
        rows(rows),
        word_bytes(bits == 3 ? 4 : 1),
        per_word(bits == 3  ? 10
                 : bits > 4 ? 1
                            : 8 / bits),
        word_rows(CeilDiv(rows, per_word)) {}

  // Codes from `first`, of a row of codes, on. Words are read where no alignment is sure.
  template <typename Word>
  void Read(const uint8_t* words, int64_t row, int64_t first, int64_t count, uint8_t* to) const {
    const int shift = static_cast<int>(per_word - 1 - row / word_rows) * bits;
    const uint32_t mask = (1u << bits) - 1;
    const uint8_t* from = words + (row % word_rows * group + first) * sizeof(Word);
    for (int64_t i = 0; i < count; ++i) {
      Word word;
      std::memcpy(&word, from + i * sizeof(Word), sizeof(word));
      to[i] = static_cast<uint8_t>(word >> shift & mask);
    }
  }
};

absl::Status CheckWords(const Packing& packing, const TensorView& words) {
  AWQD_RETURN_IF_ERROR(CheckTensor("W_q", words, {"U8", "I32", "F16", "BF16", "F32"}, 2));
  if (packing.word_bytes == 1 && packing.rows % packing.per_word != 0) {
    return BadTensor("scale", absl::StrCat(packing.rows, " rows"),
                     absl::StrCat("a multiple of ", packing.per_word, " for ", packing.bits,
                                  " bits: a byte holds as many"));
  }
  const int64_t bytes = words.dtype == "U8"                             ? 1
                        : words.dtype == "F16" || words.dtype == "BF16" ? 2
                                                                        : 4;
  const bool viewed = words.dtype != "U8" && words.dtype != "I32";
  if (!viewed && bytes != packing.word_bytes) {
    return BadTensor(
        "W_q", absl::StrCat("dtype ", words.dtype),
        absl::StrCat(packing.word_bytes == 4 ? "I32" : "U8", " for ", packing.bits, " bits"));
  }
  if (packing.group * packing.word_bytes % bytes != 0) {
    return BadTensor("W_q", absl::StrCat("dtype ", words.dtype),
                     absl::StrCat("one that rows of ", packing.group, " words fill"));
  }
  return CheckShape("W_q", words, {packing.word_rows, packing.group * packing.word_bytes / bytes},
                    absl::StrCat("words of ", packing.rows, " rows of ", packing.group,
                                 " codes of ", packing.bits, " bits"));
}

absl::Status DecodeCodes(const Packing& packing, const TensorView& words, HostWeight* out) {
  AWQD_RETURN_IF_ERROR(CheckWords(packing, words));
  if (words.unread()) return absl::OkStatus();
  const int64_t groups = out->k / packing.group;
  const int64_t most = (1 << packing.bits) - 1;
  const auto read = [&](int64_t n, int64_t k, int64_t count, uint8_t* to) {
    while (count > 0) {  // a group at a time
      const int64_t first = k % packing.group;
      const int64_t part = std::min(count, packing.group - first);
      const int64_t row = n * groups + k / packing.group;
      if (packing.word_bytes == 4) {
        packing.Read<uint32_t>(words.bytes.data(), row, first, part, to);
      } else {
        packing.Read<uint8_t>(words.bytes.data(), row, first, part, to);
      }
      k += part, count -= part, to += part;
    }
  };
  if (packing.per_word == 1 && packing.bits < 8) {
    for (const uint8_t code : words.bytes) {
      if (code <= most) continue;
      return BadTensor("W_q", absl::StrCat("code ", code), absl::StrCat("0 to ", most));
    }
  }
  out->codes = PackTransposed(out->n, out->k, packing.bits, read);
  return absl::OkStatus();
}

absl::StatusOr<DType> TakeCells(const LinearTensors& tensors, absl::string_view name, int64_t rows,
                                int64_t n, std::vector<uint8_t>* to) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* cells,
                        NeedTensor(tensors, name, "F16, BF16 or F32 [N * K / group_size, 1]"));
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales(name, *cells, 2, true));
  AWQD_RETURN_IF_ERROR(CheckShape(name, *cells, {rows, 1}, "[N * K / group_size, 1]"));
  *to = Transposed(cells->bytes, n, rows / n, SizeOf(type));
  return type;
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* words, NeedTensor(tensors, "W_q", "U8 or I32 words"));
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadAll(object, tensors));
  HostWeight out;
  AWQD_RETURN_IF_ERROR(ReadShape(tensors, &out));
  const bool all = settings.group_size == 0 || settings.group_size == -1;
  const int64_t group = all ? out.k : settings.group_size;
  if (group < 1 || out.k % group != 0) {
    return BadValue("group_size", group, absl::StrCat("-1 or a divisor of K = ", out.k));
  }
  const int64_t rows = out.n * (out.k / group);  // both are below 2^31
  out.scheme = {.bits = settings.bits,
                .block_rows = BlockRows(group, out.k),
                .zero_kind = ZeroKind::kRealBefore};
  AWQD_ASSIGN_OR_RETURN(out.scheme.scale_dtype,
                        TakeCells(tensors, "scale", rows, out.n, &out.scales));
  AWQD_ASSIGN_OR_RETURN(out.scheme.zero_dtype, TakeCells(tensors, "zero", rows, out.n, &out.zeros));
  AWQD_RETURN_IF_ERROR(DecodeCodes(Packing(settings.bits, group, rows), *words, &out));
  return out;
}

}  // namespace

const Format kHqqFormat = {.name = "hqq",
                           .quant_method = "hqq",
                           .suffixes = kSuffixes,
                           .optional_suffixes = kOptional,
                           .suffixes_without_effect = kWithoutEffect,
                           .settings = kSettings,
                           .read = Read,
                           .decode_parts = Decode};

}  // namespace awqd
