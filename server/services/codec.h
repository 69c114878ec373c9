// Codec: how a protocol spells what a flow takes and gives. Two protocols share a flow; all that
// they differ in is here.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "google/protobuf/descriptor.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/engine/engine.h"
#include "server/wire/matmul_wire.h"
#include "server/wire/raw_message.h"

namespace awqd::services {

// Of one request, from message to answer. `Request` is the message of awqd.v1 that the flow works
// on, whatever the protocol.
template <typename Request>
class Codec {
 public:
  virtual ~Codec() = default;

  // The type of the messages that come, and what of them is left where it lies.
  virtual const google::protobuf::Descriptor& type() const = 0;
  virtual wire::PayloadPlace payload() const = 0;

  // Reads a message that wire::Sift let through. When `out->cut` is set, the activations are that
  // range of it; the message then stays until they were staged.
  virtual absl::Status Decode(const wire::RawMessage& message,
                              wire::ProductMessage<Request>* out) = 0;
  // Once the weights were found, and a model that slept is awake: what the protocol asks beyond.
  virtual absl::Status CheckFound() const { return absl::OkStatus(); }
  // The request's id, of a message that is refused before it was decoded; may be empty.
  virtual std::string PeekId(wire::Pieces pieces) const = 0;

  // The answer on the wire. `id`: as Decode left it in the request.
  virtual grpc::ByteBuffer Encode(const std::string& id, const engine::ExecutionReport& report,
                                  const wire::Answer& answer, engine::StagingPool* staging) = 0;

  // An error of awqd.v1's words in those of the protocol.
  virtual absl::Status Spelled(const absl::Status& status) const { return status; }
};

// awqd.v1's own: `Request` is what comes.
template <typename Request, typename Response>
class ApiCodec final : public Codec<Request> {
 public:
  const google::protobuf::Descriptor& type() const override { return *Request::descriptor(); }
  wire::PayloadPlace payload() const override {
    return kHasActivations ? wire::kActivationsRaw : wire::PayloadPlace{};
  }
  absl::Status Decode(const wire::RawMessage& message,
                      wire::ProductMessage<Request>* out) override {
    bool parses = false;
    if constexpr (kHasActivations) {
      parses = wire::ParseSifted(message.pieces(), out);
    } else {
      parses = wire::ParseSifted(message.pieces(), &out->request);
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
    return wire::Encode(response, Response::kOutputFieldNumber, answer, staging);
  }

 private:
  static constexpr bool kHasActivations = requires(const Request& request) {
    request.activations();
  };
};

}  // namespace awqd::services
