// ModelInferRequest -> requests of awqd.v1, and their results -> ModelInferResponse.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "awqd/v1/inference.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/engine/engine.h"
#include "server/wire/matmul_wire.h"
#include "server/wire/oip/name.h"
#include "server/wire/oip/parameters.h"
#include "server/wire/raw_message.h"

namespace awqd::wire::oip {

// The parts of a request that its answer repeats. They are bounded, because the answer may wait for
// long.
struct Echo {
  std::string model_name;
  std::string model_version;  // as the request has it
  Kind kind = Kind::kProduct;
  v1::SharedMemory output;      // where the answer goes; no name: into the message
  bool execution = false;       // the answer says what ran
  bool final_response = false;  // the answer says that no other follows it
};

// "w" of a weight that is dequantised, "y" of all products.
absl::string_view OutputName(Kind kind);

// Decodes a message that passed ScanFields. The type of the request says for which kind of model:
// QuantizedMatmulRequest, GroupedQuantizedMatmulRequest, GatedMlpRequest or DequantizeRequest. The
// request is then as a client of awqd.v1 would have sent it, and is not checked any further; a
// range of shared memory has the name of a region. INVALID_ARGUMENT names the field of this
// protocol.
template <typename Request>
absl::Status Decode(Pieces pieces, const FieldScan& scan, ParsedRequest<Request>* out, Echo* echo);

// The kind of a message that was not parsed yet; whether its name is one is for Decode to say.
Kind PeekKind(Pieces pieces);
std::string PeekId(Pieces pieces);

// An error about a field of the requests above, in the words of this protocol:
// "activations.shape: ..." -> "inputs[x].shape: ...".
absl::Status EncodeError(const absl::Status& status);

// Whether an answer is a message of its own, or the infer_response of a ModelStreamInferResponse.
enum class Frame { kAlone, kOnStream };

// As wire::Encode: a large raw payload is kept until gRPC has sent it; copies are counted in
// `staging`.
grpc::ByteBuffer Encode(const Echo& echo, const std::string& id,
                        const engine::ExecutionReport& report, const Answer& answer, Frame frame,
                        engine::StagingPool* staging);

}  // namespace awqd::wire::oip
