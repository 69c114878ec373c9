// The QuantizedInference service: each method starts a call object that answers by itself.
#pragma once

#include "awqd/v1/inference.grpc.pb.h"
#include "server/rpc/owned_messages.h"
#include "server/rpc/rpc_env.h"

namespace awqd {

// Calls own themselves until gRPC is done with them. `env` outlives the server.
grpc::ServerUnaryReactor* StartMatmulCall(const RpcEnv& env, grpc::CallbackServerContext* context,
                                          const v1::QuantizedMatmulRequest* request,
                                          v1::QuantizedMatmulResponse* response);
grpc::ServerBidiReactor<v1::QuantizedMatmulRequest, v1::QuantizedMatmulResponse>* StartMatmulStream(
    const RpcEnv& env, grpc::CallbackServerContext* context);
grpc::ServerUnaryReactor* StartDequantizeCall(const RpcEnv& env,
                                              grpc::CallbackServerContext* context,
                                              const v1::DequantizeRequest* request,
                                              v1::DequantizeResponse* response);
grpc::ServerWriteReactor<v1::DequantizeChunk>* StartDequantizeStream(
    const RpcEnv& env, grpc::CallbackServerContext* context, const v1::DequantizeRequest* request);

class InferenceService final : public v1::QuantizedInference::CallbackService {
 public:
  explicit InferenceService(const RpcEnv& env) : env_(env) {
    SetMessageAllocatorFor_QuantizedMatmul(&matmul_messages_);
  }

  grpc::ServerUnaryReactor* QuantizedMatmul(grpc::CallbackServerContext* context,
                                            const v1::QuantizedMatmulRequest* request,
                                            v1::QuantizedMatmulResponse* response) override {
    if (auto* refusal = env_.gate->TurnAway<grpc::ServerUnaryReactor>()) return refusal;
    return StartMatmulCall(env_, context, request, response);
  }
  grpc::ServerBidiReactor<v1::QuantizedMatmulRequest, v1::QuantizedMatmulResponse>*
  QuantizedMatmulStream(grpc::CallbackServerContext* context) override {
    using Reactor =
        grpc::ServerBidiReactor<v1::QuantizedMatmulRequest, v1::QuantizedMatmulResponse>;
    if (auto* refusal = env_.gate->TurnAway<Reactor>()) return refusal;
    return StartMatmulStream(env_, context);
  }
  grpc::ServerUnaryReactor* Dequantize(grpc::CallbackServerContext* context,
                                       const v1::DequantizeRequest* request,
                                       v1::DequantizeResponse* response) override {
    if (auto* refusal = env_.gate->TurnAway<grpc::ServerUnaryReactor>()) return refusal;
    return StartDequantizeCall(env_, context, request, response);
  }
  grpc::ServerWriteReactor<v1::DequantizeChunk>* DequantizeStream(
      grpc::CallbackServerContext* context, const v1::DequantizeRequest* request) override {
    using Reactor = grpc::ServerWriteReactor<v1::DequantizeChunk>;
    if (auto* refusal = env_.gate->TurnAway<Reactor>()) return refusal;
    return StartDequantizeStream(env_, context, request);
  }

 private:
  const RpcEnv& env_;
  OwnedMessages<v1::QuantizedMatmulRequest, v1::QuantizedMatmulResponse> matmul_messages_;
};

}  // namespace awqd
