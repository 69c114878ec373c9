// Which group each in-feature is in, as a tensor says it: "g_idx" of GPTQ, "weight_g_idx" of
// compressed-tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/formats/format.h"

namespace awqd {

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
