// ProductFlow: one request for products from message to answer, whether it came alone or on a
// stream, in whichever protocol: QuantizedMatmul, GroupedQuantizedMatmul, GatedMlp.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/services/codec.h"
#include "server/services/request_flow.h"
#include "server/services/weight_lookup.h"
#include "server/wire/experts_wire.h"
#include "server/wire/matmul_wire.h"
#include "server/wire/raw_message.h"
#include "server/wire/validation.h"

namespace awqd::services {

// What the flows differ in: messages, source, and how a request becomes a work.
struct MatmulMethod {
  using Request = v1::QuantizedMatmulRequest;
  using Response = v1::QuantizedMatmulResponse;
  using Source = OneWeight;
  using Work = engine::MatmulWork;
  static absl::StatusOr<wire::MatmulJob> Build(Request* request, WeightPtr weight, int64_t max_send,
                                               std::optional<int64_t> cut_bytes);
  // What --int8_activations makes of a request that says nothing of how.
  static void TakeAsInt8(const model::PlacedWeight& weight, Request* request);
};
struct GroupedMatmulMethod {
  using Request = v1::GroupedQuantizedMatmulRequest;
  using Response = v1::GroupedQuantizedMatmulResponse;
  using Source = OneStack;
  using Work = engine::GroupedMatmulWork;
  static constexpr auto Build = wire::BuildGroupedMatmul;
};
struct GatedMlpMethod {
  using Request = v1::GatedMlpRequest;
  using Response = v1::GatedMlpResponse;
  using Source = MlpProjections;
  using Work = engine::GatedMlpWork;
  static constexpr auto Build = wire::BuildGatedMlp;
};

template <typename Method>
class ProductFlow final : public RequestFlow {
 public:
  using Request = typename Method::Request;
  using Source = typename Method::Source;
  using Job = wire::ProductJob<typename Method::Work>;

  ProductFlow(const Env& env, absl::string_view method, transport::ServerCall* call,
              std::unique_ptr<Codec<Request>> codec, Done done);

  absl::string_view request_id() const override;

 private:
  absl::Status Begin(grpc::ByteBuffer* message, const transport::CallGate* gate) override;
  absl::Status OnMessage();
  absl::Status OpenShared();
  absl::Status OnWeights(typename Source::Weights weights);
  absl::StatusOr<engine::Payload> Stage(const Job& job);
  void OnResult(const absl::Status& status, const engine::Payload& result,
                const engine::ExecutionReport& report);
  void Answer(const absl::Status& status, const engine::Payload& result);
  void Log(const absl::Status& status) override {
    LogOf(parsed_.request.request_id(), Source::Name(parsed_.request), status);
  }
  void End(const absl::Status& status) override;
  absl::Status Spelled(const absl::Status& status) const override {
    return codec_->Spelled(status);
  }
  // Frees the request but for what the answer and the log repeat.
  void ForgetRequest();

  // Bytes of the activations, where they are not in parsed_.request.
  std::optional<int64_t> cut_bytes() const;

  const std::unique_ptr<Codec<Request>> codec_;
  Done done_;

  wire::ProductMessage<Request> parsed_;
  SharedRange shared_x_;    // until it was staged
  SharedRange shared_out_;  // until the answer was written there
  std::vector<int64_t> output_shape_;
  DType output_dtype_ = DType::kFp16;
  v1::Encoding encoding_ = v1::RAW;
  grpc::ByteBuffer answer_;
};

using MatmulFlow = ProductFlow<MatmulMethod>;
using GroupedMatmulFlow = ProductFlow<GroupedMatmulMethod>;
using GatedMlpFlow = ProductFlow<GatedMlpMethod>;

// Of awqd.v1.
template <typename Method>
std::unique_ptr<Codec<typename Method::Request>> ApiCodecOf() {
  return std::make_unique<ApiCodec<typename Method::Request, typename Method::Response>>();
}

}  // namespace awqd::services
