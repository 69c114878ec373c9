// Calls over gRPC's completion queues: what a handler does with a call, and which events it
// receives.
//
// The names are those of gRPC's callback reactors. gRPC polls for its own reactors with two threads
// of its own, so that an answer from another thread costs a context switch for each call.
#pragma once

#include <atomic>
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
#include "grpcpp/support/async_stream.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"
#include "kernels/base/mutex.h"
#include "server/obs/call_record.h"
#include "server/security/identities.h"
#include "server/transport/admission.h"
#include "server/transport/connection.h"
#include "server/transport/drain.h"
#include "server/transport/limits.h"
#include "server/transport/slow_clients.h"

namespace awqd::transport {

class CallLoop;
struct Method;

// A tag of the completion queue: every tag is one.
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
  void* tag() { return static_cast<Event*>(this); }

 private:
  Owner* const owner_;
};

// Receives the events of a call, on threads of the loop. It must not block them. Only OnDone is
// never called at the same time as another.
class Reactor {
 public:
  // The client cancelled, its deadline passed, or the connection broke. Called once at most, after
  // the handler has returned. The call still has to be finished.
  virtual void OnCancel() {}
  // StartAlarm's time has come.
  virtual void OnAlarm() {}
  // The end of a StartRead or StartWrite. False: there is no message, or nobody to read it.
  virtual void OnReadDone(bool /*ok*/) {}
  virtual void OnWriteDone(bool /*ok*/) {}
  // Called last, once, after Finish and every other event: the call is gone when this returns.
  virtual void OnDone() = 0;

 protected:
  ~Reactor() = default;
};

// A request needs to know this of its call, whichever way that came.
struct RequestContext {
  absl::Time deadline;
  obs::CallAnnotations* notes;  // outlives the request
  obs::SpanRef span;            // none where the call is not traced
  Charge charge;                // of the request's bytes
  security::IdentityPtr identity;
};

// One call. Owns gRPC's objects for it, and itself until OnDone has returned. Operations may be
// started on any thread; their ends are events.
//
// All kinds of calls are streams to gRPC. A call is then ours from its headers on, whether its
// message has arrived or not.
class ServerCall {
 public:
  ServerCall(const ServerCall&) = delete;
  ServerCall& operator=(const ServerCall&) = delete;

  // "awqd.v1.ServerInfo/GetServerInfo": from the server's own table, never from the wire.
  absl::string_view method() const;
  // The name as the client sent it. Empty for a method that the server has.
  const std::string& requested_method() const { return context_.method(); }
  // "ipv4:10.0.0.7:51034", "unix:": gRPC allocates it.
  std::string peer() const { return context_.peer(); }
  absl::Time deadline() const;
  // The connection that it came on. Null until admission has seen the call.
  const std::shared_ptr<Connection>& connection() const { return state_.connection.connection(); }
  // The caller's identity. Null where admission asked for none.
  const security::IdentityPtr& identity() const { return state_.identity; }
  // The connection and the client that are charged for bytes of the call.
  Charge charge() const { return state_.charge(); }
  // The charge of one request of the call: on a stream each message is a request of its own.
  virtual Charge request_charge() const { return charge(); }
  RequestContext request_context() {
    return {deadline(), &state_.notes, state_.span, request_charge(), identity()};
  }

  // At most once, before any operation and on the handler's thread. A call without a reactor is
  // finished all the same.
  void SetReactor(Reactor* reactor) { reactor_ = reactor; }

  // Ends the call, exactly once. Not while a write is in progress. A unary call that succeeds ends
  // with Answer instead.
  void Finish(const grpc::Status& status) {
    SetOutcome(status.error_code());
    SendStatus(status);
  }
  // As Finish, for a call that has sent messages. While the server stops, the status waits until
  // the client has had time to read them (Admission::StatusDelay).
  void FinishOnceRead(const grpc::Status& status) {
    SetOutcome(status.error_code());
    SendStatusOnceRead(status);
  }

  // OnAlarm comes `delay` later, or at once after HurryAlarm. The call does not end before. One at
  // a time.
  void StartAlarm(absl::Duration delay);
  void HurryAlarm() { alarm_.Cancel(); }

 protected:
  explicit ServerCall(Method* method);
  virtual ~ServerCall();

