// Call handlers: how requests come on calls. UnaryHandler has a call of one request, HandleStream a
// stream of requests with one answer each.
#pragma once

#include <functional>
#include <memory>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/services/env.h"
#include "server/services/request_handler.h"
#include "server/transport/call.h"
#include "server/wire/status.h"

namespace awqd::services {

// A call of one request, with one answer (UnaryCall) or an answer in chunks (WriteCall). Owns
// itself until gRPC is done with it.
template <typename Call>
class UnaryHandler final : public transport::Reactor {
 public:
  // `make(done)` makes the request's handler.
  template <typename Make>
  static void Start(Call* call, Make make) {
    auto* reactor = new UnaryHandler;
    reactor->handler_ = make([call](const absl::Status& status, const grpc::ByteBuffer& answer) {
      if constexpr (std::is_same_v<Call, transport::UnaryCall>) {
        status.ok() ? call->Answer(answer) : call->Finish(wire::ToGrpc(status));
      } else {
        call->FinishOnceRead(wire::ToGrpc(status));
      }
    });
    call->SetReactor(reactor);
    reactor->handler_->Start(call->request());
  }
  void OnWriteDone(bool ok) override { handler_->OnWritten(ok); }
  void OnCancel() override { handler_->Cancel(); }
  void OnDone() override { delete this; }

 private:
  UnaryHandler() = default;

  std::shared_ptr<RequestHandler> handler_;
};

// How a protocol has requests on a stream.
struct StreamProtocol {
  // Makes the handler of a message. Takes nothing out of the message.
  std::function<std::shared_ptr<RequestHandler>(const grpc::ByteBuffer& message,
                                                RequestHandler::Done done)>
      make_handler;
  // Encodes the answer to a request that failed; the stream goes on.
  std::function<grpc::ByteBuffer(absl::string_view request_id, const absl::Status& status)>
      encode_error;
  // Whether answers come in the order of their requests, or as soon as they are there.
  bool in_order = false;
};

// Handles the call until gRPC is done with it. `env` outlives it.
void HandleStream(const Env& env, transport::StreamCall* call, StreamProtocol protocol);

}  // namespace awqd::services
