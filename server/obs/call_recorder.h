// CallRecorder: logs some calls as they end (AccessLog), and traces some (Tracer).
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/obs/call_record.h"
#include "server/obs/logging.h"
#include "server/obs/tracer.h"

namespace awqd::obs {

enum class AccessLogMode {
  kOff,
  kSlow,     // slow calls, up to a rate
  kSampled,  // some of each kind: slow, failed, others; no probe that is answered
  kAll,
};

struct AccessLogOptions {
  AccessLogMode mode = AccessLogMode::kSampled;
  // A call is slow when its only request took this long, from its arrival to the end of sending.
  // Infinite: no call is slow.
  absl::Duration slow = absl::Seconds(1);
  // Lines a second of each kind; kAll has no bound.
  int64_t lines_per_s = 2;
};

// Chooses the calls that have a line in the log, and writes these lines. Thread-safe.
class AccessLog {
 public:
  explicit AccessLog(const AccessLogOptions& options)
      : options_(options), limit_(options.lines_per_s, absl::Seconds(1), /*keys=*/3) {}

  struct Line {
    bool wanted = false;
    bool slow = false;
    int64_t skipped = 0;  // calls of its kind without a line since the last one with a line
  };
  // Decides whether a call has a line. Called once for each call. `method` is from the server's
  // table. `waited`: RequestSum::waited, with the time of sending added where it is not zero.
  Line Wants(absl::string_view method, absl::StatusCode code, absl::Duration waited,
             absl::Time now);
  // Writes "call" at level info, or "slow call" at level warning with the step that took longest.
  void Write(const CallRecord& record, const Line& line) const;

 private:
  const AccessLogOptions options_;
  LogLimit limit_;  // by kind
};

// Logs and traces calls. Thread-safe; never waits for a disk or a network.
class CallRecorder {
 public:
  // `tracer` may be null.
  CallRecorder(const AccessLogOptions& log, std::unique_ptr<Tracer> tracer)
      : log_(log), tracer_(std::move(tracer)) {}

  // The trace of a call that begins. `traceparent`: the call's header; empty where it has none.
  TraceContext Began(absl::string_view traceparent) const {
    return tracer_ == nullptr ? ContinueTrace(traceparent) : tracer_->Begin(traceparent);
  }

  // Whether a call that ends like this is logged or traced. Called once for each call, so that most
  // calls need no CallRecord.
  struct Wanted {
    AccessLog::Line line;
    bool trace = false;
    bool any() const { return trace || line.wanted; }
  };
  Wanted Wants(absl::string_view method, absl::StatusCode code, absl::Duration waited,
               const TraceContext& trace) {
    return {log_.Wants(method, code, waited, absl::Now()), tracer_ != nullptr && trace.sampled};
  }
  void Ended(CallRecord record, const Wanted& wanted) {
    if (wanted.line.wanted) log_.Write(record, wanted.line);
    if (wanted.trace) tracer_->End(std::move(record));
  }

  // Null where calls are not traced.
  const Tracer* tracer() const { return tracer_.get(); }

 private:
  AccessLog log_;
  const std::unique_ptr<Tracer> tracer_;
};

}  // namespace awqd::obs
