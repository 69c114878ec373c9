// The QuantizedInference service, and its calls of one request for products: one flow, one Finish.
#include <memory>

#include "absl/strings/str_cat.h"
#include "server/services/product_flow.h"
#include "server/services/services.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

using security::Need;

template <typename AnyFlow>
class ProductCall final : public transport::Reactor {
 public:
  ProductCall(const Env& env, absl::string_view method, transport::UnaryCall* call)
      : flow_(std::make_shared<AnyFlow>(
            env, method, call, [call](const absl::Status& status, const grpc::ByteBuffer& answer) {
              status.ok() ? call->Answer(answer) : call->Finish(wire::ToGrpc(status));
            })) {}

  const std::shared_ptr<AnyFlow>& flow() const { return flow_; }
  void OnCancel() override { flow_->Cancel(); }
  void OnDone() override { delete this; }

 private:
  const std::shared_ptr<AnyFlow> flow_;
};

template <typename AnyFlow>
void ServeProduct(const Env& env, absl::string_view method, int slots, transport::CallLoop* loop) {
  loop->Serve<transport::UnaryCall>(absl::StrCat("awqd.v1.QuantizedInference/", method),
                                    Need::kInfer, slots,
                                    [&env, method](transport::UnaryCall* call) {
                                      auto* reactor = new ProductCall<AnyFlow>(env, method, call);
                                      call->SetReactor(reactor);
                                      reactor->flow()->Start(call->request());
                                    });
}

}  // namespace

void ServeInference(const Env& env, transport::CallLoop* loop) {
  using transport::StreamCall, transport::UnaryCall, transport::WriteCall;
  // A burst of callers waits less when it need not be asked for one by one.
  constexpr int kMany = 64, kSome = 8;
  ServeProduct<MatmulFlow>(env, "QuantizedMatmul", kMany, loop);
  ServeProduct<GroupedMatmulFlow>(env, "GroupedQuantizedMatmul", kMany, loop);
  ServeProduct<GatedMlpFlow>(env, "GatedMlp", kMany, loop);
  loop->Serve<StreamCall>("awqd.v1.QuantizedInference/QuantizedMatmulStream", Need::kInfer, kSome,
                          [&env](StreamCall* call) { StartMatmulStream(env, call); });
  loop->Serve<UnaryCall>("awqd.v1.QuantizedInference/Dequantize", Need::kInfer, kSome,
                         [&env](UnaryCall* call) { StartDequantizeCall(env, call); });
  loop->Serve<UnaryCall>("awqd.v1.QuantizedInference/QuantizeKv", Need::kInfer, kSome,
                         [&env](UnaryCall* call) { StartQuantizeKv(env, call); });
  loop->Serve<UnaryCall>("awqd.v1.QuantizedInference/DequantizeKv", Need::kInfer, kSome,
                         [&env](UnaryCall* call) { StartDequantizeKv(env, call); });
  loop->Serve<WriteCall>("awqd.v1.QuantizedInference/DequantizeStream", Need::kInfer, kSome,
                         [&env](WriteCall* call) { StartDequantizeStream(env, call); });
}

}  // namespace awqd::services
