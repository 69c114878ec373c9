// Format "gptq": what AutoGPTQ and GPTQModel write (gptq.h says the tensors). Its settings
// `checkpoint_format` (else `format`) and `bits` tell how words and zero points are to be read:
//
//   gptq     2, 3, 4, 8 bits; qzeros holds z - 1, subtracted from whole words (3 bits: from fields)
//   gptq_v2  the same words; qzeros holds z
//   gptq_p   2 to 8 bits, of which 3, 5, 6 and 7 are bit planes; qzeros holds z
//
// `dynamic` is an object of regular expressions that the beginning of a path matches: "-:..." are
// linears that are not quantised, "+:..." and others have settings of their own, of which the first
// that matches counts.
// Facts: GPTQModel 7.7.0, quantization/config.py, utils/planar_packing.py, utils/model_dequant.py.
#include "kernels/formats/gptq/gptq.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/format.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

// --- What several quantisers share ---

constexpr int64_t kMostFeatures = std::numeric_limits<int32_t>::max();  // an order is of int32

// K, which qweight tells up to the codes that fit in its last word, and g_idx exactly.
absl::StatusOr<int64_t> InFeatures(const GptqLinear& settings, const TensorView& qweight,
                                   const TensorView* g_idx) {
  const int bits = settings.bits;
  const int64_t rows = qweight.shape[0], most = rows * 32 / bits;
  if (most > kMostFeatures) {
    return BadTensor("qweight", absl::StrCat("K = ", most),
                     absl::StrCat("at most ", kMostFeatures));
  }
  if (g_idx == nullptr) {
    if (rows * 32 % bits == 0) return most;
    return BadTensor("qweight", absl::StrCat(rows, " rows"),
                     absl::StrCat("a multiple of ", bits == 3 || bits == 6 ? 3 : bits,
                                  " rows of words with codes of ", bits, " bits"));
  }
  AWQD_RETURN_IF_ERROR(CheckTensor("g_idx", *g_idx, {"I32"}, 1));
  const int64_t k = g_idx->shape[0];
  if (k <= most && WordsOfCodes(k, bits) == rows) return k;
  return BadTensor("g_idx", absl::StrCat("shape [", k, "]"),
                   absl::StrCat("[", most, "] (K of ", rows, " rows of \"qweight\" with codes of ",
                                bits, " bits)"));
}

absl::Status CheckPlanes(const GptqLinear& settings, int64_t k, int64_t n) {
  if (settings.words != GptqWords::kPlanes || (k % 32 == 0 && n % 32 == 0)) {
    return absl::OkStatus();
  }
  return BadTensor("qweight", absl::StrCat("K = ", k, ", N = ", n),
                   "multiples of 32: a bit plane holds 32 codes");
}

// --- Zero points ---

int MiddleOf(const GptqLinear& settings) { return 1 << (settings.bits - 1); }

// 2^(bits-1) as the other version stores it, read as this one.
int OtherMiddleOf(const GptqLinear& settings) {
  return MiddleOf(settings) + (settings.zeros_less_one ? 1 : -1);
}

std::vector<uint8_t> UnpackZeros(const GptqLinear& settings, const TensorView& qzeros,
                                 int64_t groups, int64_t n) {
  return UnpackGptqColumns(qzeros.bytes, groups, n, settings.bits, settings.words,
                           settings.zeros_less_one ? 1 : 0);
}

bool AreAll(absl::Span<const uint8_t> zeros, int value) {
  return absl::c_all_of(zeros, [value](uint8_t zero) { return zero == value; });
}

absl::Status DecodeZeros(const GptqLinear& settings, const TensorView& qzeros, int64_t groups,
                         HostWeight* out) {
  const int bits = settings.bits, middle = MiddleOf(settings);
  AWQD_RETURN_IF_ERROR(CheckShape("qzeros", qzeros, {groups, WordsOfCodes(out->n, bits)},
                                  ExplainWords("qzeros", out->n, bits, qzeros.shape[1])));
  out->zeros = UnpackZeros(settings, qzeros, groups, out->n);
  if (!settings.sym.value_or(false)) return absl::OkStatus();
  const auto other = absl::c_find_if(out->zeros, [&](uint8_t zero) { return zero != middle; });
  if (other != out->zeros.end() && !AreAll(out->zeros, OtherMiddleOf(settings))) {
    const int64_t at = other - out->zeros.begin();
    return BadTensor(
        "qzeros", absl::StrCat("zero point ", *other, " at [", at / out->n, ", ", at % out->n, "]"),
        absl::StrCat(middle, ", stored as ", middle - (settings.zeros_less_one ? 1 : 0),
                     ", as sym is true"));
  }
  out->zeros.clear();
  out->scheme = Symmetric(bits, out->scheme.block_rows, *out->scheme.scale_dtype);
  return absl::OkStatus();
}

