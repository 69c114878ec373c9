// The methods of the engine's requests, one description each; how a protocol encodes them; and the
// handlers of requests.
//
// A method says its messages, how it finds its weights, and how a request becomes a job for the
// engine. method_handler.cc takes each request through these steps.
#pragma once

#include <memory>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "awqd/v1/inference.pb.h"
#include "google/protobuf/descriptor.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/engine/experts_work.h"
#include "server/engine/kv4_work.h"
#include "server/services/env.h"
#include "server/services/request_handler.h"
#include "server/services/weight_lookup.h"
#include "server/transport/call.h"
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
};

using MatmulMethod = MethodOf<v1::QuantizedMatmulRequest, v1::QuantizedMatmulResponse, WeightLookup,
                              engine::MatmulWork>;
using GroupedMatmulMethod =
    MethodOf<v1::GroupedQuantizedMatmulRequest, v1::GroupedQuantizedMatmulResponse, StackLookup,
             engine::GroupedMatmulWork>;
using GatedMlpMethod =
    MethodOf<v1::GatedMlpRequest, v1::GatedMlpResponse, MlpLookup, engine::GatedMlpWork>;
using DequantizeMethod =
    MethodOf<v1::DequantizeRequest, v1::DequantizeResponse, WeightLookup, engine::DequantizeWork>;
using QuantizeKvMethod =
    MethodOf<v1::QuantizeKvRequest, v1::QuantizeKvResponse, NoWeight, engine::Kv4StoreWork>;
using DequantizeKvMethod =
    MethodOf<v1::DequantizeKvRequest, v1::DequantizeKvResponse, NoWeight, engine::Kv4LoadWork>;

// One request of a protocol: its message, its answer, its errors. `Request` is the message of
// awqd.v1 that the method works on, whatever the protocol.
template <typename Request>
class Codec {
 public:
  virtual ~Codec() = default;

  // The type of the messages that come, and where their payload is.
  virtual const google::protobuf::Descriptor& type() const = 0;
  virtual wire::PayloadPlace payload() const = 0;

  // Reads a message whose scan passed. When `out->cut` is set, the activations are that
  // range of it; the message then stays until they were staged.
  virtual absl::Status Decode(const wire::RawMessage& message, const wire::FieldScan& scan,
                              wire::ParsedRequest<Request>* out) = 0;
  // The memory that a range of the request names, as Regions::Open.
  virtual absl::StatusOr<SharedRange> Open(const Env& env, const std::string& owner,
                                           const v1::SharedMemory& range,
                                           SharedMemory::Access access,
                                           absl::string_view field) const {
    return env.regions->Open(owner, range, access, field);
  }
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
  absl::Status Decode(const wire::RawMessage& message, const wire::FieldScan& scan,
                      wire::ParsedRequest<Request>* out) override {
    if (wire::ParseScanned(message.pieces(), scan, out)) return absl::OkStatus();
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

// Makes the handler of a request of `call`, of one of the methods above. `name` names the method in
// the log. RequestHandler says when `done` is called.
template <typename Method>
struct HandlerOf {
  static std::shared_ptr<RequestHandler> Make(
      const Env& env, absl::string_view name, transport::RequestContext call,
      std::unique_ptr<Codec<typename Method::Request>> codec, RequestHandler::Done done);
  // Checks a request whose activations, of `input_bytes`, lie outside of it: by itself, and against
  // its loaded weights. Returns the form of its answer.
  static absl::StatusOr<wire::AnswerForm> Check(const Env& env, typename Method::Request request,
                                                int64_t input_bytes);
};
// The handler of DequantizeStream: answers in chunks of rows. A chunk is computed only after the
// one before was written, so a client that reads slowly costs one chunk of memory.
std::shared_ptr<RequestHandler> MakeDequantizeStreamHandler(const Env& env,
                                                            transport::WriteCall* call,
                                                            RequestHandler::Done done);

}  // namespace awqd::services
