// ORCA's reports to clients of how busy the server is: xds.service.orca.v3 out of band, and
// metadata at the end of calls.
//
// Our own method instead of gRPC's service, which the distributions' packages of gRPC 1.51.1 do not
// have. Where they have it, it does not pass admission, and starts gRPC's own polling threads.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "server/obs/snapshot.h"
#include "xds/data/orca/v3/orca_load_report.pb.h"

namespace awqd::services::orca {

using Report = xds::data::orca::v3::OrcaLoadReport;

// Rates are those of the time between two snapshots, `elapsed` apart; the rest is of the later one.
// `cores`: how many the process may use.
//   cpu_utilization          the process's time on processors / (elapsed x cores)
//   mem_utilization          memory of the devices that is not free / all of it
//   utilization["devices"]   time in which devices computed / elapsed, of the working ones on
//                            average; a batch counts when it ends
//   utilization["queue"]     requests that wait / those that may, of the fullest queue
//   utilization["in_flight_bytes"]  of requests and answers / max_in_flight_bytes
//   application_utilization  the largest of the three
//   rps_fractional, eps      calls a second of the inference services that ended, and those of them
//                            that failed for no mistake of the client's
//   named_metrics            "queued_requests"; "queue_ms", how long a request waited, on average;
//                            "tokens_per_s"
// Utilizations are from 0 to 1, because clients drop others.
Report ComputeReport(const obs::Snapshot& before, const obs::Snapshot& now, absl::Duration elapsed,
                     int cores);

// Takes a snapshot when somebody asks and the last one is old, so that all who ask share it.
// Thread-safe.
class UtilizationStatistics {
 public:
  struct Reading {
    Report report;
    std::string bytes;  // the same, serialized
  };

  // A reading is at least about this old when it is replaced.
  static constexpr absl::Duration kWindow = absl::Seconds(1);

  // Takes the first snapshot. `collect` is called by one thread at a time.
  UtilizationStatistics(std::function<obs::Snapshot()> collect, int cores);

  // Never null. Of the time between the last two snapshots, of which the first was taken by the
  // constructor. Blocks for no longer than `collect`.
  std::shared_ptr<const Reading> Latest() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // A reading of the time from the last snapshot to `snapshot`.
  std::shared_ptr<const Reading> Read(const obs::Snapshot& snapshot, absl::Duration elapsed) const;

  const std::function<obs::Snapshot()> collect_;
  const int cores_;
  Mutex mu_;
  bool collecting_ ABSL_GUARDED_BY(mu_) = false;  // who has set it owns the snapshot
  std::chrono::steady_clock::time_point taken_ ABSL_GUARDED_BY(mu_);  // the snapshot
  std::shared_ptr<const Reading> reading_ ABSL_GUARDED_BY(mu_);
  obs::Snapshot snapshot_;
};

// A client's interval is brought within these bounds.
inline constexpr absl::Duration kShortest = absl::Seconds(1);
inline constexpr absl::Duration kLongest = absl::Hours(1);
// Streams that may be open at once; the next one is RESOURCE_EXHAUSTED. A gRPC client that asks for
// reports has one for each connection.
inline constexpr int kMaxOpen = 1024;

}  // namespace awqd::services::orca
