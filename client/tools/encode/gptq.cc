// Target "gptq": checkpoint_format "gptq" (v1), which AutoGPTQ and every reader after it take.
// kernels/formats/gptq_linear.h says the tensors.
//
// qzeros holds z - 1. Of 2, 4 and 8 bits it is subtracted from a word as a whole, of 3 bits from
// each code modulo 8, as GPTQModel does and awqd reads. A zero of 0 comes back there; AutoGPTQ's
// own kernels read it as 2^bits, so convert and quantize say when there is one.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/tools/encode/normal.h"
#include "client/tools/encode/pack.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

constexpr int kWidths[] = {2, 3, 4, 8};
using Json = nlohmann::ordered_json;

constexpr size_t kMostPatterns = 10'000;  // that the format reads

std::vector<uint32_t> Zeros(const HostWeight& weight) {
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

absl::StatusOr<EncodedLinear> Encode(HostWeight given, const EncodeOptions& options) {
  AWQD_ASSIGN_OR_RETURN(const HostWeight weight,
                        Normalised(std::move(given), {.widths = {2, 3, 4, 8},
                                                      .scales = {DType::kFp16, DType::kBf16},
                                                      .order = true,
                                                      .short_group = true}));
  const int64_t n = weight.n, groups = weight.groups();
  const auto words = [&](int64_t count) { return (count * weight.scheme.bits + 31) / 32; };
  EncodedLinear out = {.tensors = BiasOf(weight, options), .facts = FactsOf(weight)};
  out.tensors.push_back(MadeTensor("qweight", "I32", {words(weight.k), n}, WordsAlongRows(weight)));
  out.tensors.push_back(MadeTensor("qzeros", {groups, words(n)}, Zeros(weight)));
  out.tensors.push_back(
      MadeTensor("scales", TypeName(*weight.scheme.scale_dtype), {groups, n}, weight.scales));
  out.tensors.push_back(MadeTensor("g_idx", "I32", {weight.k}, GroupOfEach(weight)));
  return out;
}

// --- Settings ---

// What `dynamic` may change.
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

// What most linears have.
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

absl::StatusOr<Json> Settings(const FolderFacts& facts) {
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
    return absl::InvalidArgumentError(
        absl::StrCat("dynamic: got ", dynamic.size(),
                     " linears that are dense or differ from the others, expected "
                     "at most ",
                     kMostPatterns));
  }
  Json out = {{"quant_method", "gptq"}, {"bits", all.bits},         {"group_size", all.group_size},
              {"desc_act", order},      {"sym", symmetric},         {"checkpoint_format", "gptq"},
              {"static_groups", false}, {"true_sequential", false}, {"lm_head", false},
              {"pack_dtype", "int32"}};
  if (!dynamic.empty()) out["dynamic"] = std::move(dynamic);
  if (auto made = Quantizer(facts); !made.is_null()) out["meta"] = std::move(made);
  return out;
}

}  // namespace

const Target kGptqTarget = {
    .name = "gptq", .format = "gptq", .widths = kWidths, .encode = Encode, .settings = Settings};

}  // namespace awqd::tools
