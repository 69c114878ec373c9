// A linear in GPTQ's tensors, which several quantisers write with small differences:
//
//   qweight I32 [K*bits/32, N]: codes along K     W[k, n] = (q - z) * scales[j, n], j = g_idx[k]
//   qzeros I32 [G, N*bits/32]: zero points along N
//   scales F16 or BF16 [G, N]; the last group may be short
//   g_idx I32 [K], optional: without it j = k / group_size
//   bias [N], optional
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/formats/format.h"
#include "kernels/formats/gptq/gptq_words.h"

namespace awqd {

inline constexpr absl::string_view kGptqSuffixes[] = {"qweight", "qzeros", "scales", "g_idx",
                                                      "bias"};
inline constexpr absl::string_view kGptqOptional[] = {"g_idx", "bias"};
inline constexpr absl::string_view kGptqCodeTypes[] = {"I32"};

struct GptqLinear {
  int bits = 0;
  int64_t group_size = 0;        // -1: all of K; 0: not said
  std::optional<bool> sym;       // true: every zero point is 2^(bits-1)
  std::optional<bool> desc_act;  // true: g_idx is needed; false: it is k / group_size
  GptqWords words = GptqWords::kDense;
  bool zeros_less_one = false;  // qzeros holds z - 1
};

// The rules of a checkpoint: one for every linear, with the settings `all`, behind those that `add`
// makes of the object `name` of the config. INVALID_ARGUMENT where no group size is said.
absl::StatusOr<QuantConfig> ReadGptqRules(
    const Setting& config, const Setting& all, absl::string_view name,
    absl::FunctionRef<absl::Status(const Setting& object, QuantConfig* out)> add);

// For Format::remark: where the settings say that every zero point is 2^(bits-1), and qzeros has it
// as the other version stores it. Some writers call their files by the name of the wrong one. Such
// zero points are read as 2^(bits-1).
std::string RemarkOnZeros(const GptqLinear& settings, const LinearTensors& tensors);

// Rows that g_idx mixes are sorted by their group, and the weight has an order. INVALID_ARGUMENT as
// Format::Decode has it.
absl::StatusOr<HostWeight> DecodeGptqLinear(const GptqLinear& settings,
                                            const LinearTensors& tensors);

// --- The group of each in-feature, as "g_idx" says it, or "weight_g_idx" of compressed-tensors ---

struct GroupIndex {
  absl::string_view name;             // of the tensor, I32 [K]
  absl::string_view scales;           // of the tensor that has a row or a column for each group
  std::optional<bool> mixed;          // false: in-feature i has to be in group i / group_size
  absl::string_view because_mixed;    // how the settings say that, for errors: "desc_act is true"
  absl::string_view because_unmixed;  // "desc_act is false"
};

// Where each in-feature's row goes: behind those before it of its group, groups of `rows` in their
// order. Empty when all stay where they are. `tensor` has k elements, or is null: INVALID_ARGUMENT
// where rows are mixed. INVALID_ARGUMENT for a group that there is none of, and for groups that are
// not of `rows` in-features, but for a short last one.
absl::StatusOr<std::vector<int32_t>> PlacesByGroup(const GroupIndex& index,
                                                   const TensorView* tensor, int64_t k,
                                                   int64_t groups, int64_t rows);

// HostWeight::order of those places.
std::vector<int32_t> OrderOfPlaces(absl::Span<const int32_t> places);

}  // namespace awqd
