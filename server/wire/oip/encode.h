// Results -> ModelInferResponse.
#pragma once

#include <string>

#include "grpcpp/support/byte_buffer.h"
#include "server/engine/engine.h"
#include "server/wire/oip/infer_wire.h"
#include "server/wire/raw_message.h"

namespace awqd::wire::oip {

// Whether an answer is a message of its own, or the infer_response of a ModelStreamInferResponse.
enum class Frame { kAlone, kOnStream };

// As wire::Encode: a large raw payload is kept until gRPC has sent it; copies are counted in
// `staging`.
grpc::ByteBuffer Encode(const Echo& echo, const std::string& id,
                        const engine::ExecutionReport& report, const Answer& answer, Frame frame,
                        engine::StagingPool* staging);

}  // namespace awqd::wire::oip
