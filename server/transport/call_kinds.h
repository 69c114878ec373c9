// The kinds of calls: how many messages each way, and what a handler does with them.
#pragma once

#include <string>

#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/support/async_stream.h"
#include "grpcpp/support/async_unary_call.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"
#include "server/transport/call.h"

namespace awqd::transport {

// A request, an answer.
class UnaryCall final : public ServerCall {
 public:
  using Responder = grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>;
  explicit UnaryCall(MethodBase* method) : ServerCall(method), responder_(&context_) {}

  grpc::ByteBuffer* request() { return &request_; }
  // Ends the call well. gRPC shares the answer's slices from here on.
  void Answer(const grpc::ByteBuffer& answer) {
    Sent(answer);
    Leave(grpc::StatusCode::OK);
    SendBegins();
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

// What answers with a stream.
template <typename R>
class Writing : public ServerCall {
 public:
  using Responder = R;

  // One at a time. gRPC shares the message's slices from here on.
  void StartWrite(const grpc::ByteBuffer& message) {
    Retain();
    Sent(message);
    SendBegins();
    responder_.Write(message, &written_);
  }

 protected:
  explicit Writing(MethodBase* method) : ServerCall(method), responder_(&context_) {}

  Responder responder_;

 private:
  void SendStatus(const grpc::Status& status) override { responder_.Finish(status, &finished_); }
  void OnWritten(bool ok) {
    SendEnds();
    reactor()->OnWriteDone(ok);
    Release();
  }

  EventOf<Writing, &Writing::OnWritten> written_{this};
};

// A request, a stream of answers.
class WriteCall final : public Writing<grpc::ServerAsyncWriter<grpc::ByteBuffer>> {
 public:
  explicit WriteCall(MethodBase* method) : Writing(method) {}

  grpc::ByteBuffer* request() { return &request_; }

 private:
  template <typename Call>
  friend class Method;

  grpc::ByteBuffer request_;
};

// A stream of requests, a stream of answers.
class StreamCall final : public Writing<grpc::GenericServerAsyncReaderWriter> {
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
  template <typename Call>
  friend class Method;
  void OnRead(bool ok) {
    if (ok) Received(*message_);
    reactor()->OnReadDone(ok);
    Release();
  }

  grpc::ByteBuffer* message_ = nullptr;  // of the read in progress
  EventOf<StreamCall, &StreamCall::OnRead> read_{this};
};

// A call of a method that this server does not have.
class UnknownCall final : public Writing<grpc::GenericServerAsyncReaderWriter> {
 public:
  explicit UnknownCall(MethodBase* method) : Writing(method) {}

  // As the client sent it.
  const std::string& asked_for() const { return context_.method(); }

 private:
  template <typename Call>
  friend class Method;
};

}  // namespace awqd::transport
