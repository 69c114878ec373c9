// Calls over gRPC's completion queues: what a handler does with a call, and what it hears of it.
//
// The words are those of gRPC's callback reactors. Why not these: gRPC polls for them with threads
// of its own, so that an answer given on another thread wakes one of them for each end of a call
// and one for each request that follows (README.md has the numbers).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "grpcpp/alarm.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"
#include "kernels/base/mutex.h"
#include "server/obs/call_record.h"
#include "server/security/identities.h"
#include "server/transport/call_gate.h"
#include "server/transport/client_limits.h"
#include "server/transport/connection.h"
#include "server/transport/send_watch.h"

namespace awqd::transport {

class Door;
class MethodBase;

// What a completion queue hands back: every tag is one.
class Event {
 public:
  // On a thread of the loop. `ok` as gRPC defines it for the operation.
  virtual void Happened(bool ok) = 0;

 protected:
  ~Event() = default;
};

template <typename Owner, void (Owner::*kHappened)(bool)>
class EventOf final : public Event {
 public:
  explicit EventOf(Owner* owner) : owner_(owner) {}
  void Happened(bool ok) override { (owner_->*kHappened)(ok); }

 private:
  Owner* const owner_;
};

// Receives the events of a call, on threads of the loop. It must not block them. Only OnDone is
// never called at the same time as another.
class Reactor {
 public:
  // The client cancelled, its deadline passed, or the connection broke; once at most, after the
  // handler has returned. The call still has to be finished.
  virtual void OnCancel() {}
  // What StartAlarm asked for.
  virtual void OnAlarm() {}
  // The end of a StartRead or StartWrite; false: there is no message, or nobody to read it.
  virtual void OnReadDone(bool /*ok*/) {}
  virtual void OnWriteDone(bool /*ok*/) {}
  // Last, once, after Finish and every other event: the call is gone when this returns.
  virtual void OnDone() = 0;

 protected:
  ~Reactor() = default;
};

// One call. Owns gRPC's objects for it, and itself until OnDone has returned. Operations may be
// started on any thread; their ends are events.
class ServerCall {
 public:
  ServerCall(const ServerCall&) = delete;
  ServerCall& operator=(const ServerCall&) = delete;

  // "awqd.v1.ServerInfo/GetServerInfo": from the server's own table, never from the wire.
  absl::string_view method() const;
  // "ipv4:10.0.0.7:51034", "unix:": gRPC allocates it.
  std::string peer() const { return context_.peer(); }
  absl::Time deadline() const;
  // The connection that it came on. Null until the door has seen the call.
  const std::shared_ptr<Connection>& connection() const { return connection_.connection(); }
  // Who calls; null where the door asked nobody.
  const security::IdentityPtr& identity() const { return identity_; }
  // Of the messages that came and of those that were sent, so far.
  int64_t received_bytes() const { return received_bytes_.load(std::memory_order_relaxed); }
  int64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }
  // Its span, which others may link to; none where no trace of it is kept.
  const obs::SpanRef& span() const { return span_; }
  // What services measured of it, for whoever the door tells of its end.
  obs::CallAnnotations* notes() { return &notes_; }

  // At most once, before any operation and on the handler's thread. A call without one is finished
  // all the same.
  void SetReactor(Reactor* reactor) { reactor_ = reactor; }

  // Ends the call, exactly once. Not while a write is in progress. A unary call ends with Answer
  // instead when all is well.
  void Finish(const grpc::Status& status) {
    Leave(status.error_code());
    SendLast(status);
  }
  // The same of a call that has sent messages: while the server stops, the status waits until the
  // client has had time to read them (Door::LastWords).
  void FinishOnceRead(const grpc::Status& status) {
    Leave(status.error_code());
    SendOnceRead(status);
  }

  // OnAlarm comes `delay` later, or at once after HurryAlarm. The call does not end before. One at
  // a time.
  void StartAlarm(absl::Duration delay);
  void HurryAlarm() { alarm_.Cancel(); }

