// Curves of time over load, point by point.
#include "server/batching/run_times.h"

#include <algorithm>
#include <bit>
#include <new>

namespace awqd::batching {
namespace {

// Recent batches weigh as much as the last 8, so that a change of load or clock shows within a few.
constexpr float kWeight = 1.0F / 8;
constexpr float kBestWeight = 1.0F / 64;
constexpr int64_t kSureRuns = 4;
constexpr absl::Duration kSureAge = absl::Seconds(1);
// Below this load most kernels are bound by reading the weight: a larger batch takes no longer.
constexpr float kFlatLoad = 16;
// One run counts as at most so many times what was expected: a process that was stopped, or a clock
// that was set, says nothing of the next run. A true change is learned within a few runs.
constexpr float kMostChange = 8;
constexpr size_t kMostCurves = 4096;

// The number of the point that a load belongs to. No load counts as one, so that two points never
// have the same load.
size_t IndexOf(int64_t load) {
  return std::min<size_t>(RunTimes::kPoints - 1,
                          std::bit_width(static_cast<uint64_t>(std::max<int64_t>(1, load))));
}

}  // namespace

void RunTimes::Point::Add(float new_load, float ns) {
  if (empty()) {
    *this = {.load = new_load, .usual_ns = ns, .best_ns = ns, .runs = 1};
    return;
  }
  ++runs;
  load += (new_load - load) * kWeight;
  ns = std::min(ns, usual_ns * kMostChange);
  // The first runs bring caches, clocks and buffers up, so that a shorter one replaces them.
  usual_ns += runs <= kSureRuns && ns < usual_ns ? ns - usual_ns : (ns - usual_ns) * kWeight;
  best_ns = ns < best_ns ? ns : best_ns + (usual_ns - best_ns) * kBestWeight;
}

// A curve that exists has a point.
RunTime RunTimes::Curve::Expect(int64_t load, absl::Time now) const {
  const auto wanted = static_cast<float>(std::max<int64_t>(1, load));
  // The nearest points on both sides, from the middle on: mostly the next ones.
  const auto begin = points_.begin(), end = points_.end();
  const auto middle = begin + static_cast<std::ptrdiff_t>(IndexOf(load));
  const Point* below = nullptr;
  const Point* above = nullptr;
  for (auto it = middle + 1; it != begin && below == nullptr;) {
    if (--it; !it->empty()) (it->load <= wanted ? below : above) = &*it;
  }
  for (auto it = middle + 1; it != end && above == nullptr; ++it) {
    if (!it->empty()) above = &*it;
  }
  const auto sure = [](const Point* point) { return point == nullptr || point->runs >= kSureRuns; };
  const auto grown = [](float ns, float from, float to) {
    return ns * std::max(1.0F, to / std::max(from, kFlatLoad));
  };
  const auto read = [&](float Point::*ns) {
    if (below == nullptr) return absl::Nanoseconds(above->*ns * (wanted / above->load));
    if (above == nullptr) return absl::Nanoseconds(grown(below->*ns, below->load, wanted));
    // The first runs of one point are bounded by those of the other.
    float low = below->*ns, high = above->*ns;
    if (!sure(below)) low = std::min(low, high * kMostChange);
    if (!sure(above)) high = std::min(high, grown(low, below->load, above->load) * kMostChange);
    return absl::Nanoseconds(low +
                             (high - low) * (wanted - below->load) / (above->load - below->load));
  };
  return {.usual = read(&Point::usual_ns),
          .best = read(&Point::best_ns),
          .sure = sure(below) && sure(above) && absl::AbsDuration(now - updated_) < kSureAge};
}

void RunTimes::Record(const RunKey& key, int64_t load, absl::Duration took,
                      absl::Time now) noexcept {
  if (key.operation == nullptr || took < absl::ZeroDuration()) return;
  const auto ns = static_cast<float>(absl::ToDoubleNanoseconds(took));
  try {
    // Inline weights may have any shape.
    if (curves_.size() >= kMostCurves) curves_.clear();
    Curve& curve = curves_[key];
    curve.points_[IndexOf(load)].Add(static_cast<float>(std::max<int64_t>(1, load)), ns);
    curve.updated_ = now;
  } catch (const std::bad_alloc&) {
  }
}

const RunTimes::Curve* RunTimes::Find(const RunKey& key) const {
  const auto it = curves_.find(key);
  return it == curves_.end() ? nullptr : &it->second;
}

}  // namespace awqd::batching
