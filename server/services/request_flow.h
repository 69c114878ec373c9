// RequestFlow: a flow of one request with one answer, whatever it asks for: alone in a call or one
// of many on a stream.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/services/request_handler.h"
#include "server/transport/call_gate.h"
#include "server/transport/call_kinds.h"
#include "server/wire/status.h"

namespace awqd::services {

// Its owner keeps it until the answer was sent.
class RequestFlow : public Flow {
 public:
  // Called exactly once, on any thread, possibly before Start returns. `answer` is the message to
  // send when the status is OK.
  using Done = std::function<void(const absl::Status&, grpc::ByteBuffer answer)>;

  virtual ~RequestFlow() = default;

  // Takes the bytes out of `message`. Never blocks. `gate`: of a message on a stream, which is
  // UNAVAILABLE when that gate is not open; a call of its own has passed it.
  void Start(grpc::ByteBuffer* message, const transport::CallGate* gate = nullptr) {
    const auto self =
        shared_from_this();  // the answer may come, and the call end, before we return
    const absl::Status status = transport::Guarded([&] { return Begin(message, gate); });
    if (status.ok()) return;
    message->Clear();  // when it was not even looked at
    Settle(status);
  }

  // From `done` on. Empty when the client sent none, or one that is too long to be echoed.
  virtual absl::string_view request_id() const = 0;
  // What the request and its answer hold, or will. Thread-safe.
  int64_t held_bytes() const { return held_bytes_.load(std::memory_order_relaxed); }
  // Within `done`, of a request that was refused: its error takes so many bytes from here on.
  // Nothing is held where the budget has no room for them.
  void HoldError(int64_t bytes) {
    if (!lease_.Resize(bytes, "error").ok()) lease_.ShrinkTo(0);
    NoteHeld();
  }

 protected:
  using Flow::Flow;
  // After each change of the lease.
  void NoteHeld() { held_bytes_.store(lease_.bytes(), std::memory_order_relaxed); }
  virtual absl::Status Begin(grpc::ByteBuffer* message, const transport::CallGate* gate) = 0;

 private:
  std::atomic<int64_t> held_bytes_{0};
};

// A unary call that one flow answers. Owns itself until gRPC is done with it.
class FlowCall final : public transport::Reactor {
 public:
  // `make(done)` makes the flow.
  template <typename Make>
  static void Start(transport::UnaryCall* call, Make make) {
    auto* reactor = new FlowCall;
    reactor->flow_ = make([call](const absl::Status& status, const grpc::ByteBuffer& answer) {
      status.ok() ? call->Answer(answer) : call->Finish(wire::ToGrpc(status));
    });
    call->SetReactor(reactor);
    reactor->flow_->Start(call->request());
  }
  void OnCancel() override { flow_->Cancel(); }
  void OnDone() override { delete this; }

 private:
  FlowCall() = default;

  std::shared_ptr<RequestFlow> flow_;
};

}  // namespace awqd::services
