// ORCA's reports to clients: xds.service.orca.v3 out of band, and metadata at the end of calls.
//
// Our own method instead of gRPC's service, which the distributions' packages of gRPC 1.51.1 do not
// have. Where they have it, it does not pass admission, and starts gRPC's own polling threads.
#pragma once

#include <atomic>

#include "absl/time/time.h"
#include "server/services/orca/utilization.h"
#include "server/transport/admission.h"
#include "server/transport/byte_budget.h"
#include "server/transport/call_loop.h"

namespace awqd::services::orca {

// Thread-safe. Outlives the gRPC server.
class Service {
 public:
  // A client's interval is brought within these bounds.
  static constexpr absl::Duration kShortest = absl::Seconds(1);
  static constexpr absl::Duration kLongest = absl::Hours(1);
  // Streams that may be open at once; the next one is RESOURCE_EXHAUSTED. A gRPC client that asks
  // for reports has one for each connection.
  static constexpr int kMaxOpen = 1024;

  // Before the server starts. Nothing is null, and all outlive the service. The report that a
  // stream sends counts in `in_flight`.
  Service(transport::Admission* admission, transport::ByteBudget* in_flight,
          UtilizationStatistics* statistics);

  void ServeOn(transport::CallLoop* loop);

 private:
  class Stream;

  void Start(transport::WriteCall* call);

  transport::Drain* const gate_;
  transport::ByteBudget* const in_flight_;
  UtilizationStatistics* const statistics_;
  std::atomic<int> open_{0};
};

}  // namespace awqd::services::orca
