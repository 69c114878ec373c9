// Finding weights and stacks by path, explaining what is not there, and counting losses.
#include "server/model/model.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/experts.h"
#include "kernels/checkpoint/file.h"

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

// Up to five paths, the most similar ones first.
std::string Suggestions(const PathIndex& paths, absl::string_view wanted) {
  return absl::StrJoin(paths.MostLike(wanted), ", ", [](std::string* out, absl::string_view path) {
    absl::StrAppend(out, Quoted(path));
  });
}

// Why the model has no weight of that path.
std::string ExplainNoWeight(const Model& model, absl::string_view wanted) {
  const std::string others = Suggestions(model.weight_paths, wanted);
  const auto stack = model.stacks.find(wanted);
  if (stack == model.stacks.end()) {
    return absl::StrCat("no weight ", Quoted(wanted), " among ", model.weights.size(),
                        "; there are ", others);
  }
  if (!stack->second.ok()) {
    return absl::StrCat("got the path of a stack, expected one weight such as ", others, "; ",
                        stack->second.status().message());
  }
  const size_t experts = (*stack->second)->experts.size();
  return absl::StrCat("got ", Quoted(wanted), ", a stack of ", experts,
                      experts == 1 ? " expert" : " experts",
                      " that GroupedQuantizedMatmul takes, expected one weight such as ", others);
}

// Why the model has no stack of that path.
std::string ExplainNoStack(const Model& model, absl::string_view wanted) {
  const std::string others =
      model.stacks.empty() ? "the model has none"
                           : absl::StrCat("there are ", Suggestions(model.stack_paths, wanted));
  if (model.weights.find(wanted) == model.weights.end()) {
    return absl::StrCat("no stack ", Quoted(wanted), " among ", model.stacks.size(), "; ", others);
  }
  const std::optional<ExpertPath> expert = ParseExpertPath(wanted);
  return absl::StrCat(
      "got the path of one weight, ", Quoted(wanted), ", expected a stack",
      expert ? absl::StrCat(" such as ", Quoted(expert->stack)) : absl::StrCat("; ", others));
}

// The reason that a weight or a stack is not served; OK for one that is, or that is not there.
absl::Status FindReason(const Model& model, absl::string_view wanted) {
  const auto served_not = [&](const auto& one) {
    return absl::Status(one.second.code(),
                        absl::StrCat("model \"", model.name, "\": ", Quoted(wanted),
                                     " is not served: ", one.second.message()));
  };
  const auto it = model.unserved.find(wanted);
  if (it != model.unserved.end()) return served_not(*it);
  const std::optional<ExpertPath> expert = ParseExpertPath(wanted);
  const std::string stack = expert ? expert->stack : std::string(wanted);
  const size_t star = stack.find('*');
  if (star == std::string::npos) return absl::OkStatus();
  // All experts may be in one tensor, whose path has no number.
  std::string all = stack;
  all.erase(star == 0 ? 0 : star - 1, 2);
  const auto fused = model.unserved.find(all);
  if (fused != model.unserved.end()) return served_not(*fused);
  if (expert) return absl::OkStatus();
  const std::string prefix = stack.substr(0, star);
  for (auto one = model.unserved.lower_bound(prefix);
       one != model.unserved.end() && absl::StartsWith(one->first, prefix); ++one) {
    const std::optional<ExpertPath> other = ParseExpertPath(one->first);
    if (other && other->stack == stack) return served_not(*one);
  }
  return absl::OkStatus();
}

bool IsLost(const PlacedWeight& weight) {
  const auto dead = [](const WeightPart& part) { return !part.weight->device->healthy(); };
  return weight.partitioned() ? absl::c_any_of(weight.parts, dead)
                              : absl::c_all_of(weight.parts, dead);
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

absl::StatusOr<std::shared_ptr<const PlacedWeight>> Model::FindWeight(
    absl::string_view path) const {
  const auto it = weights.find(path);
  if (it != weights.end()) return it->second;
  AWQD_RETURN_IF_ERROR(FindReason(*this, path));
  return absl::NotFoundError(absl::StrCat("model \"", name, "\": ", ExplainNoWeight(*this, path)));
}

absl::StatusOr<std::shared_ptr<const WeightStack>> Model::FindStack(absl::string_view path) const {
  const std::string prefix = absl::StrCat("model \"", name, "\"");
  const auto it = stacks.find(path);
  if (it == stacks.end() || !it->second.ok()) AWQD_RETURN_IF_ERROR(FindReason(*this, path));
  if (it == stacks.end()) {
    return absl::NotFoundError(absl::StrCat(prefix, ": ", ExplainNoStack(*this, path)));
  }
  if (!it->second.ok()) return Prefixed(prefix, it->second.status());
  return *it->second;
}

std::string Model::UnservedMessage() const {
  if (unserved.empty()) return "";
  return absl::StrCat(unserved.size(), " of ", unserved.size() + weights.size(),
                      " quantised weights are not served: ", unserved.begin()->second.message());
}

absl::Status Model::CheckAllServed() const {
  if (unserved.empty()) return absl::OkStatus();
  const absl::Status& first = unserved.begin()->second;
  return absl::Status(
      first.code(),
      absl::StrCat("model \"", name, "\": all weights are required, and ", unserved.size(),
                   " quantised weights are not served: ", first.message()));
}

std::string Losses::Message() const {
  if (devices.empty()) return "";
  if (weights == 0) return absl::StrCat("failed: ", devices, "; the model serves without");
  return absl::StrCat("failed: ", devices, ", and with it ", weights,
                      weights == 1 ? " weight" : " weights",
                      "; loading the model again puts it on the devices that are left");
}

Losses FindLosses(const Model& model) {
  Losses out;
  for (const auto& [device, bytes] : model.bytes_on) {
    if (device->healthy()) continue;
    absl::StrAppend(&out.devices, out.devices.empty() ? "" : ",", device->info().id);
  }
  if (out.devices.empty()) return out;
  out.weights = absl::c_count_if(model.weights, [](const auto& w) { return IsLost(*w.second); });
  return out;
}

}  // namespace awqd::model
