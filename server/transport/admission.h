// Admission: what every call of every service passes, once when it arrives and once when it ends.
//
// The loop leads every call through it. No handler can be reached without it, and no handler calls
// it. A check or a record that applies to all calls belongs here.
//
// Attacker: clients who call without the right to, or more often than others can bear. Shown by
// access_test, admission_test, admission_limits_test, and tests/server/services/admission_test,
// which calls every method of the server.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "grpcpp/support/status.h"
#include "kernels/base/histogram.h"
#include "server/obs/call_record.h"
#include "server/obs/call_recorder.h"
#include "server/obs/snapshot.h"
#include "server/security/access.h"
#include "server/security/identities.h"
#include "server/transport/connection.h"
#include "server/transport/drain.h"
#include "server/transport/limits.h"
#include "server/transport/slow_clients.h"

namespace awqd::transport {

class ServerCall;

struct AdmissionLimits {
  // Calls in flight on one connection: open streams too, and calls of every service. A client that
  // heeds HTTP/2's own limit (Options::max_concurrent_streams) stays below; gRPC holds nobody to it
  // who never acknowledges it.
  int64_t calls_per_connection = 1024;
  // Resets the connection of this peer, as gRPC spells it. Called when four times as many calls of
  // the connection were rejected: its client goes on without reading that. May be null.
  std::function<void(const std::string& peer)> reset;
  // How long nothing has been on the way between the server and this peer; infinite when nobody
  // knows. May be null.
  std::function<absl::Duration(const std::string& peer)> idle_time;
  // How long an answer, or a message of a stream, may wait for its client to read it.
  absl::Duration write_timeout = absl::InfiniteDuration();
  ClientQuota client;  // of one identity, or of one host
  PeerCallLimits peer;
};

// Admission keeps this of a call, whichever way it came: by gRPC or by a ring.
struct CallState {
  std::chrono::steady_clock::time_point arrived_at, outcome_at;
  bool admitted = false;
  Connection::InFlight connection;
  Drain::InFlight in_flight;
  security::IdentityPtr identity;
  ClientRequest client_request;
  grpc::StatusCode outcome = grpc::StatusCode::UNKNOWN;
  obs::TraceContext trace;
  obs::SpanRef span;           // which others may link to; empty where no trace of the call is kept
  obs::CallAnnotations notes;  // of its requests
  // Bytes of the messages, or of the tensors in a ring, that came and that were sent so far.
  std::atomic<int64_t> received_bytes{0}, sent_bytes{0};

  // The connection and the client that are charged for bytes of the call.
  Charge charge() const { return {connection.connection(), client_request.client()}; }
};

// The client of a ring, which was admitted when it opened the ring.
struct RingClient {
  security::IdentityPtr identity;          // null where callers have none
  std::shared_ptr<Connection> connection;  // the ring, as the byte budget sees it
};

// Thread-safe once the server has started. Outlives the gRPC server.
//
// Admit and RecordOutcome run for every call. They take no lock but those of the connections and of
// WriteTimeout, which are held for a few instructions.
class Admission {
 public:
  // `recorder`, which outlives this, is told of every call; it may be null.
  explicit Admission(const AdmissionLimits& limits = {}, obs::CallRecorder* recorder = nullptr);

  // The name in obs::MethodStats of all methods that the server does not have. Names come from
  // the table, never from the wire, so that counts take bounded memory.
  static constexpr absl::string_view kUnknownMethod = "(unknown)";
  // Begins the names of methods that are called by rings.
  static constexpr absl::string_view kRingPrefix = "awqd.ring.";

  // One method in the table. Apart from its neighbours in memory, because every call writes.
  class alignas(64) Entry {
   public:
    Entry(absl::string_view method, security::Need need);

    absl::string_view method() const { return absl::string_view(path_).substr(1); }
    // As it is on the wire.
    const char* path() const { return path_.c_str(); }
    // As RejectWhileBusy says.
    bool rejected_while_busy() const { return rejected_while_busy_; }

   private:
    friend class Admission;
    const std::string path_;
    const security::Need need_;
    bool rejected_while_busy_ = false;
    mutable std::atomic<int64_t> started_{0};
    std::deque<Histogram> durations_;  // in nanoseconds, by status
    Histogram received_{kSizeBounds}, sent_{kSizeBounds};
  };

