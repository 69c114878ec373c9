// The QuantizedInference service, and its calls of one request for products: one flow, one Finish.
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/services/methods.h"
#include "server/services/method_handler.h"
#include "server/services/call_handlers.h"
#include "server/services/services.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

using security::Need;

template <typename Method>
void ServeProduct(const Env& env, absl::string_view method, int slots, transport::CallLoop* loop) {
  loop->Serve<transport::UnaryCall>(
      absl::StrCat("awqd.v1.QuantizedInference/", method), Need::kInfer, slots,
      [&env, method](transport::UnaryCall* call) {
        FlowCall::Start(call, [&](RequestFlow::Done done) {
          return std::make_shared<ProductFlow<Method>>(env, method, call, ApiCodecOf<Method>(),
                                                       std::move(done));
        });
      });
}

void StartDequantize(const Env& env, transport::UnaryCall* call) {
  FlowCall::Start(call, [&](RequestFlow::Done done) {
    return std::make_shared<DequantizeFlow>(
        env, "Dequantize", call,
        std::make_unique<ApiCodec<v1::DequantizeRequest, v1::DequantizeResponse>>(),
        std::move(done));
  });
}

// Answers carry the request's id and come as they are there.
void StartMatmulStream(const Env& env, transport::StreamCall* call) {
  StreamProtocol protocol;
  protocol.make_flow = [&env, call](const grpc::ByteBuffer&, RequestFlow::Done done) {
    return std::make_shared<MatmulFlow>(env, "QuantizedMatmulStream", call,
                                        ApiCodecOf<MatmulMethod>(), std::move(done));
  };
  protocol.error = [](absl::string_view request_id, const absl::Status& status) {
    v1::QuantizedMatmulResponse response;
    response.set_request_id(std::string(request_id));
    wire::ToProto(status, response.mutable_error());
    return wire::Encode(response);
  };
  StartRequestStream(env, call, std::move(protocol));
}

}  // namespace

void ServeInference(const Env& env, transport::CallLoop* loop) {
  using transport::StreamCall, transport::UnaryCall, transport::WriteCall;
  // A burst of callers waits less when it need not be asked for one by one.
  constexpr int kMany = 64, kSome = 8;
  ServeProduct<MatmulMethod>(env, "QuantizedMatmul", kMany, loop);
  ServeProduct<GroupedMatmulMethod>(env, "GroupedQuantizedMatmul", kMany, loop);
  ServeProduct<GatedMlpMethod>(env, "GatedMlp", kMany, loop);
  loop->Serve<StreamCall>("awqd.v1.QuantizedInference/QuantizedMatmulStream", Need::kInfer, kSome,
                          [&env](StreamCall* call) { StartMatmulStream(env, call); });
  loop->Serve<UnaryCall>("awqd.v1.QuantizedInference/Dequantize", Need::kInfer, kSome,
                         [&env](UnaryCall* call) { StartDequantize(env, call); });
  loop->Serve<UnaryCall>("awqd.v1.QuantizedInference/QuantizeKv", Need::kInfer, kSome,
                         [&env](UnaryCall* call) { StartQuantizeKv(env, call); });
  loop->Serve<UnaryCall>("awqd.v1.QuantizedInference/DequantizeKv", Need::kInfer, kSome,
                         [&env](UnaryCall* call) { StartDequantizeKv(env, call); });
  loop->Serve<WriteCall>("awqd.v1.QuantizedInference/DequantizeStream", Need::kInfer, kSome,
                         [&env](WriteCall* call) { StartDequantizeStream(env, call); });
}

}  // namespace awqd::services
