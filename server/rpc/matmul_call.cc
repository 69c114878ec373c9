// QuantizedMatmul: one flow, one Finish.
#include <memory>
#include <utility>

#include "server/rpc/inference_service.h"
#include "server/rpc/matmul_flow.h"
#include "server/rpc/status_grpc.h"

namespace awqd {
namespace {

class MatmulCall final : public grpc::ServerUnaryReactor {
 public:
  MatmulCall(const RpcEnv& env, grpc::CallbackServerContext* context, grpc::ByteBuffer* response)
      : ticket_(env.gate),
        flow_(std::make_shared<MatmulFlow>(
            env, "QuantizedMatmul", DeadlineOf(context->deadline()),
            [this, response](const absl::Status& status, grpc::ByteBuffer answer) {
              response->Swap(&answer);
              Finish(ToGrpc(status));
            })) {}

  // May end with this call deleted; gRPC keeps the pointer it was given valid until then.
  void Start(grpc::ByteBuffer* request) { std::shared_ptr<MatmulFlow>(flow_)->Start(request); }

  void OnCancel() override { flow_->Cancel(); }
  void OnDone() override { delete this; }
  // Else gRPC wakes a thread of its own for every OnDone and OnCancel, so that they may block or
  // take long: as much work as all the rest of a short call. Neither of these does.
  bool InternalInlineable() override { return true; }

 private:
  const CallGate::Ticket ticket_;
  const std::shared_ptr<MatmulFlow> flow_;
};

}  // namespace

grpc::ServerUnaryReactor* StartMatmulCall(const RpcEnv& env, grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* response) {
  auto* call = new MatmulCall(env, context, response);
  call->Start(Mutable(request));
  return call;
}

}  // namespace awqd
