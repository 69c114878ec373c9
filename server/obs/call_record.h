// CallRecord: what is known of a call when it ends, for its line in the log and for its trace.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "server/obs/logging.h"
#include "server/obs/trace_context.h"

namespace awqd::obs {

// When a request reached the steps of its handler. InfinitePast: it did not get there.
struct RequestTimestamps {
  absl::Time begun = absl::InfinitePast();
  absl::Time submitted = absl::InfinitePast();  // to the engine
  absl::Time settled = absl::InfinitePast();    // its answer was encoded, but not sent yet
};

// The batch in which a request was computed.
struct BatchAnnotation {
  int64_t id = 0;  // 0: none
  int64_t tokens = 0;
  int32_t requests = 0;
  SpanRefs calls;  // as in engine::ExecutionReport
};

// The measurements of a request's handler. Logged at level debug, and added to the call's
// annotations.
struct RequestLog {
  absl::string_view method;  // "QuantizedMatmul"
  std::string request_id;    // as the client sent it; LogRequest escapes it
  std::string model;         // empty for an inline weight
  std::string weight;
  int64_t tokens = 0;
  int64_t queue_us = 0;
  int64_t compute_us = 0;
  int64_t total_us = 0;
  int64_t bytes_in = 0;
  int64_t bytes_out = 0;
  std::string kernel;
  BatchAnnotation batch;
  RequestTimestamps timestamps;
};

// Whether the log or a CallRecorder uses RequestLogs. If not, callers need not fill them.
bool LogsRequests();
// Makes LogsRequests true at every level of the log. Call it before threads start.
void WantRequests();

void LogRequest(const RequestLog& request, const absl::Status& status);

// The requests of a call, summed up. Names are those of the first request, as the client sent them,
// cut. Timestamps and the batch are those of the first request too: they count only where it is the
// only one.
struct RequestSum {
  std::string request_id, model, weight, kernel;
  int64_t requests = 0;
  int64_t tokens = 0, queue_us = 0, compute_us = 0;
  BatchAnnotation batch;
  RequestTimestamps timestamps;

  // How long the call's only request took from its first byte parsed to its answer, if it was
  // submitted to a device. Zero for calls of no request or of several: their duration depends on
  // their clients, or on a disk.
  absl::Duration waited() const {
    const bool one = requests == 1 && timestamps.submitted > absl::InfinitePast();
    return one ? timestamps.settled - timestamps.begun : absl::ZeroDuration();
  }
};

// Collects what the handlers of a call's requests measured. Thread-safe.
class CallAnnotations {
 public:
  void AddRequest(const RequestLog& request);
  absl::Duration waited() {
    MutexLock lock(&mu_);
    return sum_.waited();
  }
  RequestSum ReleaseSum() {
    MutexLock lock(&mu_);
    return std::move(sum_);
  }

 private:
  Mutex mu_;
  RequestSum sum_ ABSL_GUARDED_BY(mu_);
};

struct CallRecord {
  // A copy: a trace may be written after the server's table of methods is destroyed.
  std::string method;
  std::string peer;
  std::string identity;  // empty: the caller was not identified
  TraceContext trace;
  absl::StatusCode code = absl::StatusCode::kUnknown;
  absl::Time began;     // the call arrived
  absl::Time answered;  // its status was known
  absl::Time ended;     // its last byte was handed to the operating system
  int64_t received_bytes = 0, sent_bytes = 0;
  RequestSum sum;

  absl::Duration total() const { return ended - began; }
};

// An interval of a call.
struct CallStep {
  absl::string_view name;
  absl::Time begin, end;
};

// The steps that the call reached, in order: stage (checks, and payloads to staging memory), queue,
// compute, answer (encoding), send. A call of several requests has send alone.
std::vector<CallStep> ListSteps(const CallRecord& record);

}  // namespace awqd::obs
