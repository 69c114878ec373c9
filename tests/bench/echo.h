// EchoService: answers QuantizedMatmul with as many bytes as awqd would, and computes nothing. What
// it reaches is what gRPC leaves to any server of these messages.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "awqd/v1/inference.grpc.pb.h"
#include "awqd/v1/model_repository.grpc.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "grpcpp/support/slice.h"

namespace awqd::bench {

// What an answer depends on.
struct EchoRequest {
  std::string weight;
  v1::DType output_dtype = v1::DTYPE_UNSPECIFIED;
  int64_t tokens = 0;
  int64_t payload_bytes = 0;
};

// Reads the whole message: header fields are parsed, the payload is walked slice by slice. nullopt
// when it is no QuantizedMatmulRequest with a weight by name and raw activations.
std::optional<EchoRequest> ReadRequest(grpc::ByteBuffer& request);

struct EchoShape {
  int64_t k = 0, n = 0;
};
using EchoShapes = std::map<std::string, EchoShape>;  // by the path of the weight, for every model

// The raw callback API: no message is built from the bytes and none is serialised. The other
// methods are callback ones too (unimplemented), so that gRPC starts no threads for synchronous
// ones.
using EchoBase = v1::QuantizedInference::WithRawCallbackMethod_QuantizedMatmul<
    v1::QuantizedInference::WithCallbackMethod_QuantizedMatmulStream<
        v1::QuantizedInference::WithCallbackMethod_Dequantize<
            v1::QuantizedInference::WithCallbackMethod_DequantizeStream<
                v1::QuantizedInference::Service>>>>;

class EchoService final : public EchoBase {
 public:
  // Allocates the payload of the largest answer, which every answer sends a part of.
  EchoService(EchoShapes shapes, int64_t max_answer_bytes);

  grpc::ServerUnaryReactor* QuantizedMatmul(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) override;

  // For QuantizedMatmul and for tests: the bytes of a QuantizedMatmulResponse.
  grpc::Status Answer(grpc::ByteBuffer request, grpc::ByteBuffer* response) const;

 private:
  const EchoShapes shapes_;
  const std::string payload_;
};

// Every model has every weight, so that a client finds the shapes.
class EchoRepository final : public v1::ModelRepository::CallbackService {
 public:
  explicit EchoRepository(EchoShapes shapes);
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;

 private:
  const EchoShapes shapes_;
};

}  // namespace awqd::bench
