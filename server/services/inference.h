// The QuantizedInference service: each method starts a call object that answers by itself.
//
// All methods are raw, that is they see messages as gRPC received them and make the bytes of their
// answers: payloads are then copied once on the way in and not at all on the way out, and a message
// that does not parse is answered by us.
#pragma once

#include "awqd/v1/inference.grpc.pb.h"
#include "server/services/env.h"
#include "server/transport/call.h"
#include "server/transport/call_loop.h"

namespace awqd::services {

// They own themselves until gRPC is done with them. `env` outlives the server.
void StartMatmulCall(const Env& env, transport::UnaryCall* call);
void StartMatmulStream(const Env& env, transport::StreamCall* call);
void StartDequantizeCall(const Env& env, transport::UnaryCall* call);
void StartDequantizeStream(const Env& env, transport::WriteCall* call);

using RawQuantizedInference = v1::QuantizedInference::WithRawMethod_QuantizedMatmul<
    v1::QuantizedInference::WithRawMethod_QuantizedMatmulStream<
        v1::QuantizedInference::WithRawMethod_Dequantize<
            v1::QuantizedInference::WithRawMethod_DequantizeStream<
                v1::QuantizedInference::Service>>>>;

class InferenceService final : public RawQuantizedInference {
 public:
  explicit InferenceService(const Env& env) : env_(env) {}

  void ServeOn(transport::CallLoop* loop) {
    using Service = InferenceService;
    // A burst of callers waits less when it need not be asked for one by one.
    constexpr int kMany = 64, kSome = 8;
    loop->Serve<transport::UnaryCall>(kMany, this, &Service::RequestQuantizedMatmul,
                                      [this](transport::UnaryCall* call) {
                                        if (!env_.gate->TurnAway(call)) StartMatmulCall(env_, call);
                                      });
    loop->Serve<transport::StreamCall>(kSome, this, &Service::RequestQuantizedMatmulStream,
                                       [this](transport::StreamCall* call) {
                                         if (!env_.gate->TurnAway(call))
                                           StartMatmulStream(env_, call);
                                       });
    loop->Serve<transport::UnaryCall>(kSome, this, &Service::RequestDequantize,
                                      [this](transport::UnaryCall* call) {
                                        if (!env_.gate->TurnAway(call))
                                          StartDequantizeCall(env_, call);
                                      });
    loop->Serve<transport::WriteCall>(kSome, this, &Service::RequestDequantizeStream,
                                      [this](transport::WriteCall* call) {
                                        if (!env_.gate->TurnAway(call))
                                          StartDequantizeStream(env_, call);
                                      });
  }

 private:
  const Env& env_;
};

}  // namespace awqd::services