// --- Groups ---

std::vector<int32_t> Integers(const TensorView& tensor) {
  std::vector<int32_t> out(tensor.shape[0]);
  std::memcpy(out.data(), tensor.bytes.data(), out.size() * sizeof(int32_t));
  return out;
}

// Checks that each group has `rows` rows, and the last one those that are left.
absl::Status CheckCounts(absl::string_view name, const std::vector<int32_t>& group_of,
                         int64_t groups, int64_t rows) {
  std::vector<int64_t> counts(groups);
  for (int32_t group : group_of) ++counts[group];
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t left = static_cast<int64_t>(group_of.size()) - group * rows;
    const int64_t expected = std::min(rows, left);
    if (counts[group] == expected) continue;
    return BadTensor(
        name, absl::StrCat(counts[group], " in-features of group ", group),
        absl::StrCat(expected, ": groups are of ", rows, ", but for a short last one"));
  }
  return absl::OkStatus();
}

// --- Format "gptq" ---

constexpr absl::string_view kSettings[] = {"bits", "checkpoint_format", "desc_act", "group_size",
                                           "sym"};
// The settings that an entry of `dynamic` may change.
constexpr absl::string_view kOwn[] = {"bits", "desc_act", "group_size", "sym"};

// New writers have both names for the same.
absl::StatusOr<std::string> ReadCheckpointFormat(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string name, ReadWord(object, "checkpoint_format"));
  AWQD_ASSIGN_OR_RETURN(const std::string other, ReadWord(object, "format"));
  if (!name.empty() && !other.empty() && name != other) {
    return BadValue("format", Quoted(other, 64),
                    absl::StrCat("checkpoint_format's ", Quoted(name, 64)));
  }
  AWQD_ASSIGN_OR_RETURN(const auto marlin, ReadBool(object, "is_marlin_format"));
  if (marlin.value_or(false)) return std::string("marlin");
  if (name.empty() && other.empty()) return std::string("gptq");
  return name.empty() ? other : name;
}

absl::Status CheckBits(int64_t bits, bool planes) {
  if (bits >= 2 && bits <= 8 && (planes || bits <= 4 || bits == 8)) return absl::OkStatus();
  if (bits > 4 && bits < 8) {
    return UnreadSetting("bits", absl::StrCat(bits),
                         "2, 3, 4 or 8, or checkpoint_format \"gptq_p\"");
  }
  return UnreadSetting("bits", absl::StrCat(bits), planes ? "2 to 8" : "2, 3, 4 or 8");
}

// UNIMPLEMENTED for other formats and widths.
absl::StatusOr<GptqLinear> ReadSettings(const Setting& object) {
  GptqLinear out;
  AWQD_ASSIGN_OR_RETURN(const std::string format, ReadCheckpointFormat(object));
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, "bits", 1, 32));
  AWQD_ASSIGN_OR_RETURN(out.group_size, ReadGroupSize(object));
  AWQD_ASSIGN_OR_RETURN(out.sym, ReadBool(object, "sym"));
  AWQD_ASSIGN_OR_RETURN(out.desc_act, ReadBool(object, "desc_act"));
  if (format != "gptq" && format != "gptq_v2" && format != "gptq_p") {
    const absl::string_view why =
        format == "marlin" ? " (\"marlin\" stores codes in a kernel's order)" : "";
    return UnreadSetting("checkpoint_format", Quoted(format, 64),
                         absl::StrCat("\"gptq\", \"gptq_v2\" or \"gptq_p\"", why));
  }
  if (!bits) return BadValue("bits", "nothing", "2 to 8");
  const bool planes = format == "gptq_p";
  AWQD_RETURN_IF_ERROR(CheckBits(*bits, planes));
  out.bits = static_cast<int>(*bits);
  out.words = planes ? GptqWords::kPlanes : GptqWords::kDense;
  out.zeros_less_one = format == "gptq";
  return out;
}

// --- A checkpoint's settings ---

