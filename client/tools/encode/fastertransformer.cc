// Target "ft": the weights of FasterTransformer, kernels/formats/fastertransformer.cc says the
// tensors.
#include "kernels/formats/fastertransformer.h"

#include <utility>

#include "client/tools/encode/normal.h"
#include "client/tools/encode/pack.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

constexpr int kWidths[] = {4, 8};

absl::StatusOr<EncodedLinear> Encode(HostWeight given, const EncodeOptions& options) {
  AWQD_ASSIGN_OR_RETURN(
      const HostWeight weight,
      Normalised(std::move(given), {.widths = {4, 8}, .scales = {DType::kFp16, DType::kBf16}}));
  AWQD_ASSIGN_OR_RETURN(FasterTransformerWeight made, ToFasterTransformer(weight));
  const int64_t k = weight.k, n = weight.n, groups = weight.groups();
  EncodedLinear out = {.tensors = BiasOf(weight, options), .facts = FactsOf(weight)};
  out.tensors.push_back(MadeTensor("weight", "I8", {k, n * made.bits / 8}, std::move(made.weight)));
  out.tensors.push_back(
      MadeTensor("weight_scale", TypeName(made.scale_dtype),
                 groups == 1 ? std::vector<int64_t>{n} : std::vector<int64_t>{groups, n},
                 std::move(made.scales)));
  return out;
}

absl::StatusOr<nlohmann::ordered_json> Settings(const FolderFacts& facts) {
  AWQD_ASSIGN_OR_RETURN(const int bits, OneWidth(facts));
  nlohmann::ordered_json out = {{"quant_method", "fastertransformer"}, {"bits", bits}};
  // Groups that the settings say nothing of are equal.
  if (const auto group_size = OneGroupSize(facts); group_size.ok()) {
    out["group_size"] = *group_size;
  }
  if (auto made = Quantizer(facts); !made.is_null()) out["meta"] = std::move(made);
  return out;
}

}  // namespace

const Target kFasterTransformerTarget = {.name = "ft",
                                         .format = "fastertransformer",
                                         .widths = kWidths,
                                         .asymmetric = false,
                                         .k_multiple = 64,
                                         .n_multiple = 64,
                                         .encode = Encode,
                                         .settings = Settings};

}  // namespace awqd::tools
