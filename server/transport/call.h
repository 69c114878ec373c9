// Calls over gRPC's completion queues: what a handler does with a call, and what it hears of it.
//
// The words are those of gRPC's callback reactors. Why not these: gRPC polls for them with threads
// of its own, so that an answer given on another thread wakes one of them for each end of a call
// and one for each request that follows (README.md has the numbers).
#pragma once

#include <atomic>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "grpcpp/alarm.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/async_stream.h"
#include "grpcpp/support/async_unary_call.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"
#include "kernels/base/mutex.h"

namespace awqd::transport {

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

// Hears of a call, on threads of the loop, which must not be blocked. Only OnDone is never called
// at the same time as another.
class Reactor {
 public:
  // The client cancelled, its deadline passed, or the connection broke; once at most, after the
  // handler has returned. The call still has to be finished.
  virtual void OnCancel() {}
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

  absl::Time deadline() const;
  // At most once, before any operation and on the handler's thread. A call without one is finished
  // all the same.
  void SetReactor(Reactor* reactor) { reactor_ = reactor; }

  // Ends the call, exactly once. Not while a write is in progress. A unary call ends with Answer
  // instead when all is well.
  void Finish(const grpc::Status& status) { SendStatus(status); }
  // The same, `delay` later.
  void FinishIn(absl::Duration delay, const grpc::Status& status);

 protected:
  explicit ServerCall(MethodBase* method);
  virtual ~ServerCall();

  virtual void SendStatus(const grpc::Status& status) = 0;
  // Counts an operation that Release ends.
  void Retain() { pending_.fetch_add(1, std::memory_order_relaxed); }
  void Release();
  Reactor* reactor() const { return reactor_; }

  grpc::ServerContext context_;

 private:
  friend class MethodBase;
  template <typename Call>
  friend class Method;

  void OnTaken(bool ok);
  void OnEnded(bool ok);
  void OnFinished(bool ok);
  void OnDelayed(bool ok);
  void HandlerReturned();
  void Cancelled();

  MethodBase* const method_;
  Reactor* reactor_ = nullptr;
  // The handler, Finish, gRPC's notice of the end, and each read and write in progress.
  std::atomic<int> pending_{3};
  // Who of the handler's return and the notice of a cancel comes second tells the reactor.
  std::atomic<bool> one_of_two_{false};
  EventOf<ServerCall, &ServerCall::OnTaken> taken_{this};
  EventOf<ServerCall, &ServerCall::OnEnded> ended_{this};

  // Of FinishIn. The lock is for ThreadSanitizer, which does not see what an alarm orders.
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

// A request, an answer.
class UnaryCall final : public ServerCall {
 public:
  using Responder = grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>;
  explicit UnaryCall(MethodBase* method) : ServerCall(method), responder_(&context_) {}

  grpc::ByteBuffer* request() { return &request_; }
  // Ends the call well. gRPC shares the answer's slices from here on.
  void Answer(const grpc::ByteBuffer& answer) {
    responder_.Finish(answer, grpc::Status::OK, &finished_);
  }

 private:
  template <typename Call>
  friend class Method;
  void SendStatus(const grpc::Status& status) override {
    responder_.FinishWithError(status, &finished_);
  }

  grpc::ByteBuffer request_;
  Responder responder_;
};

// A request, a stream of answers.
class WriteCall final : public ServerCall {
 public:
  using Responder = grpc::ServerAsyncWriter<grpc::ByteBuffer>;
  explicit WriteCall(MethodBase* method) : ServerCall(method), responder_(&context_) {}

  grpc::ByteBuffer* request() { return &request_; }
  // One at a time. gRPC shares the message's slices from here on.
  void StartWrite(const grpc::ByteBuffer& message) {
    Retain();
    responder_.Write(message, &written_);
  }

 private:
  template <typename Call>
  friend class Method;
  void SendStatus(const grpc::Status& status) override { responder_.Finish(status, &finished_); }
  void OnWritten(bool ok) {
    reactor()->OnWriteDone(ok);
    Release();
  }

  grpc::ByteBuffer request_;
  Responder responder_;
  EventOf<WriteCall, &WriteCall::OnWritten> written_{this};
};

// A stream of requests, a stream of answers.
class StreamCall final : public ServerCall {
 public:
  using Responder = grpc::ServerAsyncReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;
  explicit StreamCall(MethodBase* method) : ServerCall(method), responder_(&context_) {}

  // One at a time; beside a write, and also when the call is being finished: it then ends with it.
  // `message` stays valid until OnReadDone.
  void StartRead(grpc::ByteBuffer* message) {
    Retain();
    responder_.Read(message, &read_);
  }
  void StartWrite(const grpc::ByteBuffer& message) {
    Retain();
    responder_.Write(message, &written_);
  }

 private:
  template <typename Call>
  friend class Method;
  void SendStatus(const grpc::Status& status) override { responder_.Finish(status, &finished_); }
  void OnRead(bool ok) {
    reactor()->OnReadDone(ok);
    Release();
  }
  void OnWritten(bool ok) {
    reactor()->OnWriteDone(ok);
    Release();
  }

  Responder responder_;
  EventOf<StreamCall, &StreamCall::OnRead> read_{this};
  EventOf<StreamCall, &StreamCall::OnWritten> written_{this};
};

}  // namespace awqd::transport
