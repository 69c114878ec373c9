// Reply: how a unary call with a small answer ends.
#pragma once

#include "absl/status/status.h"
#include "google/protobuf/message_lite.h"
#include "server/transport/call.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"

namespace awqd::services {

// Ends the call with the message, or with the error as clients may see it.
inline void Reply(transport::UnaryCall* call, const absl::Status& status,
                  const google::protobuf::MessageLite& message) {
  status.ok() ? call->Answer(wire::Encode(message)) : call->Finish(wire::ToGrpc(status));
}

}  // namespace awqd::services
