// The codec of the inference protocol: ModelInferRequest in, ModelInferResponse out.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "kernels/base/status.h"
#include "server/services/codec.h"
#include "server/services/env.h"
#include "server/services/oip/models.h"
#include "server/services/oip/regions.h"
#include "server/services/request_flow.h"
#include "server/wire/oip/infer_wire.h"
#include "server/wire/oip/encode.h"
#include "server/wire/oip/tensors.h"

namespace awqd::services::oip {

// What a request comes with, beside its message.
struct Context {
  const Env& env;
  const Regions& regions;
  std::string owner;  // of the regions that the request may name
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
  absl::Status Decode(const wire::RawMessage& message,
                      wire::ProductMessage<Request>* out) override {
    AWQD_RETURN_IF_ERROR(wire::oip::Decode(message.pieces(), out, &echo_));
    return ResolveRegions(&out->request);
  }
  // The version that is asked for is the one that is served.
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
  absl::Status Spelled(const absl::Status& status) const override {
    return wire::oip::Spelled(status);
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

// The flow that a ModelInferRequest asks for by the name of its model, of `call`, or of one of many
// on it. Takes nothing out of `message`.
std::shared_ptr<RequestFlow> MakeFlow(Context context, absl::string_view method,
                                      transport::ServerCall* call, const grpc::ByteBuffer& message,
                                      RequestFlow::Done done);

}  // namespace awqd::services::oip
