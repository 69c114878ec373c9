// The QuantizedInference service: its methods, and its stream of products.
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/services/call_handlers.h"
#include "server/services/env.h"
#include "server/services/methods.h"
#include "server/transport/call_loop.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

using security::Need;
using transport::StreamCall, transport::UnaryCall, transport::WriteCall;

std::string MethodPath(absl::string_view method) {
  return absl::StrCat("awqd.v1.QuantizedInference/", method);
}

template <typename Method>
void ServeUnary(const Env& env, absl::string_view method, int slots) {
  env.loop->Serve<UnaryCall>(
      MethodPath(method), Need::kInfer, slots, [&env, method](UnaryCall* call) {
        UnaryHandler<UnaryCall>::Start(call, [&](RequestHandler::Done done) {
          return HandlerOf<Method>::Make(env, method, call->request_context(),
                                         std::make_unique<ApiCodec<Method>>(), std::move(done));
        });
      });
  env.admission->RejectWhileBusy(MethodPath(method));
}

// Answers carry the request's id and are sent as soon as they are there.
void HandleMatmulStream(const Env& env, StreamCall* call) {
  StreamProtocol protocol;
  protocol.make_handler = [&env, call](const grpc::ByteBuffer&, RequestHandler::Done done) {
    return HandlerOf<MatmulMethod>::Make(env, "QuantizedMatmulStream", call->request_context(),
                                         std::make_unique<ApiCodec<MatmulMethod>>(),
                                         std::move(done));
  };
  protocol.encode_error = [](absl::string_view request_id, const absl::Status& status) {
    v1::QuantizedMatmulResponse response;
    response.set_request_id(std::string(request_id));
    wire::ToProto(status, response.mutable_error());
    return wire::Encode(response);
  };
  HandleStream(env, call, std::move(protocol));
}

}  // namespace

void ServeInference(const Env& env) {
  // A burst of callers waits less when it need not be asked for one by one.
  constexpr int kMany = 64, kSome = 8;
  ServeUnary<MatmulMethod>(env, "QuantizedMatmul", kMany);
  ServeUnary<GroupedMatmulMethod>(env, "GroupedQuantizedMatmul", kMany);
  ServeUnary<GatedMlpMethod>(env, "GatedMlp", kMany);
  env.loop->Serve<StreamCall>(MethodPath("QuantizedMatmulStream"), Need::kInfer, kSome,
                              [&env](StreamCall* call) { HandleMatmulStream(env, call); });
  ServeUnary<DequantizeMethod>(env, "Dequantize", kSome);
  ServeUnary<QuantizeKvMethod>(env, "QuantizeKv", kSome);
  ServeUnary<DequantizeKvMethod>(env, "DequantizeKv", kSome);
  env.loop->Serve<WriteCall>(MethodPath("DequantizeStream"), Need::kInfer, kSome,
                             [&env](WriteCall* call) {
                               UnaryHandler<WriteCall>::Start(call, [&](RequestHandler::Done done) {
                                 return MakeDequantizeStreamHandler(env, call, std::move(done));
                               });
                             });
}

}  // namespace awqd::services
