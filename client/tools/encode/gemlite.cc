// Target "gemlite": scales that multiply; kernels/formats/gemlite.cc says the tensors.
#include "kernels/formats/gemlite.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/tools/encode/normal.h"
#include "client/tools/encode/pack.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

constexpr int kWidths[] = {2, 3, 4, 8};

// One number for all, one for each column, or one for each group of a column.
std::vector<int64_t> CellShape(const HostWeight& weight) {
  return weight.groups() == 1 ? std::vector<int64_t>{weight.n}
                              : std::vector<int64_t>{weight.groups(), weight.n};
}

// Codes of a row of W_q fill whole words, and its words may have a dimension of their own only
// where all of them together are a multiple of 32.
struct Words {
  int64_t in_row = 0;
  bool flat = false;
  bool whole = false;  // the row's last word is full, so that words say K
};

Words WordsOf(int64_t k, int64_t n, int bits) {
  const int64_t step = 32 / bits, in_row = CeilDiv(k, step);
  return {in_row, in_row * n % 32 != 0, k % step == 0};
}

absl::StatusOr<EncodedLinear> Encode(HostWeight given, const EncodeOptions& options) {
  AWQD_ASSIGN_OR_RETURN(
      const HostWeight weight,
      Normalised(std::move(given), {.widths = {1, 2, 3, 4, 8},
                                    .scales = {DType::kFp16, DType::kBf16, DType::kFp32},
                                    .real_zeros = true,
                                    .short_group = true}));
  const QuantizationScheme& d = weight.scheme;
  const Words words = WordsOf(weight.k, weight.n, d.bits);
  AWQD_ASSIGN_OR_RETURN(std::vector<uint32_t> codes, PackWarpedInt32(weight));
  EncodedLinear out = {.tensors = BiasOf(weight, options), .facts = FactsOf(weight)};
  const auto all = static_cast<int64_t>(codes.size());
  out.tensors.push_back(MadeTensor(
      "qweight",
      words.flat ? std::vector<int64_t>{all} : std::vector<int64_t>{weight.n, words.in_row},
      std::move(codes)));
  out.tensors.push_back(
      MadeTensor("scales", TypeName(*d.scale_dtype), CellShape(weight), weight.scales));
  if (d.zero_kind == ZeroKind::kConstant) {
    out.tensors.push_back(MadeTensor("zeros", "U8", {1}, {static_cast<uint8_t>(d.zero)}));
  } else {
    out.tensors.push_back(MadeTensor("zeros", d.real_zeros() ? TypeName(d.zero_dtype) : "U8",
                                     CellShape(weight), weight.zeros));
  }
  return out;
}

absl::StatusOr<nlohmann::ordered_json> Settings(const FolderFacts& facts) {
  AWQD_ASSIGN_OR_RETURN(const int bits, OneWidth(facts));
  nlohmann::ordered_json out = {{"quant_method", "gemlite"}, {"bits", bits}};
  bool shapes = false, ragged = false;
  for (const auto& [path, linear] : facts.linears) {
    const Words words = WordsOf(linear.k, linear.n, bits);
    shapes |= words.flat || !words.whole;
    ragged |= linear.k % linear.group_rows != 0;
  }
  // Groups that the settings say nothing of are equal.
  const absl::StatusOr<int64_t> group_size = OneGroupSize(facts);
  if (group_size.ok()) out["group_size"] = *group_size;
  if (ragged && !group_size.ok()) return group_size.status();
  const auto& [first, of_first] = facts.linears.front();
  for (const auto& [path, linear] : facts.linears) {
    if (!shapes || (linear.k == of_first.k && linear.n == of_first.n)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("linear ", path, ": got [", linear.k, ", ", linear.n, "], expected [",
                     of_first.k, ", ", of_first.n, "] as of ", first,
                     ": the format has one in_features and out_features for all, "
                     "which words that are not full need"));
  }
  if (shapes) out["in_features"] = of_first.k;
  if (shapes) out["out_features"] = of_first.n;
  out["scale_mode"] = "multiply";
  if (auto made = Quantizer(facts); !made.is_null()) out["meta"] = std::move(made);
  return out;
}

}  // namespace

const Target kGemliteTarget = {.name = "gemlite",
                               .format = "gemlite",
                               .widths = kWidths,
                               .encode = Encode,
                               .settings = Settings};

}  // namespace awqd::tools
