// Making stacks: every expert is there, and all are alike.
#include "server/model/weight_stack.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/checkpoint/file.h"
#include "kernels/scheme.h"

namespace awqd::model {
namespace {

using Experts = std::map<int64_t, std::shared_ptr<const PlacedWeight>>;

bool SamePlacement(const PlacedWeight& a, const PlacedWeight& b) {
  return absl::c_equal(a.parts, b.parts, [](const WeightPart& left, const WeightPart& right) {
    return left.weight->device == right.weight->device && left.col_begin == right.col_begin &&
           left.col_end() == right.col_end() && left.row_begin == right.row_begin &&
           left.row_end() == right.row_end();
  });
}

// The columns on each device: "cuda:0 [0, 64), cuda:1 [64, 128)".
std::string Placement(const PlacedWeight& weight) {
  return absl::StrJoin(weight.parts, ", ", [](std::string* out, const WeightPart& part) {
    absl::StrAppend(out, part.weight->device->info().id, " [", part.col_begin, ", ", part.col_end(),
                    ")");
  });
}

// Whether it may be anywhere among the experts of an expert-parallel stack.
bool OnOneDevice(const PlacedWeight& weight) {
  return weight.parts.size() == 1 && !weight.partitioned();
}

// Empty where the two are alike, else "<what>: got <of weight>, expected <of first>".
std::string ExplainDifference(const PlacedWeight& weight, const PlacedWeight& first,
                              bool expert_parallel) {
  const auto differ = [](absl::string_view what, const auto& got, const auto& expected) {
    return absl::StrCat(what, ": got ", got, ", expected ", expected);
  };
  if (weight.shape.k != first.shape.k) return differ("K", weight.shape.k, first.shape.k);
  if (weight.shape.n != first.shape.n) return differ("N", weight.shape.n, first.shape.n);
  if (weight.shape.scheme != first.shape.scheme) {
    return differ("scheme", ToString(weight.shape.scheme), ToString(first.shape.scheme));
  }
  if (weight.has_bias != first.has_bias) {
    return differ("bias", weight.has_bias ? "one" : "none", first.has_bias ? "one" : "none");
  }
  if (SamePlacement(weight, first)) return "";
  if (expert_parallel && OnOneDevice(weight) && OnOneDevice(first)) return "";
  return differ("devices", Placement(weight), Placement(first));
}

// The lowest number that has no expert; the number of experts where none is missing.
int64_t LowestMissing(const Experts& experts) {
  int64_t next = 0;
  for (const auto& [number, weight] : experts) {
    if (number != next) break;
    ++next;
  }
  return next;
}

absl::Status BadStack(absl::string_view path, absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat("stack ", Quoted(path), ": ", what));
}

// Shares in the order of their lowest experts; none where one device has all.
void AddShards(WeightStack* stack) {
  std::vector<std::shared_ptr<WeightStack>> shards;
  std::vector<ExpertPlace> places;
  std::map<const Device*, size_t> of_device;
  for (const auto& expert : stack->experts) {
    const auto [it, fresh] = of_device.emplace(expert->parts.front().weight->device, shards.size());
    if (fresh) shards.push_back(std::make_shared<WeightStack>());
    WeightStack& shard = *shards[it->second];
    places.push_back({it->second, static_cast<int32_t>(shard.experts.size())});
    shard.experts.push_back(expert);
  }
  if (shards.size() == 1) return;
  stack->shards.assign(shards.begin(), shards.end());
  stack->places = std::move(places);
}

}  // namespace

std::string WeightStack::devices() const {
  if (!expert_parallel()) return experts.front()->devices();
  return absl::StrJoin(shards, ",", [](std::string* out, const auto& shard) {
    out->append(shard->experts.front()->devices());
  });
}

int64_t WeightStack::bytes() const {
  int64_t bytes = 0;
  for (const auto& expert : experts) bytes += expert->bytes();
  return bytes;
}

absl::StatusOr<std::shared_ptr<const WeightStack>> MakeStack(std::string path,
                                                             const Experts& experts,
                                                             bool expert_parallel) {
  if (experts.empty()) return BadStack(path, "got no expert, expected at least one");
  const auto count = static_cast<int64_t>(experts.size());
  if (const int64_t missing = LowestMissing(experts); missing != count) {
    return BadStack(path, absl::StrCat("expert ", missing, " is missing, got ", count,
                                       count == 1 ? " expert" : " experts", " up to number ",
                                       experts.rbegin()->first));
  }
  const PlacedWeight& first = *experts.begin()->second;
  auto out = std::make_shared<WeightStack>();
  for (const auto& [number, weight] : experts) {
    if (const std::string difference = ExplainDifference(*weight, first, expert_parallel);
        !difference.empty()) {
      return BadStack(path, absl::StrCat("expert ", number, ": ", difference, ", as expert 0 has"));
    }
    out->experts.push_back(weight);
  }
  out->path = std::move(path);
  if (expert_parallel) AddShards(out.get());
  return std::shared_ptr<const WeightStack>(std::move(out));
}

std::shared_ptr<const WeightStack> StackOfOne(std::shared_ptr<const PlacedWeight> weight) {
  auto out = std::make_shared<WeightStack>();
  out->experts.push_back(std::move(weight));
  return out;
}

}  // namespace awqd::model
