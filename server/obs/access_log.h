// AccessLog: a line for a call, for all of them or for those that say most.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "server/obs/call_record.h"

namespace awqd::obs {

enum class AccessLogMode {
  kOff,
  kSlow,     // slow calls, up to a rate
  kSampled,  // some of each kind: slow, failed, others; no probes that are answered
  kAll,
};

struct AccessLogOptions {
  AccessLogMode mode = AccessLogMode::kSampled;
  // A call is slow whose only request took this long, the sending of its answer included. Infinite:
  // none is.
  absl::Duration slow = absl::Seconds(1);
  // Lines a second of each kind, but for kAll.
  int64_t lines_per_s = 2;
};

// Thread-safe.
class AccessLog {
 public:
  explicit AccessLog(const AccessLogOptions& options) : options_(options) {}

  struct Line {
    bool wanted = false;
    bool slow = false;
    int64_t skipped = 0;  // calls of the kind that had no line since the last one that had
  };
  // Whether such a call is given a line; asked once of each call. `method` is of the server's
  // table. `waited`: that its client waited for one request; zero where it did not for one
  // (RequestSum::waited).
  Line Wants(absl::string_view method, absl::StatusCode code, absl::Duration waited,
             absl::Time now);
  // "call" at level info, or "slow call" at level warning, which names the step that took longest.
  void Write(const CallRecord& record, const Line& line) const;

 private:
  enum Kind { kGood, kFailed, kSlow, kKinds };
  struct Budget {
    int64_t second = 0;  // since 1970
    int64_t lines = 0;   // in it
    int64_t skipped = 0;
  };

  const AccessLogOptions options_;
  Mutex mu_;
  Budget budgets_[kKinds] ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::obs
