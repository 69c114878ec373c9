// Checks of groups, and sorting of rows by them.
#include "kernels/formats/group_index.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

std::vector<int32_t> Integers(const TensorView& tensor) {
  std::vector<int32_t> out(tensor.shape[0]);
  std::memcpy(out.data(), tensor.bytes.data(), out.size() * sizeof(int32_t));
  return out;
}

// That group j has `rows` rows, and the last one what is left.
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

}  // namespace

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

}  // namespace awqd
