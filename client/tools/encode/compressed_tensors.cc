// Target "compressed-tensors": its pack-quantized.
//
//   weight_packed I32 [N, ceil(K * bits / 32)]: codes along K, unsigned (signed ones + 2^(bits-1))
//   weight_scale F16, BF16 or F32 [N, groups]
//   weight_zero_point I32 [ceil(N * bits / 32), groups], zeros along N; none where all are
//   2^(bits-1) weight_shape I64 [2]: N, K
//
// 2, 4 and 8 bits: other widths lie in two ways, by the package's version.
#include <cstring>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/tools/encode/normal.h"
#include "client/tools/encode/pack.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"

namespace awqd::tools {
namespace {

constexpr int kWidths[] = {2, 4, 8};
using Json = nlohmann::ordered_json;

// [ceil(N * bits / 32), groups].
std::vector<uint8_t> Zeros(const HostWeight& weight) {
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

absl::StatusOr<EncodedLinear> Encode(HostWeight given, const EncodeOptions& options) {
  AWQD_ASSIGN_OR_RETURN(
      const HostWeight weight,
      Normalised(std::move(given),
                 {.widths = {2, 4, 8}, .scales = {DType::kFp16, DType::kBf16, DType::kFp32}}));
  const QuantizationScheme& d = weight.scheme;
  const int64_t k = weight.k, n = weight.n, groups = weight.groups();
  EncodedLinear out = {.tensors = BiasOf(weight, options), .facts = FactsOf(weight)};
  out.tensors.push_back(MadeTensor("weight_packed", "I32", {n, CeilDiv(k * d.bits, 32)},
                                   WordsAlongRowsTransposed(weight)));
  out.tensors.push_back(MadeTensor("weight_scale", TypeName(*d.scale_dtype), {n, groups},
                                   Transposed(weight.scales, groups, n, SizeOf(*d.scale_dtype))));
  if (!d.symmetric()) {
    out.tensors.push_back(
        MadeTensor("weight_zero_point", "I32", {CeilDiv(n * d.bits, 32), groups}, Zeros(weight)));
  }
  const int64_t shape[] = {n, k};
  std::vector<uint8_t> bytes(sizeof(shape));
  std::memcpy(bytes.data(), shape, sizeof(shape));
  out.tensors.push_back(MadeTensor("weight_shape", "I64", {2}, std::move(bytes)));
  return out;
}

// --- Settings ---

using Kind = std::tuple<int, int64_t, bool>;  // bits, group_size, symmetric

Kind KindOf(const LinearFacts& linear) {
  return {linear.bits, linear.groups() == 1 ? -1 : linear.group_rows, linear.symmetric};
}

Json Weights(const Kind& kind, const FolderFacts& facts) {
  const auto& [bits, group_size, symmetric] = kind;
  const bool channel = group_size == -1;
  Json out = {{"num_bits", bits},
              {"type", "int"},
              {"symmetric", symmetric},
              {"strategy", channel ? "channel" : "group"},
              {"group_size", channel ? Json(nullptr) : Json(group_size)},
              {"dynamic", false}};
  // What the package calls rounding to nearest within the range of the weights.
  if (facts.rtn) out["observer"] = facts.search ? "mse" : "minmax";
  return out;
}

absl::StatusOr<Json> Settings(const FolderFacts& facts) {
  std::map<Kind, Json> targets;
  for (const auto& [path, linear] : facts.linears) {
    Json& paths = targets[KindOf(linear)];
    if (paths.is_null()) paths = Json::array();
    paths.push_back(path);
  }
  if (targets.size() == 1) targets.begin()->second = {"Linear"};
  Json groups = Json::object();
  for (auto& [kind, paths] : targets) {
    groups[absl::StrCat("group_", groups.size())] = {{"targets", std::move(paths)},
                                                     {"weights", Weights(kind, facts)},
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

const Target kCompressedTensorsTarget = {.name = "compressed-tensors",
                                         .format = "pack-quantized",
                                         .widths = kWidths,
                                         .encode = Encode,
                                         .settings = Settings};

}  // namespace awqd::tools
