// QuantizedMatmul: one flow, one Finish.
#include <memory>
#include <utility>

#include "server/services/inference.h"
#include "server/services/matmul_flow.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

class MatmulCall final : public transport::Reactor {
 public:
  MatmulCall(const Env& env, transport::UnaryCall* call)
      : ticket_(env.gate),
        flow_(std::make_shared<MatmulFlow>(
            env, "QuantizedMatmul", call->deadline(),
            [call](const absl::Status& status, const grpc::ByteBuffer& answer) {
              status.ok() ? call->Answer(answer) : call->Finish(wire::ToGrpc(status));
            })) {}

  const std::shared_ptr<MatmulFlow>& flow() const { return flow_; }
  void OnCancel() override { flow_->Cancel(); }
  void OnDone() override { delete this; }

 private:
  const transport::CallGate::Ticket ticket_;
  const std::shared_ptr<MatmulFlow> flow_;
};

}  // namespace

void StartMatmulCall(const Env& env, transport::UnaryCall* call) {
  auto* reactor = new MatmulCall(env, call);
  call->SetReactor(reactor);
  reactor->flow()->Start(call->request());
}

}  // namespace awqd::services
