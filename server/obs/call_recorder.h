// CallRecorder: is told of every call as it begins and as it ends. Logs some of them, and traces
// some.
#pragma once

#include <memory>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "server/obs/access_log.h"
#include "server/obs/call_record.h"
#include "server/obs/tracer.h"

namespace awqd::obs {

// Thread-safe; never waits for a disk or a network.
class CallRecorder {
 public:
  // `tracer` may be null.
  CallRecorder(const AccessLogOptions& log, std::unique_ptr<Tracer> tracer)
      : log_(log), tracer_(std::move(tracer)) {}

  // `traceparent`: as the call brought it; empty without.
  TraceContext Began(absl::string_view traceparent) const {
    return tracer_ == nullptr ? ContinueTrace(traceparent) : tracer_->Begin(traceparent);
  }

  // What becomes of a call that ends like this. To be asked once of each; spares the filling of
  // most records.
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

  // Null without.
  const Tracer* tracer() const { return tracer_.get(); }

 private:
  AccessLog log_;
  const std::unique_ptr<Tracer> tracer_;
};

}  // namespace awqd::obs
