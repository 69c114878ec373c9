// QuantizedMatmul: one flow, one Finish.
#include <memory>

#include "server/rpc/inference_service.h"
#include "server/rpc/matmul_flow.h"
#include "server/rpc/status_grpc.h"

namespace awqd {
namespace {

class MatmulCall final : public grpc::ServerUnaryReactor {
 public:
  MatmulCall(const RpcEnv& env, grpc::CallbackServerContext* context,
             v1::QuantizedMatmulRequest* request, v1::QuantizedMatmulResponse* response)
      : ticket_(env.gate),
        flow_(std::make_shared<MatmulFlow>(
            env, "QuantizedMatmul", request, response, DeadlineOf(context->deadline()),
            [this](const absl::Status& status) { Finish(ToGrpc(status)); })) {}

  // May end with this call deleted; gRPC keeps the pointer it was given valid until then.
  void Start() { std::shared_ptr<MatmulFlow>(flow_)->Start(); }

  void OnCancel() override { flow_->Cancel(); }
  void OnDone() override { delete this; }

 private:
  const CallGate::Ticket ticket_;
  const std::shared_ptr<MatmulFlow> flow_;
};

}  // namespace

grpc::ServerUnaryReactor* StartMatmulCall(const RpcEnv& env, grpc::CallbackServerContext* context,
                                          const v1::QuantizedMatmulRequest* request,
                                          v1::QuantizedMatmulResponse* response) {
  auto* call = new MatmulCall(env, context, Mutable(request), response);
  call->Start();
  return call;
}

}  // namespace awqd