  // Before the server starts. `method` is "package.Service/Method", and new. This owns the entry.
  // Calls that need security::Need::kHealth are answered as ever while the server stops, which does
  // not wait for them.
  Entry* AddMethod(absl::string_view method, security::Need need);
  // Before the server starts. Until then nobody has an identity, and none is asked for.
  void SetAccess(std::unique_ptr<security::Access> access) { access_ = std::move(access); }
  // Before the server starts, once. Calls that require Need::kInfer, and were admitted, end with
  // value() as metadata of this name. It is called on the threads that end calls.
  void SetTrailingMetadata(std::string key, std::function<std::string()> value);

  // Before the server starts. Once every device has too much to do for any result by this deadline,
  // `check` says so, and calls of the methods of RejectWhileBusy are rejected before their messages
  // are read. It is called on the threads of the loop.
  void SetBusyCheck(std::function<absl::Status(absl::Time deadline)> check) {
    busy_check_ = std::move(check);
  }
  // Before the server starts: `method`, which was added, queues one request for a device.
  void RejectWhileBusy(absl::string_view method);

  // Checks a call that has arrived, before its handler. False: the call is rejected, and answered
  // now or later.
  bool Admit(ServerCall* call, const Entry& entry);
  // Counts a call whose status is known and is sent next. Once, on any thread.
  void RecordOutcome(ServerCall* call, Entry* entry);
  // Tells the recorder of a call whose status was sent.
  void RecordEnd(ServerCall* call);

  // The same of a call by a ring. Its connection and its access were checked when the ring was
  // opened. `traceparent`: as the header of that name; empty for none.
  absl::Status AdmitRingCall(CallState* call, const Entry& entry, const RingClient& client,
                             absl::Time deadline, absl::string_view traceparent);
  void RecordRingOutcome(CallState* call, Entry* entry, absl::StatusCode outcome);
  void RecordRingEnd(CallState* call, const Entry& entry);

  // How much longer a call that has sent its last message waits before its status, while the server
  // stops: until its connection has been idle for kRoundTrip. Zero or less: not at all.
  //
  // gRPC closes a connection that it has told to go away together with its last call. A client that
  // acknowledges something after that is answered with a reset, and loses what it has not read.
  absl::Duration StatusDelay(const ServerCall& call) const;

  Drain* drain() { return &drain_; }
  WriteTimeout* write_timeout() { return &write_timeout_; }
  // The times of calls of RejectWhileBusy.
  TransitTimes* transit() { return &transit_; }
  // For requests that come by other ways than a call.
  const security::Access& access() const { return *access_; }
  // One for each method, in the order of AddMethod: what RecordOutcome has counted.
  std::vector<obs::MethodStats> Calls() const;
  // The services of all methods of gRPC, each once.
  std::vector<std::string> Services() const;

 private:
  // The checks, in order. The first error rejects the call.
  absl::Status Check(ServerCall* call, const Entry& entry);
  absl::Status CheckConnection(ServerCall* call);
  absl::Status CheckDrain(CallState* call, const Entry& entry);
  absl::Status CheckAccess(ServerCall* call, const Entry& entry);
  absl::Status CheckClient(CallState* call, const Entry& entry,
                           absl::FunctionRef<std::string()> peer);
  absl::Status CheckTime(const ServerCall& call);

  void BeginTrace(ServerCall* call);
  void AddTrailingMetadata(ServerCall* call) const;
  static void CountOutcome(const CallState& call, Entry* entry);
  void Record(CallState* call, absl::string_view method, absl::FunctionRef<std::string()> peer);

  const AdmissionLimits limits_;
  obs::CallRecorder* const recorder_;
  Drain drain_;
  std::unique_ptr<security::Access> access_ =
      std::make_unique<security::Access>(security::Options());
  ClientLimiter clients_;
  PeerCalls peers_;
  const std::shared_ptr<Connections> connections_ = Connections::Make();
  WriteTimeout write_timeout_;
  TransitTimes transit_;
  std::atomic<int64_t> unread_{0};  // calls that CheckTime rejects itself
  std::string trailing_key_;
  std::function<std::string()> trailing_value_;  // null: none
  std::function<absl::Status(absl::Time deadline)> busy_check_;
  std::vector<std::unique_ptr<Entry>> entries_;
};

}  // namespace awqd::transport
