// RunTimes: how long a batch takes, learned from the batches that ran. No locks, no clock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>

#include "absl/time/time.h"
#include "server/batching/task.h"

namespace awqd::batching {

struct RunTime {
  absl::Duration usual;  // an exponential average
  absl::Duration best;   // the shortest seen, which the average slowly pulls up again
  // Whether enough batches of this key ran within the last second. A time that is not sure must not
  // refuse what an idle device could try, because only a run corrects it.
  bool sure = false;
};

// The time of a key over the load: a point for each power of two, the average of the loads and times
// that fell there, and straight lines between points.
class RunTimes {
  struct Point {
    float load = 0, usual_ns = 0, best_ns = 0;
    int64_t runs = 0;

    bool empty() const { return runs == 0; }
    void Add(float load, float ns);
  };

 public:
  static constexpr size_t kPoints = 24;

  class Curve {
   public:
    RunTime Expect(int64_t load, absl::Time now) const;

   private:
    friend class RunTimes;
    std::array<Point, kPoints> points_;
    absl::Time updated_ = absl::InfinitePast();
  };

  // A batch of summed load `load` took `took`, and ended at `now`. Ignores a negative time. Forgets
  // what it has no memory for.
  void Record(const RunKey& key, int64_t load, absl::Duration took, absl::Time now) noexcept;

  // Null for a key that never ran; valid until the next Record.
  const Curve* Find(const RunKey& key) const;
  // Zero for a key that never ran.
  RunTime Expect(const RunKey& key, int64_t load, absl::Time now) const {
    const Curve* const curve = Find(key);
    return curve == nullptr ? RunTime() : curve->Expect(load, now);
  }

  // Keys that are known; bounded.
  size_t size() const { return curves_.size(); }

 private:
  struct Hash {
    size_t operator()(const RunKey& key) const {
      return std::hash<const void*>()(key.operation) + key.shape;
    }
  };

  std::unordered_map<RunKey, Curve, Hash> curves_;
};

}  // namespace awqd::batching
