// Target "awq": AutoAWQ gemm, kernels/formats/awq.cc says the tensors.
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/tools/elements.h"
#include "client/tools/encode/normal.h"
#include "client/tools/encode/pack.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

constexpr int kWidths[] = {4};
constexpr int kColumnOfNibble[] = {0, 2, 4, 6, 1, 3, 5, 7};

uint32_t Word(const uint8_t* codes) {
  uint32_t out = 0;
  for (int nibble = 0; nibble < 8; ++nibble) {
    out |= static_cast<uint32_t>(codes[kColumnOfNibble[nibble]]) << (4 * nibble);
  }
  return out;
}

absl::StatusOr<EncodedLinear> Encode(HostWeight given, const EncodeOptions& options) {
  AWQD_ASSIGN_OR_RETURN(
      const HostWeight weight,
      Normalised(std::move(given), {.widths = {4}, .scales = {DType::kFp16, DType::kBf16}}));
  const int64_t k = weight.k, n = weight.n, groups = weight.groups();
  if (n % 8 != 0) return BadValue("N", n, "a multiple of 8: a word holds 8 columns");
  std::vector<uint32_t> codes(k * n / 8), zeros(groups * n / 8);
  std::vector<uint8_t> row(n);
  RowReader rows(&weight);
  for (int64_t i = 0; i < k; ++i) {
    rows.ReadCodes(i, row.data());
    for (int64_t col = 0; col < n; col += 8) codes[(i * n + col) / 8] = Word(row.data() + col);
  }
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t col = 0; col < n; ++col) row[col] = static_cast<uint8_t>(weight.Zero(group, col));
    for (int64_t col = 0; col < n; col += 8) zeros[(group * n + col) / 8] = Word(row.data() + col);
  }
  EncodedLinear out = {.tensors = BiasOf(weight, options), .facts = FactsOf(weight)};
  out.tensors.push_back(MadeTensor("qweight", {k, n / 8}, std::move(codes)));
  out.tensors.push_back(MadeTensor("qzeros", {groups, n / 8}, std::move(zeros)));
  out.tensors.push_back(
      MadeTensor("scales", TypeName(*weight.scheme.scale_dtype), {groups, n}, weight.scales));
  return out;
}

absl::StatusOr<nlohmann::ordered_json> Settings(const FolderFacts& facts) {
  AWQD_ASSIGN_OR_RETURN(const int64_t group_size, OneGroupSize(facts));
  nlohmann::ordered_json out = {{"quant_method", "awq"},    {"bits", 4},
                                {"group_size", group_size}, {"zero_point", true},
                                {"version", "gemm"},        {"modules_to_not_convert", nullptr}};
  nlohmann::ordered_json modules = nlohmann::ordered_json::array();
  for (const std::string& path : facts.dense) {
    // Readers look for the name anywhere in a path, so that "mlp.gate" would be "mlp.gate_proj".
    const auto in = [&](const auto& linear) { return absl::StrContains(linear.first, path); };
    bool ambiguous = false;
    for (const auto& linear : facts.linears) ambiguous |= in(linear);
    if (!ambiguous) modules.push_back(path);
  }
  if (!modules.empty()) out["modules_to_not_convert"] = std::move(modules);
  if (auto made = Quantizer(facts); !made.is_null()) out["meta"] = std::move(made);
  return out;
}

}  // namespace

const Target kAwqTarget = {.name = "awq",
                           .format = "awq",
                           .widths = kWidths,
                           .n_multiple = 8,
                           .encode = Encode,
                           .settings = Settings};

}  // namespace awqd::tools
