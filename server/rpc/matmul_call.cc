// QuantizedMatmul: one flow, one Finish.
#include <memory>
#include <utility>

#include "server/rpc/inference_service.h"
#include "server/rpc/matmul_flow.h"
#include "server/rpc/status_grpc.h"

namespace awqd {
namespace {

class MatmulCall final : public Reactor {
 public:
  MatmulCall(const RpcEnv& env, UnaryCall* call)
      : ticket_(env.gate),
        flow_(std::make_shared<MatmulFlow>(
            env, "QuantizedMatmul", call->deadline(),
            [call](const absl::Status& status, const grpc::ByteBuffer& answer) {
              status.ok() ? call->Answer(answer) : call->Finish(ToGrpc(status));
            })) {}

  const std::shared_ptr<MatmulFlow>& flow() const { return flow_; }
  void OnCancel() override { flow_->Cancel(); }
  void OnDone() override { delete this; }

 private:
  const CallGate::Ticket ticket_;
  const std::shared_ptr<MatmulFlow> flow_;
};

}  // namespace

void StartMatmulCall(const RpcEnv& env, UnaryCall* call) {
  auto* reactor = new MatmulCall(env, call);
  call->SetReactor(reactor);
  reactor->flow()->Start(call->request());
}

}  // namespace awqd