absl::Status ReadDynamic(const Setting& dynamic, const Setting& all, QuantConfig* out) {
  for (const auto& [pattern, entry] : MembersInOrder(dynamic)) {
    absl::string_view regex = pattern;
    const std::string where = absl::StrCat("dynamic.", Quoted(pattern, 64));
    if (entry->kind != Setting::Kind::kObject) return BadSetting(where, *entry, "an object");
    // These come first in whatever order the file has them: its writer's reader sorts them so.
    if (absl::ConsumePrefix(&regex, "-:")) {
      out->left_out.push_back({ModulePattern::Kind::kRegex, std::string(regex)});
      continue;
    }
    absl::ConsumePrefix(&regex, "+:");
    LinearRule rule = {.targets = {{ModulePattern::Kind::kRegex, std::string(regex)}},
                       .settings = OnlySettings(*entry, kOwn)};
    rule.settings.members.insert(all.members.begin(), all.members.end());
    const absl::Status status = ReadSettings(rule.settings).status();
    if (!status.ok()) rule.unread = Beneath(where, status);
    // There may be one entry for each linear, with the settings of the one before it.
    if (status.ok() && !out->rules.empty() && out->rules.back().unread.ok() &&
        out->rules.back().settings == rule.settings) {
      out->rules.back().targets.push_back(std::move(rule.targets[0]));
      continue;
    }
    out->rules.push_back(std::move(rule));
    AWQD_RETURN_IF_ERROR(CheckRules(out->rules.size()));
  }
  return absl::OkStatus();
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_RETURN_IF_ERROR(ReadSettings(config).status());
  AWQD_ASSIGN_OR_RETURN(const std::string format, ReadCheckpointFormat(config));
  AWQD_RETURN_IF_ERROR(CheckWord(config, "pack_dtype", {"int32"}));
  Setting all = OnlySettings(config, kSettings);
  all.members["checkpoint_format"] = Setting::String(format);
  return ReadGptqRules(config, all, "dynamic", [&](const Setting& dynamic, QuantConfig* out) {
    return ReadDynamic(dynamic, all, out);
  });
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const GptqLinear settings, ReadSettings(object));
  return DecodeGptqLinear(settings, tensors);
}

std::string Remark(const Setting& object, const LinearTensors& tensors) {
  const absl::StatusOr<GptqLinear> settings = ReadSettings(object);
  return !settings.ok() ? "" : RemarkOnZeros(*settings, tensors);
}

}  // namespace

absl::StatusOr<QuantConfig> ReadGptqRules(
    const Setting& config, const Setting& all, absl::string_view name,
    absl::FunctionRef<absl::Status(const Setting& object, QuantConfig* out)> add) {
  if (FindSetting(all, "group_size") == nullptr) {
    return BadValue("group_size", "nothing", "-1 (all of K) or at least 1");
  }
  AWQD_ASSIGN_OR_RETURN(QuantConfig out, OneRule(config, all));
  AWQD_ASSIGN_OR_RETURN(const Setting* object, ReadObject(config, name));
  if (object == nullptr) return out;
  const LinearRule last = std::move(out.rules[0]);
  out.rules.clear();
  AWQD_RETURN_IF_ERROR(add(*object, &out));
  out.rules.push_back(last);
  return out;
}

std::string RemarkOnZeros(const GptqLinear& settings, const LinearTensors& tensors) {
  const TensorView* const qzeros = FindTensor(tensors, "qzeros");
  const TensorView* const scales = FindTensor(tensors, "scales");
  if (!settings.sym.value_or(false) || qzeros == nullptr || scales == nullptr || qzeros->unread() ||
      !AreAll(UnpackZeros(settings, *qzeros, scales->shape[0], scales->shape[1]),
              OtherMiddleOf(settings))) {
    return "";
  }
  const int middle = MiddleOf(settings);
  return absl::StrCat("every zero point is stored as ",
                      settings.zeros_less_one ? middle : middle - 1, ", as checkpoint_format \"",
                      settings.zeros_less_one ? "gptq_v2" : "gptq", "\" does, and read as ", middle,
                      ", as sym is true");
}