  // Admission let the call in: leads to Handle or EndWithoutRequest, once.
  virtual void Begin() { Handle(); }
  // Runs the method's handler.
  void Handle();
  // The client ended its side of the stream without a message, or the call broke.
  void EndWithoutRequest();
  // Counts an operation that Release ends.
  void Retain() { pending_.fetch_add(1, std::memory_order_relaxed); }
  void Release();
  Reactor* reactor() const { return reactor_; }
  // Writes a message that was counted. Its end is OnMessageWritten. One at a time. gRPC shares
  // the message's slices from here on.
  void WriteMessage(const grpc::ByteBuffer& message);
  virtual void OnMessageWritten(bool ok) { reactor_->OnWriteDone(ok); }
  // Writes a message that was counted, and OK.
  void WriteAndFinish(const grpc::ByteBuffer& message);
  // Counts a message and writes it, for calls that answer with a stream.
  void StartWrite(const grpc::ByteBuffer& message) {
    CountSent(message);
    WriteMessage(message);
  }
  // Once: the status is known. It is sent next, after the answer if that is yet to be sent.
  void SetOutcome(grpc::StatusCode outcome);
  // After SetOutcome, as FinishOnceRead.
  void SendStatusOnceRead(const grpc::Status& status);
  // Counts the call among those whose message is received, and among those whose answer is sent,
  // where TransitTimes follows calls of its method.
  void BeginReceiving();
  void EndReceiving(bool ok);
  void BeginSending();  // after SetOutcome; OnFinished ends it
  // Whether the server stops, so that a call that ends now may end with its connection.
  bool stopping() const;
  void CountReceived(const grpc::ByteBuffer& message) { Count(message, &state_.received_bytes); }
  void CountSent(const grpc::ByteBuffer& message) { Count(message, &state_.sent_bytes); }

  // A generic one, which knows the name of a method that is not in the table. Other calls pay for
  // it with two empty strings.
  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter responder_;

 private:
  friend class Admission;
  friend class CallLoop;

  static void Count(const grpc::ByteBuffer& message, std::atomic<int64_t>* bytes) {
    bytes->fetch_add(static_cast<int64_t>(message.Length()), std::memory_order_relaxed);
  }
  void OnArrived(bool ok);
  void OnEnded(bool ok);
  void OnWritten(bool ok);
  void OnFinished(bool ok);
  bool timed() const;
  void SendStatus(const grpc::Status& status);
  void SetDelay(absl::Duration delay) ABSL_EXCLUSIVE_LOCKS_REQUIRED(delayed_->mu);
  void OnDelayed(bool ok);
  void OnAlarm(bool ok);
  // Ends the call with an error in the words of the wire.
  void FinishWith(const absl::Status& status);
  void OnHandlerReturned();
  void NotifyCancelled();
  void CancelLateWrite();

  Method* const method_;
  Reactor* reactor_ = nullptr;
  // The handler, Finish, gRPC's notice of the end, and each read, write and alarm in progress.
  std::atomic<int> pending_{3};
  CallState state_;
  bool sending_ = false;
  WriteTimeout::Write write_{[this] { CancelLateWrite(); }};
  // The handler's return and the cancel may come in either order; the second one tells the reactor.
  std::atomic<bool> returned_or_cancelled_{false};
  EventOf<ServerCall, &ServerCall::OnArrived> arrived_{this};
  EventOf<ServerCall, &ServerCall::OnEnded> ended_{this};
  EventOf<ServerCall, &ServerCall::OnWritten> written_{this};
  EventOf<ServerCall, &ServerCall::OnFinished> finished_{this};

  grpc::Alarm alarm_;
  EventOf<ServerCall, &ServerCall::OnAlarm> alarm_over_{this};

  // The alarm of SendStatusOnceRead. The lock is for ThreadSanitizer, which does not see what an
  // alarm orders.
  struct Delayed {
    grpc::Alarm alarm;
    Mutex mu;
    grpc::Status status ABSL_GUARDED_BY(mu);
  };
  std::unique_ptr<Delayed> delayed_;
  EventOf<ServerCall, &ServerCall::OnDelayed> delay_over_{this};
};

// A call of one request. Its handler runs when the request is here. From the headers on until then
// the call is in flight as well. Without a request it ends with INVALID_ARGUMENT.
class RequestCall : public ServerCall {
 public:
  grpc::ByteBuffer* request() { return &request_; }

 protected:
  explicit RequestCall(Method* method) : ServerCall(method) {}

 private:
  void Begin() override;
  void OnRequest(bool ok);

  grpc::ByteBuffer request_;
  EventOf<RequestCall, &RequestCall::OnRequest> read_{this};
};

// A request, an answer.
class UnaryCall final : public RequestCall {
 public:
  explicit UnaryCall(Method* method) : RequestCall(method) {}

  // The bytes that a handler without an object of its own takes for the call. Empty at first, and
  // given back when the call is gone.
  ByteLease* lease() { return &lease_; }

  // Ends the call with OK. gRPC shares the answer's slices from here on.
  void Answer(const grpc::ByteBuffer& answer);

 private:
  void OnMessageWritten(bool ok) override;

  ByteLease lease_;
};

// A request, a stream of answers.
class WriteCall final : public RequestCall {
 public:
  explicit WriteCall(Method* method) : RequestCall(method) {}
  using ServerCall::StartWrite;
};

// A stream of requests, a stream of answers.
class StreamCall final : public ServerCall {
 public:
  explicit StreamCall(Method* method) : ServerCall(method) {}

  Charge request_charge() const override;
  using ServerCall::StartWrite;
  // One at a time, beside a write. Also while the call is being finished: it then ends with it.
  // `message` stays valid until OnReadDone.
  void StartRead(grpc::ByteBuffer* message);

 private:
  void OnRead(bool ok);

  grpc::ByteBuffer* message_ = nullptr;  // of the read in progress
  EventOf<StreamCall, &StreamCall::OnRead> read_{this};
};

}  // namespace awqd::transport
