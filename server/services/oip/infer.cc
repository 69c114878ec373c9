// ModelInfer and ModelStreamInfer: requests of the inference protocol become requests of awqd.v1 in
// their codec, and are handled as those are. The name of the model says the method; it is read
// before the message is admitted and parsed.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "server/services/call_handlers.h"
#include "server/services/method_handler.h"
#include "server/services/oip/models.h"
#include "server/services/oip/service.h"
#include "server/wire/oip/infer_wire.h"
#include "server/wire/oip/tensors.h"
#include "server/wire/status.h"

namespace awqd::services::oip {
namespace {

using security::Need;
using transport::StreamCall, transport::UnaryCall;

// The surroundings of a request.
struct Context {
  const Env& env;
  const Regions& regions;
  std::string owner;  // whose regions the request may name
  wire::oip::Frame frame;
};

template <typename Request>
class OipCodec final : public Codec<Request> {
 public:
  explicit OipCodec(Context context) : context_(std::move(context)) {}

  const google::protobuf::Descriptor& type() const override {
    return *inference::ModelInferRequest::descriptor();
  }
  wire::PayloadPlace payload() const override { return wire::oip::kRawInputs; }
  absl::Status Decode(const wire::RawMessage& message, wire::ParsedRequest<Request>* out) override {
    AWQD_RETURN_IF_ERROR(wire::oip::Decode(message.pieces(), out, &echo_));
    return ResolveRegions(&out->request);
  }
  // The requested version must be the one that is served.
  absl::Status CheckFound() const override {
    if (echo_.model_version.empty()) return absl::OkStatus();
    const wire::oip::ModelName name = wire::oip::SplitName(echo_.model_name);
    return FindModel(context_.env, name.model, echo_.model_version, "model_name").status();
  }
  std::string PeekId(wire::Pieces pieces) const override { return wire::oip::PeekId(pieces); }
  grpc::ByteBuffer Encode(const std::string& id, const engine::ExecutionReport& report,
                          const wire::Answer& answer, engine::StagingPool* staging) override {
    return wire::oip::Encode(echo_, id, report, answer, context_.frame, staging);
  }
  absl::Status EncodeError(const absl::Status& status) const override {
    return wire::oip::EncodeError(status);
  }

 private:
  // Where shared memory is off, opening it says so.
  absl::Status ResolveRegions(Request* request) const {
    if (context_.env.shared_memory->prefix().empty()) return absl::OkStatus();
    if constexpr (requires { request->mutable_activations(); }) {
      if (request->activations().has_shared_memory()) {
        AWQD_RETURN_IF_ERROR(
            context_.regions.Resolve(context_.owner, "activations.shared_memory",
                                     request->mutable_activations()->mutable_shared_memory()));
      }
    }
    if (!request->has_output_shared_memory()) return absl::OkStatus();
    return context_.regions.Resolve(context_.owner, "output_shared_memory",
                                    request->mutable_output_shared_memory());
  }

  const Context context_;
  wire::oip::Echo echo_;
};

// The message keeps its bytes.
wire::oip::Kind PeekKind(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  if (!message.Valid() || !message.Dump(&slices).ok()) return wire::oip::Kind::kProduct;
  absl::InlinedVector<absl::string_view, 4> pieces;
  for (const grpc::Slice& slice : slices) {
    pieces.emplace_back(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return wire::oip::PeekKind(pieces);
}

// Makes the handler of a message on `call`. Takes nothing out of the message.
std::shared_ptr<RequestHandler> MakeHandler(Context context, absl::string_view method,
                                            transport::ServerCall* call,
                                            const grpc::ByteBuffer& message,
                                            RequestHandler::Done done) {
  const Env& env = context.env;
  const auto make = [&](auto scheme) -> std::shared_ptr<RequestHandler> {
    using Method = decltype(scheme);
    auto codec = std::make_unique<OipCodec<typename Method::Request>>(std::move(context));
    return std::make_shared<MethodHandler<Method>>(env, method, call, std::move(codec),
                                                   std::move(done));
  };
  switch (PeekKind(message)) {
    case wire::oip::Kind::kStack:
      return make(GroupedMatmulMethod());
    case wire::oip::Kind::kMlp:
      return make(GatedMlpMethod());
    case wire::oip::Kind::kDequantize:
      return make(DequantizeMethod());
    case wire::oip::Kind::kProduct:
      break;
  }
  return make(MatmulMethod());
}

// "INVALID_ARGUMENT: inputs[x]...": the protocol has no field for the code.
grpc::ByteBuffer EncodeStreamError(absl::string_view request_id, const absl::Status& status) {
  const absl::Status visible = wire::ForClient(status);
  inference::ModelStreamInferResponse response;
  response.set_error_message(
      absl::StrCat(absl::StatusCodeToString(visible.code()), ": ", visible.message()));
  response.mutable_infer_response()->set_id(std::string(request_id));
  return wire::Encode(response);
}

}  // namespace

void ServeInfer(const Env& env, const std::shared_ptr<Regions>& regions,
                transport::CallLoop* loop) {
  // A burst of callers waits less when it need not be asked for one by one.
  constexpr int kMany = 64, kSome = 8;
  using wire::oip::Frame;
  loop->Serve<UnaryCall>(
      MethodPath("ModelInfer"), Need::kInfer, kMany, [&env, regions](UnaryCall* call) {
        UnaryHandler<UnaryCall>::Start(call, [&](RequestHandler::Done done) {
          return MakeHandler({env, *regions, OwnerName(*call), Frame::kAlone}, "ModelInfer", call,
                             *call->request(), std::move(done));
        });
      });
  loop->Serve<StreamCall>(
      MethodPath("ModelStreamInfer"), Need::kInfer, kSome, [&env, regions](StreamCall* call) {
        StreamProtocol protocol;
        protocol.make_handler = [&env, regions, call](const grpc::ByteBuffer& message,
                                                      RequestHandler::Done done) {
          return MakeHandler({env, *regions, OwnerName(*call), Frame::kOnStream},
                             "ModelStreamInfer", call, message, std::move(done));
        };
        protocol.encode_error = EncodeStreamError;
        protocol.in_order = true;  // clients that send no ids count on it
        HandleStream(env, call, std::move(protocol));
      });
}

}  // namespace awqd::services::oip
