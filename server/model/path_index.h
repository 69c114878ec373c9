// PathIndex: finds the paths that are most like one that is missing, without looking at all of
// them.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/strings/string_view.h"

namespace awqd::model {

// A client that mistypes a path is told similar ones. Models have 100,000 paths, and anybody may
// ask, so a search costs a few binary searches and a constant number of comparisons.
class PathIndex {
 public:
  // MostLike returns so many paths, and compares the wanted one with kLooks others.
  static constexpr size_t kMost = 5;
  static constexpr size_t kLooks = 64;

  PathIndex() = default;
  // `paths`: in ascending order. The index does not own their bytes.
  explicit PathIndex(std::vector<absl::string_view> paths);

  // The most similar ones first, and of equally similar ones those that sort first. Two paths are
  // as similar as they have bytes in common at both ends. The paths that are compared share the
  // longest beginnings and the longest ends with `wanted`, where there are more than kLooks.
  std::vector<absl::string_view> MostLike(absl::string_view wanted) const;

 private:
  std::vector<absl::string_view> by_beginning_;
  std::vector<absl::string_view> by_end_;  // in the order of the reversed paths
};

}  // namespace awqd::model
