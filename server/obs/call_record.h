// CallRecord: what is known of one call at its end, for its line in the log and for its trace.
#pragma once

#include <algorithm>
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

// The requests of a call, summed up. Of names those of the first request, as the client sent them,
// cut; of moments and the batch those of an only request.
struct RequestSum {
  std::string request_id, model, weight, kernel;
  int64_t requests = 0;
  int64_t tokens = 0, queue_us = 0, compute_us = 0;
  BatchNote batch;
  RequestMoments moments;

  // How long the only request took from its first byte parsed to its answer, if it came as far as
  // to wait for a device. Zero for calls of no request or of several: how long those last is for
  // their clients to say, or for a disk.
  absl::Duration waited() const {
    const bool one = requests == 1 && moments.submitted > absl::InfinitePast();
    return one ? moments.settled - moments.begun : absl::ZeroDuration();
  }
};

// Where the flows of a call leave what they measured. Thread-safe.
class CallNotes {
 public:
  void Add(const RequestLog& request) {
    MutexLock lock(&mu_);
    if (sum_.requests++ == 0) {
      sum_.request_id = request.request_id.substr(0, kMaxNameBytes);
      sum_.model = request.model.substr(0, kMaxNameBytes);
      sum_.weight = request.weight.substr(0, kMaxNameBytes);
      sum_.kernel = request.kernel;
      sum_.batch = request.batch;
      sum_.moments = request.moments;
    }
    sum_.tokens += request.tokens;
    sum_.queue_us += request.queue_us;
    sum_.compute_us += request.compute_us;
  }
  absl::Duration waited() {
    MutexLock lock(&mu_);
    return sum_.waited();
  }
  RequestSum Take() {
    MutexLock lock(&mu_);
    return std::move(sum_);
  }

 private:
  static constexpr size_t kMaxNameBytes = 256;
  Mutex mu_;
  RequestSum sum_ ABSL_GUARDED_BY(mu_);
};

struct CallRecord {
  // Its own: a trace is written after the server's table of methods may be gone.
  std::string method;
  std::string peer;
  std::string identity;  // empty: nobody in particular
  TraceContext trace;
  absl::StatusCode code = absl::StatusCode::kUnknown;
  // It came to admission; its status was known; the last of it was handed to the kernel.
  absl::Time began, answered, ended;
  int64_t received_bytes = 0, sent_bytes = 0;
  RequestSum sum;

  absl::Duration total() const { return ended - began; }
};

// A part of a call's time.
struct CallStep {
  absl::string_view name;
  absl::Time begin, end;
};

// In order: stage (checks, and payloads to staging memory), queue, compute, answer (encoding),
// send. Only those that the call came to; none but send of a call of several requests.
std::vector<CallStep> StepsOf(const CallRecord& record);

}  // namespace awqd::obs
