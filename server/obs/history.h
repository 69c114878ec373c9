// History: the last quarter of an hour of a server, as rates between snapshots.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "server/obs/snapshot.h"

namespace awqd::obs {

// One point of the plots: over the time since the point before.
struct HistoryPoint {
  absl::Time time;
  double requests_per_s = 0;  // that devices computed
  double tokens_per_s = 0;
  double failed_per_s = 0;        // calls that ended with another code than OK
  double p50_ms = 0, p99_ms = 0;  // of the calls that ask for one result
  double batch_tokens = 0;        // on average
  double queue_ms = 0;            // on average, of a request
  double queued = 0;              // at the moment
  double in_flight_bytes = 0;
  double resident_bytes = 0;
  double device_bytes = 0;  // that are not free, on all devices together
};

// Thread-safe.
class History {
 public:
  static constexpr absl::Duration kInterval = absl::Seconds(5);
  static constexpr absl::Duration kLength = absl::Minutes(15);

  // The first one is only remembered. Points older than kLength go.
  void Add(const Snapshot& snapshot);
  std::vector<HistoryPoint> points() const;

 private:
  mutable Mutex mu_;
  std::optional<Snapshot> last_ ABSL_GUARDED_BY(mu_);
  std::deque<HistoryPoint> points_ ABSL_GUARDED_BY(mu_);
};

// Durations of the calls that ask for one result: of the inference services, streams left out.
HistogramData RequestDurations(const Snapshot& snapshot);

}  // namespace awqd::obs
