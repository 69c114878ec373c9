// Neighbours in two sorted lists.
#include "server/model/path_index.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>

namespace awqd::model {
namespace {

bool EndsBefore(absl::string_view a, absl::string_view b) {
  return std::lexicographical_compare(a.rbegin(), a.rend(), b.rbegin(), b.rend());
}

// Bytes that two paths share at both ends: cheap, and what tells layers and projections apart.
size_t Likeness(absl::string_view a, absl::string_view b) {
  const size_t least = std::min(a.size(), b.size());
  size_t head = 0;
  while (head < least && a[head] == b[head]) ++head;
  size_t tail = 0;
  while (tail < least - head && a[a.size() - 1 - tail] == b[b.size() - 1 - tail]) ++tail;
  return head + tail;
}

// Appends up to `count` members of `sorted` around the place of `wanted`.
template <typename Before>
void AddNeighbours(const std::vector<absl::string_view>& sorted, absl::string_view wanted,
                   size_t count, Before before, std::vector<absl::string_view>* out) {
  const auto size = static_cast<int64_t>(sorted.size());
  const auto half = static_cast<int64_t>(count / 2);
  const int64_t at =
      std::lower_bound(sorted.begin(), sorted.end(), wanted, before) - sorted.begin();
  out->insert(out->end(), sorted.begin() + std::max<int64_t>(0, at - half),
              sorted.begin() + std::min(size, at + half));
}

}  // namespace

PathIndex::PathIndex(std::vector<absl::string_view> paths)
    : by_beginning_(std::move(paths)), by_end_(by_beginning_) {
  std::sort(by_end_.begin(), by_end_.end(), EndsBefore);
}

std::vector<absl::string_view> PathIndex::MostLike(absl::string_view wanted) const {
  std::vector<absl::string_view> looks;
  if (by_beginning_.size() <= kLooks) {
    looks = by_beginning_;
  } else {
    // A path that is like no other is answered with the first ones.
    looks.assign(by_beginning_.begin(), by_beginning_.begin() + kMost);
    AddNeighbours(by_beginning_, wanted, kLooks / 2, std::less<>(), &looks);
    AddNeighbours(by_end_, wanted, kLooks / 2 - kMost, EndsBefore, &looks);
    std::sort(looks.begin(), looks.end());
    looks.erase(std::unique(looks.begin(), looks.end()), looks.end());
  }
  std::vector<std::pair<size_t, absl::string_view>> scored;
  scored.reserve(looks.size());
  for (const absl::string_view path : looks) scored.emplace_back(Likeness(path, wanted), path);
  std::stable_sort(scored.begin(), scored.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<absl::string_view> out;
  for (size_t i = 0; i < std::min(scored.size(), kMost); ++i) out.push_back(scored[i].second);
  return out;
}

}  // namespace awqd::model