absl::StatusOr<HostWeight> DecodeGptqLinear(const GptqLinear& settings,
                                            const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* qweight,
                        NeedTensor(tensors, "qweight", "I32 [K*bits/32, N]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* qzeros,
                        NeedTensor(tensors, "qzeros", "I32 [groups, N*bits/32]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scales,
                        NeedTensor(tensors, "scales", "F16 or BF16 [groups, N]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("qweight", *qweight, {"I32"}, 2));
  AWQD_RETURN_IF_ERROR(CheckTensor("qzeros", *qzeros, {"I32"}, 2));
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales("scales", *scales, 2, false));
  const TensorView* const g_idx = FindTensor(tensors, "g_idx");
  HostWeight out;
  const int64_t groups = scales->shape[0];
  out.n = scales->shape[1];
  AWQD_RETURN_IF_ERROR(CheckShape("qweight", *qweight, {qweight->shape[0], out.n},
                                  absl::StrCat("N = ", out.n, " of tensor \"scales\"")));
  AWQD_ASSIGN_OR_RETURN(out.k, InFeatures(settings, *qweight, g_idx));
  AWQD_RETURN_IF_ERROR(CheckPlanes(settings, out.k, out.n));
  // A group may be larger than a small layer.
  const int64_t said = settings.group_size > out.k ? -1 : settings.group_size;
  AWQD_ASSIGN_OR_RETURN(const int64_t rows, GroupRows(said, out.k, groups, "scales", true));
  out.scheme = Asymmetric(settings.bits, BlockRows(rows, out.k), type);
  const GroupIndex index = {"g_idx", "scales", settings.desc_act, "desc_act is true",
                            "desc_act is false"};
  AWQD_ASSIGN_OR_RETURN(const std::vector<int32_t> place,
                        PlacesByGroup(index, g_idx, out.k, groups, rows));
  AWQD_RETURN_IF_ERROR(DecodeZeros(settings, *qzeros, groups, &out));
  out.order = OrderOfPlaces(place);
  out.scales.assign(scales->bytes.begin(), scales->bytes.end());
  if (qweight->unread()) return out;
  out.codes = UnpackGptqRows(qweight->bytes, out.k, out.n, settings.bits, settings.words, place);
  return out;
}

absl::StatusOr<std::vector<int32_t>> PlacesByGroup(const GroupIndex& index,
                                                   const TensorView* tensor, int64_t k,
                                                   int64_t groups, int64_t rows) {
  if (tensor == nullptr) {
    if (groups == 1 || !index.mixed.value_or(false)) return std::vector<int32_t>();
    return BadTensor(index.name, "nothing", absl::StrCat("I32 [K], as ", index.because_mixed));
  }
  const std::vector<int32_t> group_of = Integers(*tensor);
  int64_t moved = -1;  // the first that is not where k / group_size has it
  bool zeros = true;
  for (int64_t i = 0; i < k; ++i) {
    if (group_of[i] < 0 || group_of[i] >= groups) {
      return BadTensor(index.name, absl::StrCat(group_of[i], " at index ", i),
                       absl::StrCat("0 to ", groups - 1, ", a group of \"", index.scales, "\""));
    }
    if (moved < 0 && group_of[i] != i / rows) moved = i;
    zeros &= group_of[i] == 0;
  }
  // Writers that have no use for it may leave it at 0.
  if (moved < 0 || (zeros && !index.mixed.value_or(false))) return std::vector<int32_t>();
  if (!index.mixed.value_or(true)) {
    return BadTensor(
        index.name, absl::StrCat(group_of[moved], " at index ", moved),
        absl::StrCat(moved / rows, ", index / group_size, as ", index.because_unmixed));
  }
  AWQD_RETURN_IF_ERROR(CheckCounts(index.name, group_of, groups, rows));
  std::vector<int64_t> next(groups);
  for (int64_t group = 0; group < groups; ++group) next[group] = group * rows;
  std::vector<int32_t> out(k);
  for (int64_t i = 0; i < k; ++i) out[i] = static_cast<int32_t>(next[group_of[i]]++);
  return out;
}

std::vector<int32_t> OrderOfPlaces(absl::Span<const int32_t> places) {
  std::vector<int32_t> out(places.size());
  for (size_t i = 0; i < places.size(); ++i) out[places[i]] = static_cast<int32_t>(i);
  return out;
}

const Format kGptqFormat = {.name = "gptq",
                            .quant_method = "gptq",
                            .suffixes = kGptqSuffixes,
                            .optional_suffixes = kGptqOptional,
                            .code_dtypes = kGptqCodeTypes,
                            .settings = kSettings,
                            .read = Read,
                            .decode_parts = Decode,
                            .remark = Remark};

}  // namespace awqd