 protected:
  explicit ServerCall(MethodBase* method);
  virtual ~ServerCall();

  virtual void SendStatus(const grpc::Status& status) = 0;
  // The door let the call in: leads to Handle or EndWithoutRequest, once.
  virtual void Begin() { Handle(); }
  // Runs the method's handler.
  void Handle();
  // Nothing came before the client's end of the stream, or the call broke.
  void EndWithoutRequest();
  // Counts an operation that Release ends.
  void Retain() { pending_.fetch_add(1, std::memory_order_relaxed); }
  void Release();
  Reactor* reactor() const { return reactor_; }
  // Around each operation that sends: the client has only so long to take what it sends.
  void SendBegins();
  void SendEnds();
  const ClientRequest& client_request() const { return client_request_; }
  // Once: the status is known, and the answer, if there is one yet to send, is sent next.
  void Leave(grpc::StatusCode outcome);
  // After Leave, as FinishOnceRead.
  void SendOnceRead(const grpc::Status& status);
  // Whether the server stops, so that what ends now may end with its connection.
  bool stopping() const;
  void Received(const grpc::ByteBuffer& message) { Count(message, &received_bytes_); }
  void Sent(const grpc::ByteBuffer& message) { Count(message, &sent_bytes_); }

  // A generic one, which says the name of a method that is not in the table. The others pay for it
  // with two empty strings.
  grpc::GenericServerContext context_;

 private:
  friend class Door;
  friend class MethodBase;
  template <typename Call>
  friend class Method;

  static void Count(const grpc::ByteBuffer& message, std::atomic<int64_t>* bytes) {
    bytes->fetch_add(static_cast<int64_t>(message.Length()), std::memory_order_relaxed);
  }
  void OnTaken(bool ok);
  void OnEnded(bool ok);
  void OnFinished(bool ok);
  void SendLast(const grpc::Status& status) {
    SendBegins();
    SendStatus(status);
  }
  void Delay(absl::Duration delay) ABSL_EXCLUSIVE_LOCKS_REQUIRED(delayed_->mu);
  void OnDelayed(bool ok);
  void OnAlarm(bool ok);
  void HandlerReturned();
  void Cancelled();
  void NotTaken();
  // As the door does.
  void Refuse(const absl::Status& status);

  MethodBase* const method_;
  Reactor* reactor_ = nullptr;
  // The handler, Finish, gRPC's notice of the end, and each read, write and alarm in progress.
  std::atomic<int> pending_{3};
  // The door's, from Enter on.
  bool admitted_ = false;
  Connection::Ticket connection_;
  CallGate::Ticket ticket_;
  security::IdentityPtr identity_;
  ClientRequest client_request_;
  std::chrono::steady_clock::time_point entered_, left_;
  grpc::StatusCode outcome_ = grpc::StatusCode::UNKNOWN;
  obs::TraceContext trace_;
  obs::SpanRef span_;
  obs::CallAnnotations notes_;
  std::atomic<int64_t> received_bytes_{0};
  std::atomic<int64_t> sent_bytes_{0};
  SendWatch::Send send_{[this] { NotTaken(); }};
  // The handler's return and the cancel may come in either order; the second one tells the reactor.
  std::atomic<bool> one_of_two_{false};
  EventOf<ServerCall, &ServerCall::OnTaken> taken_{this};
  EventOf<ServerCall, &ServerCall::OnEnded> ended_{this};

  grpc::Alarm alarm_;
  EventOf<ServerCall, &ServerCall::OnAlarm> alarm_over_{this};

  // The alarm of SendOnceRead. The lock is for ThreadSanitizer, which does not see what an alarm
  // orders.
  struct Delayed {
    grpc::Alarm alarm;
    Mutex mu;
    grpc::Status status ABSL_GUARDED_BY(mu);
  };
  std::unique_ptr<Delayed> delayed_;
  EventOf<ServerCall, &ServerCall::OnDelayed> delay_over_{this};

 protected:
  EventOf<ServerCall, &ServerCall::OnFinished> finished_{this};
};

}  // namespace awqd::transport
