// Targets "gptq" and "compressed-tensors": formats whose settings may differ from linear to linear.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/tools/encode/target.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"

namespace awqd::tools {
namespace {

using Json = nlohmann::ordered_json;

// --- gptq: checkpoint_format "gptq" (v1), which AutoGPTQ and every reader after it take ---
//
// kernels/formats/gptq/gptq.h says the tensors.
//
// qzeros holds z - 1. Of 2, 4 and 8 bits it is subtracted from a word as a whole, of 3 bits from
// each code modulo 8, as GPTQModel does and awqd reads. A zero of 0 comes back there; AutoGPTQ's
// own kernels read it as 2^bits, so convert and quantize say when there is one.

constexpr int kGptqWidths[] = {2, 3, 4, 8};
constexpr size_t kMostPatterns = 10'000;  // that the format reads

std::vector<uint32_t> GptqZeros(const HostWeight& weight) {
  const int bits = weight.scheme.bits;
  const bool by_word = 32 % bits == 0;
  const int most = (1 << bits) - 1;
  std::vector<uint8_t> zeros(weight.groups() * weight.n);
  for (int64_t group = 0; group < weight.groups(); ++group) {
    for (int64_t col = 0; col < weight.n; ++col) {
      const int zero = weight.Zero(group, col);
      zeros[group * weight.n + col] = static_cast<uint8_t>(by_word ? zero : (zero - 1) & most);
    }
  }
  std::vector<uint32_t> out = DenseWords(zeros, weight.groups(), weight.n, bits);
  const uint32_t ones = 0xffffffffu / static_cast<uint32_t>(most);
  for (uint32_t& word : out) word -= by_word ? ones : 0;
  return out;
}

std::vector<uint8_t> GroupOfEach(const HostWeight& weight) {
  std::vector<uint8_t> out(weight.k * sizeof(int32_t));
  for (int64_t i = 0; i < weight.k; ++i) {
    const int64_t k = weight.order.empty() ? i : weight.order[i];
    const auto group = static_cast<int32_t>(i / weight.group_rows());
    std::memcpy(out.data() + k * sizeof(group), &group, sizeof(group));
  }
  return out;
}

absl::Status EncodeGptq(HostWeight weight, const EncodeOptions&, EncodedLinear* out) {
  const int64_t n = weight.n, groups = weight.groups();
  const auto words = [&](int64_t count) { return (count * weight.scheme.bits + 31) / 32; };
  out->tensors.push_back(
      MadeTensor("qweight", "I32", {words(weight.k), n}, WordsAlongRows(weight)));
  out->tensors.push_back(MadeTensor("qzeros", {groups, words(n)}, GptqZeros(weight)));
  out->tensors.push_back(
      MadeTensor("scales", TypeName(*weight.scheme.scale_dtype), {groups, n}, weight.scales));
  out->tensors.push_back(MadeTensor("g_idx", "I32", {weight.k}, GroupOfEach(weight)));
  return absl::OkStatus();
}

// The settings of a linear that may differ from the others'.
struct Own {
  int bits = 0;
  int64_t group_size = -1;
  auto operator<=>(const Own&) const = default;
};

Own OwnOf(const LinearFacts& linear) {
  return {linear.bits, linear.groups() == 1 ? -1 : linear.group_rows};
}

// A group_size larger than K is all of K.
bool Fits(const LinearFacts& linear, const Own& all) {
  const bool group = linear.groups() == 1 ? all.group_size == -1 || all.group_size >= linear.k
                                          : all.group_size == linear.group_rows;
  return linear.bits == all.bits && group;
}

// The settings that most linears have.
Own Common(const FolderFacts& facts) {
  std::map<Own, int64_t> counts;
  for (const auto& [path, linear] : facts.linears) ++counts[OwnOf(linear)];
  return std::max_element(counts.begin(), counts.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

// A regular expression that this path alone matches.
std::string Pattern(const char* sign, const std::string& path) {
  std::string out = absl::StrCat(sign, "^");
  for (const char c : path) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
                       c == '_' || (c & 0x80) != 0;
    if (!plain) out.push_back('\\');
    out.push_back(c);
  }
  return out + "$";
}

absl::StatusOr<Json> GptqSettings(const FolderFacts& facts) {
  const Own all = Common(facts);
  bool symmetric = true, order = false;
  Json dynamic = Json::object();
  for (const std::string& path : facts.dense) dynamic[Pattern("-:", path)] = Json::object();
  for (const auto& [path, linear] : facts.linears) {
    symmetric &= linear.symmetric;
    order |= linear.order;
    if (Fits(linear, all)) continue;
    const Own own = OwnOf(linear);
    dynamic[Pattern("+:", path)] = {{"bits", own.bits}, {"group_size", own.group_size}};
  }
  if (dynamic.size() > kMostPatterns) {
    return Invalid("dynamic: got ", dynamic.size(),
                   " linears that are dense or differ from the others, expected "
                   "at most ",
                   kMostPatterns);
  }
  Json out = {{"quant_method", "gptq"}, {"bits", all.bits},         {"group_size", all.group_size},
              {"desc_act", order},      {"sym", symmetric},         {"checkpoint_format", "gptq"},
              {"static_groups", false}, {"true_sequential", false}, {"lm_head", false},
              {"pack_dtype", "int32"}};
  if (!dynamic.empty()) out["dynamic"] = std::move(dynamic);
  SetQuantizer(facts, &out);
  return out;
}

// --- compressed-tensors: its pack-quantized ---
//
//   weight_packed I32 [N, ceil(K * bits / 32)]: codes along K, unsigned (signed ones + 2^(bits-1))
//   weight_scale F16, BF16 or F32 [N, groups]
//   weight_zero_point I32 [ceil(N * bits / 32), groups], zeros along N; none where all are
//   2^(bits-1) weight_shape I64 [2]: N, K
//
// 2, 4 and 8 bits: other widths lie in two ways, by the package's version.

constexpr int kPackedWidths[] = {2, 4, 8};

// [ceil(N * bits / 32), groups].
std::vector<uint8_t> PackedZeros(const HostWeight& weight) {
  const int64_t n = weight.n, groups = weight.groups();
  std::vector<uint8_t> zeros(groups * n);
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t col = 0; col < n; ++col) {
      zeros[group * n + col] = static_cast<uint8_t>(weight.Zero(group, col));
    }
  }
  const int bits = weight.scheme.bits;
  return Transposed(BytesOf(DenseWords(zeros, groups, n, bits)), groups, CeilDiv(n * bits, 32), 4);
}

absl::Status EncodePacked(HostWeight weight, const EncodeOptions&, EncodedLinear* out) {
  const QuantizationScheme& d = weight.scheme;
  const int64_t n = weight.n, groups = weight.groups(), words = CeilDiv(weight.k * d.bits, 32);
  out->tensors.push_back(MadeTensor("weight_packed", "I32", {n, words},
                                    Transposed(WordsAlongRows(weight), words, n, 4)));
  out->tensors.push_back(MadeTensor("weight_scale", TypeName(*d.scale_dtype), {n, groups},
                                    Transposed(weight.scales, groups, n, SizeOf(*d.scale_dtype))));
  if (!d.symmetric()) {
    out->tensors.push_back(MadeTensor("weight_zero_point", "I32", {CeilDiv(n * d.bits, 32), groups},
                                      PackedZeros(weight)));
  }
  const int64_t shape[] = {n, weight.k};
  std::vector<uint8_t> bytes(sizeof(shape));
  std::memcpy(bytes.data(), shape, sizeof(shape));
  out->tensors.push_back(MadeTensor("weight_shape", "I64", {2}, std::move(bytes)));
  return absl::OkStatus();
}

Json Weights(const Own& own, bool symmetric, const FolderFacts& facts) {
  const bool channel = own.group_size == -1;
  Json out = {{"num_bits", own.bits},
              {"type", "int"},
              {"symmetric", symmetric},
              {"strategy", channel ? "channel" : "group"},
              {"group_size", channel ? Json(nullptr) : Json(own.group_size)},
              {"dynamic", false}};
  // The package's name for rounding to nearest within the range of the weights.
  if (facts.rtn) out["observer"] = facts.search ? "mse" : "minmax";
  return out;
}

absl::StatusOr<Json> PackedSettings(const FolderFacts& facts) {
  std::map<std::pair<Own, bool>, Json> targets;  // by what they have, and whether symmetric
  for (const auto& [path, linear] : facts.linears) {
    Json& paths = targets[{OwnOf(linear), linear.symmetric}];
    if (paths.is_null()) paths = Json::array();
    paths.push_back(path);
  }
  if (targets.size() == 1) targets.begin()->second = {"Linear"};
  Json groups = Json::object();
  for (auto& [kind, paths] : targets) {
    groups[absl::StrCat("group_", groups.size())] = {
        {"targets", std::move(paths)},
        {"weights", Weights(kind.first, kind.second, facts)},
        {"input_activations", nullptr},
        {"output_activations", nullptr}};
  }
  return Json{{"quant_method", "compressed-tensors"},
              {"format", "pack-quantized"},
              {"quantization_status", "compressed"},
              {"config_groups", std::move(groups)},
              {"ignore", facts.dense}};
}

}  // namespace

const Target kGptqTarget = {.name = "gptq",
                            .format = "gptq",
                            .widths = kGptqWidths,
                            .limits = {.widths = kGptqWidths, .order = true, .short_group = true},
                            .encode = EncodeGptq,
                            .settings = GptqSettings};

const Target kCompressedTensorsTarget = {.name = "compressed-tensors",
                                         .format = "pack-quantized",
                                         .widths = kPackedWidths,
                                         .limits = {.widths = kPackedWidths, .scales = kAnyScale},
                                         .encode = EncodePacked,
                                         .settings = PackedSettings};

}  // namespace awqd::tools
