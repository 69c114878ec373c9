// The kinds of calls: how many messages each way, and what a handler does with them.
#pragma once

#include <string>

#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/support/async_stream.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"
#include "server/transport/byte_budget.h"
#include "server/transport/call.h"

namespace awqd::transport {

// What every kind does with gRPC's stream, which serves all of them: a call is then ours from its
// headers on, whether its message has arrived or not.
class AnyCall : public ServerCall {
 public:
  using Responder = grpc::GenericServerAsyncReaderWriter;

 protected:
  explicit AnyCall(MethodBase* method) : ServerCall(method), responder_(&context_) {}

  Responder responder_;

 private:
  template <typename Call>
  friend class Method;
  void SendStatus(const grpc::Status& status) override { responder_.Finish(status, &finished_); }
};

// A call of one request. Its handler runs when the request is here; from the headers on until then
// the call is in flight as well. Without a request it ends with INVALID_ARGUMENT.
class RequestCall : public AnyCall {
 public:
  grpc::ByteBuffer* request() { return &request_; }

 protected:
  explicit RequestCall(MethodBase* method) : AnyCall(method) {}

 private:
  void Begin() override {
    Retain();
    responder_.Read(&request_, &read_);
  }
  void OnRequest(bool ok) {
    if (ok) Received(request_);
    ok ? Handle() : EndWithoutRequest();
    Release();
  }

  grpc::ByteBuffer request_;
  EventOf<RequestCall, &RequestCall::OnRequest> read_{this};
};

// A request, an answer.
class UnaryCall final : public RequestCall {
 public:
  explicit UnaryCall(MethodBase* method) : RequestCall(method) {}

  // The bytes that a handler without an object of its own takes for the call: empty at first,
  // given back when the call is gone.
  ByteLease* lease() { return &lease_; }

  // Ends the call well. gRPC shares the answer's slices from here on.
  void Answer(const grpc::ByteBuffer& answer) {
    Sent(answer);
    Leave(grpc::StatusCode::OK);
    if (answer.Length() > (stopping() ? kReadAtOnce : kTakesLong)) {
      Retain();
      SendBegins();
      return responder_.Write(answer, &written_);
    }
    SendBegins();
    responder_.WriteAndFinish(answer, grpc::WriteOptions(), grpc::Status::OK, &finished_);
  }

 private:
  // What a client has read before it acknowledges any of it: HTTP/2's first window.
  static constexpr size_t kReadAtOnce = 65535;
  // What may still be on its way when the server stops some time later. The status of its own costs
  // less than what sending so much takes.
  static constexpr size_t kTakesLong = 1 << 20;

  void OnWritten(bool /*ok*/) {
    SendEnds();
    SendOnceRead(grpc::Status::OK);  // to nobody, if the client has gone
    Release();
  }

  EventOf<UnaryCall, &UnaryCall::OnWritten> written_{this};
  ByteLease lease_;
};

// What answers with a stream, whatever it is asked by.
template <typename Base>
class Writing : public Base {
 public:
  // One at a time. gRPC shares the message's slices from here on.
  void StartWrite(const grpc::ByteBuffer& message) {
    this->Retain();
    this->Sent(message);
    this->SendBegins();
    this->responder_.Write(message, &written_);
  }

 protected:
  explicit Writing(MethodBase* method) : Base(method) {}

 private:
  void OnWritten(bool ok) {
    this->SendEnds();
    this->reactor()->OnWriteDone(ok);
    this->Release();
  }

  EventOf<Writing, &Writing::OnWritten> written_{this};
};

// A request, a stream of answers.
class WriteCall final : public Writing<RequestCall> {
 public:
  explicit WriteCall(MethodBase* method) : Writing(method) {}
};

// A stream of requests, a stream of answers.
class StreamCall final : public Writing<AnyCall> {
 public:
  explicit StreamCall(MethodBase* method) : Writing(method) {}

  // One at a time; beside a write, and also when the call is being finished: it then ends with it.
  // `message` stays valid until OnReadDone.
  void StartRead(grpc::ByteBuffer* message) {
    Retain();
    message_ = message;
    responder_.Read(message, &read_);
  }

 private:
  void OnRead(bool ok) {
    if (ok) Received(*message_);
    {
      const PaidBy paid_by(client_request(), true);
      reactor()->OnReadDone(ok);
    }
    Release();
  }

  grpc::ByteBuffer* message_ = nullptr;  // of the read in progress
  EventOf<StreamCall, &StreamCall::OnRead> read_{this};
};

// A call of a method that this server does not have.
class UnknownCall final : public AnyCall {
 public:
  explicit UnknownCall(MethodBase* method) : AnyCall(method) {}

  // As the client sent it.
  const std::string& asked_for() const { return context_.method(); }
};

}  // namespace awqd::transport
