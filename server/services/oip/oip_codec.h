// The codec of the inference protocol: ModelInferRequest in, ModelInferResponse out.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "kernels/base/status.h"
#include "server/services/codec.h"
#include "server/services/env.h"
#include "server/services/oip/found.h"
#include "server/services/request_flow.h"
#include "server/wire/oip/decode.h"
#include "server/wire/oip/encode.h"
#include "server/wire/oip/tensors.h"

namespace awqd::services::oip {

template <typename Request>
class OipCodec final : public Codec<Request> {
 public:
  OipCodec(const Env& env, wire::oip::Frame frame) : env_(env), frame_(frame) {}

  const google::protobuf::Descriptor& type() const override {
    return *inference::ModelInferRequest::descriptor();
  }
  wire::PayloadPlace payload() const override { return wire::oip::kRawInputs; }
  absl::Status Decode(const wire::RawMessage& message,
                      wire::ProductMessage<Request>* out) override {
    AWQD_RETURN_IF_ERROR(wire::oip::Decode(message.pieces(), out, &echo_));
    if (echo_.model_version.empty()) return absl::OkStatus();
    const wire::oip::ModelName name = wire::oip::SplitName(echo_.model_name);
    return FindModel(env_, name.model, echo_.model_version, "model_name").status();
  }
  std::string PeekId(wire::Pieces pieces) const override { return wire::oip::PeekId(pieces); }
  grpc::ByteBuffer Encode(const std::string& id, const engine::ExecutionReport& report,
                          const wire::Answer& answer, engine::StagingPool* staging) override {
    return wire::oip::Encode(echo_, id, report, answer, frame_, staging);
  }
  absl::Status Spelled(const absl::Status& status) const override {
    return wire::oip::Spelled(status);
  }

 private:
  const Env& env_;
  const wire::oip::Frame frame_;
  wire::oip::Echo echo_;
};

// The flow that a ModelInferRequest asks for by the name of its model, of `call`, or of one of many
// on it. Takes nothing out of `message`.
std::shared_ptr<RequestFlow> MakeFlow(const Env& env, absl::string_view method,
                                      transport::ServerCall* call, const grpc::ByteBuffer& message,
                                      wire::oip::Frame frame, RequestFlow::Done done);

}  // namespace awqd::services::oip
