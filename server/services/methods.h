// The methods of the engine's requests, one scheme each, and how a protocol encodes them.
//
// A method says its messages, how it finds its weights, and how a request becomes a job for the
// engine. MethodHandler takes each request through these steps.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "awqd/v1/inference.pb.h"
#include "google/protobuf/descriptor.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/engine/gated_mlp_work.h"
#include "server/engine/grouped_matmul_work.h"
#include "server/engine/kv4_work.h"
#include "server/services/env.h"
#include "server/services/weight_lookup.h"
#include "server/wire/experts_wire.h"
#include "server/wire/kv_wire.h"
#include "server/wire/matmul_wire.h"
#include "server/wire/raw_message.h"
#include "server/wire/validation.h"

namespace awqd::services {

template <typename Request>
inline constexpr bool kHasActivations = requires(const Request& request) {
  request.activations();
};

template <typename RequestType, typename ResponseType, typename LookupType, typename WorkType>
struct MethodOf {
  using Request = RequestType;
  using Response = ResponseType;
  using Lookup = LookupType;  // weight_lookup.h
  using Weights = typename Lookup::Weights;
  using Work = WorkType;
  using Job = wire::Job<Work>;
  // The thread of the loop that submits the work may run it.
  static constexpr bool kCallerRuns = true;

  // Checks what holds for any weight. `cut_bytes`: of activations that are not in the message.
  static absl::Status Validate(const Request& request, std::optional<int64_t> cut_bytes) {
    if constexpr (kHasActivations<Request>) {
      return wire::CheckRequest(request, cut_bytes);
    } else {
      return wire::CheckRequest(request);
    }
  }
};

// Each has `Build` beside the above: checks a valid request against its weights, and makes the job.
struct MatmulMethod : MethodOf<v1::QuantizedMatmulRequest, v1::QuantizedMatmulResponse,
                               WeightLookup, engine::MatmulWork> {
  static absl::StatusOr<Job> Build(const Env& env, Request* request, Weights weight,
                                   std::optional<int64_t> cut_bytes);
};
struct GroupedMatmulMethod
    : MethodOf<v1::GroupedQuantizedMatmulRequest, v1::GroupedQuantizedMatmulResponse, StackLookup,
               engine::GroupedMatmulWork> {
  static absl::StatusOr<Job> Build(const Env& env, Request* request, Weights stack,
                                   std::optional<int64_t> cut_bytes);
};
struct GatedMlpMethod
    : MethodOf<v1::GatedMlpRequest, v1::GatedMlpResponse, MlpLookup, engine::GatedMlpWork> {
  static absl::StatusOr<Job> Build(const Env& env, Request* request, Weights projections,
                                   std::optional<int64_t> cut_bytes);
};
// A block of a weight, in one answer.
struct DequantizeMethod : MethodOf<v1::DequantizeRequest, v1::DequantizeResponse, WeightLookup,
                                   engine::DequantizeWork> {
  static constexpr bool kCallerRuns = false;
  static absl::StatusOr<Job> Build(const Env& env, Request* request, Weights weight,
                                   std::optional<int64_t> cut_bytes);
};
// The same in chunks, of any size together.
struct DequantizeStreamMethod : DequantizeMethod {
  static absl::Status Validate(const Request& request, std::optional<int64_t> cut_bytes);
  static absl::StatusOr<Job> Build(const Env& env, Request* request, Weights weight,
                                   std::optional<int64_t> cut_bytes);
};
struct QuantizeKvMethod
    : MethodOf<v1::QuantizeKvRequest, v1::QuantizeKvResponse, NoWeight, engine::Kv4StoreWork> {
  static absl::StatusOr<Job> Build(const Env& env, Request* request, Weights none,
                                   std::optional<int64_t> cut_bytes);
};
struct DequantizeKvMethod
    : MethodOf<v1::DequantizeKvRequest, v1::DequantizeKvResponse, NoWeight, engine::Kv4LoadWork> {
  static absl::StatusOr<Job> Build(const Env& env, Request* request, Weights none,
                                   std::optional<int64_t> cut_bytes);
};

// One request of a protocol: its message, its answer, its errors. `Request` is the message of
// awqd.v1 that the method works on, whatever the protocol.
template <typename Request>
class Codec {
 public:
  virtual ~Codec() = default;

  // The type of the messages that come, and where their payload is.
  virtual const google::protobuf::Descriptor& type() const = 0;
  virtual wire::PayloadPlace payload() const = 0;

  // Reads a message that passed wire::ScanFields. When `out->cut` is set, the activations are that
  // range of it; the message then stays until they were staged.
  virtual absl::Status Decode(const wire::RawMessage& message,
                              wire::ParsedRequest<Request>* out) = 0;
  // Called once the weights were found and their model is loaded: further conditions of the
  // protocol.
  virtual absl::Status CheckFound() const { return absl::OkStatus(); }
  // The request's id, of a message that is refused before it was decoded; may be empty.
  virtual std::string PeekId(wire::Pieces pieces) const = 0;

  // The answer on the wire. `id`: as Decode left it in the request.
  virtual grpc::ByteBuffer Encode(const std::string& id, const engine::ExecutionReport& report,
                                  const wire::Answer& answer, engine::StagingPool* staging) = 0;
  // An error in awqd.v1's words in those of the protocol.
  virtual absl::Status EncodeError(const absl::Status& status) const { return status; }
};

// awqd.v1: the requests come as they are.
template <typename Method>
class ApiCodec final : public Codec<typename Method::Request> {
 public:
  using Request = typename Method::Request;
  using Response = typename Method::Response;

  const google::protobuf::Descriptor& type() const override { return *Request::descriptor(); }
  wire::PayloadPlace payload() const override {
    return kHasActivations<Request> ? wire::kActivationsRaw : wire::PayloadPlace{};
  }
  absl::Status Decode(const wire::RawMessage& message, wire::ParsedRequest<Request>* out) override {
    bool parses = false;
    if constexpr (kHasActivations<Request>) {
      parses = wire::ParseScanned(message.pieces(), out);
    } else {
      parses = wire::ParseScanned(message.pieces(), &out->request);
    }
    if (parses) return absl::OkStatus();
    out->request.Clear();
    return wire::DoesNotParse(message.size(), *Request::descriptor());
  }
  std::string PeekId(wire::Pieces pieces) const override {
    return wire::PeekString(pieces, Request::kRequestIdFieldNumber, wire::kMaxPeekedIdBytes);
  }
  grpc::ByteBuffer Encode(const std::string& id, const engine::ExecutionReport& report,
                          const wire::Answer& answer, engine::StagingPool* staging) override {
    Response response;
    wire::FillExecution(report, response.mutable_execution());
    response.set_request_id(id);
    if constexpr (std::is_same_v<Response, v1::QuantizeKvResponse>) {
      wire::Answer codes = answer;
      wire::FillScales(&codes, &response);
      return wire::Encode(response, Response::kCodesFieldNumber, codes, staging);
    } else {
      return wire::Encode(response, Response::kOutputFieldNumber, answer, staging);
    }
  }
};

}  // namespace awqd::services
