// The QuantizedInference service: each method starts a call object that answers by itself.
//
// All methods are raw, that is they see messages as gRPC received them and make the bytes of their
// answers: payloads are then copied once on the way in and not at all on the way out, and a message
// that does not parse is answered by us.
#pragma once

#include "awqd/v1/inference.grpc.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/rpc/rpc_env.h"

namespace awqd {

// A raw method's request. gRPC hands it over as const although the handler is its only user, who
// may free it before the call ends.
inline grpc::ByteBuffer* Mutable(const grpc::ByteBuffer* request) {
  return const_cast<grpc::ByteBuffer*>(request);
}

// Calls own themselves until gRPC is done with them. `env` outlives the server.
grpc::ServerUnaryReactor* StartMatmulCall(const RpcEnv& env, grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* response);
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StartMatmulStream(
    const RpcEnv& env, grpc::CallbackServerContext* context);
grpc::ServerUnaryReactor* StartDequantizeCall(const RpcEnv& env,
                                              grpc::CallbackServerContext* context,
                                              const grpc::ByteBuffer* request,
                                              grpc::ByteBuffer* response);
grpc::ServerWriteReactor<grpc::ByteBuffer>* StartDequantizeStream(
    const RpcEnv& env, grpc::CallbackServerContext* context, const grpc::ByteBuffer* request);

using RawQuantizedInference = v1::QuantizedInference::WithRawCallbackMethod_QuantizedMatmul<
    v1::QuantizedInference::WithRawCallbackMethod_QuantizedMatmulStream<
        v1::QuantizedInference::WithRawCallbackMethod_Dequantize<
            v1::QuantizedInference::WithRawCallbackMethod_DequantizeStream<
                v1::QuantizedInference::Service>>>>;

class InferenceService final : public RawQuantizedInference {
 public:
  explicit InferenceService(const RpcEnv& env) : env_(env) {}

  grpc::ServerUnaryReactor* QuantizedMatmul(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) override {
    if (auto* refusal = env_.gate->TurnAway<grpc::ServerUnaryReactor>()) return refusal;
    return StartMatmulCall(env_, context, request, response);
  }
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* QuantizedMatmulStream(
      grpc::CallbackServerContext* context) override {
    using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;
    if (auto* refusal = env_.gate->TurnAway<Reactor>()) return refusal;
    return StartMatmulStream(env_, context);
  }
  grpc::ServerUnaryReactor* Dequantize(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override {
    if (auto* refusal = env_.gate->TurnAway<grpc::ServerUnaryReactor>()) return refusal;
    return StartDequantizeCall(env_, context, request, response);
  }
  grpc::ServerWriteReactor<grpc::ByteBuffer>* DequantizeStream(
      grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) override {
    using Reactor = grpc::ServerWriteReactor<grpc::ByteBuffer>;
    if (auto* refusal = env_.gate->TurnAway<Reactor>()) return refusal;
    return StartDequantizeStream(env_, context, request);
  }

 private:
  const RpcEnv& env_;
};

}  // namespace awqd
