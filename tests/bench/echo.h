// EchoService: answers QuantizedMatmul with as many bytes as awqd would, and computes nothing. Its
// rate is the limit of gRPC for any server of these messages.
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

// The properties of a request that determine its answer.
struct EchoRequest {
  std::string weight;
  v1::DType output_dtype = v1::DTYPE_UNSPECIFIED;
  int64_t tokens = 0;
  int64_t payload_bytes = 0;
};

// Reads the whole message: parses the header fields and visits the payload slice by slice. Returns
// nullopt for anything but a QuantizedMatmulRequest with a weight by name and raw activations.
std::optional<EchoRequest> ReadRequest(grpc::ByteBuffer& request);

struct EchoShape {
  int64_t k = 0, n = 0;
};
using EchoShapes = std::map<std::string, EchoShape>;  // by the path of the weight, for every model

// The raw callback API builds no message from the bytes and serialises none. The other methods are
// callback methods too (unimplemented), so that gRPC starts no threads for synchronous ones.
using EchoBase = v1::QuantizedInference::WithRawCallbackMethod_QuantizedMatmul<
    v1::QuantizedInference::WithCallbackMethod_QuantizedMatmulStream<
        v1::QuantizedInference::WithCallbackMethod_Dequantize<
            v1::QuantizedInference::WithCallbackMethod_DequantizeStream<
                v1::QuantizedInference::Service>>>>;

class EchoService final : public EchoBase {
 public:
  // Allocates the payload of the largest answer; every answer sends a part of it.
  EchoService(EchoShapes shapes, int64_t max_answer_bytes);

  grpc::ServerUnaryReactor* QuantizedMatmul(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) override;

  // The bytes of a QuantizedMatmulResponse, for QuantizedMatmul and for tests.
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
