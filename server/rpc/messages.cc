// Parse and reply.
#include "server/rpc/messages.h"

#include "absl/strings/str_cat.h"
#include "server/rpc/matmul_wire.h"
#include "server/rpc/raw_message.h"
#include "server/rpc/status_grpc.h"

namespace awqd {

absl::Status Parse(grpc::ByteBuffer* request, google::protobuf::MessageLite* out) {
  RawMessage raw;
  raw.Take(request);
  if (ParseWhole(raw.pieces(), out)) return absl::OkStatus();
  out->Clear();
  return FieldError("request", absl::StrCat(raw.size(), " bytes that do not parse"),
                    absl::StrCat("a serialized ", out->GetTypeName()));
}

void Reply(UnaryCall* call, const absl::Status& status,
           const google::protobuf::MessageLite& message) {
  status.ok() ? call->Answer(Encode(message)) : call->Finish(ToGrpc(status));
}

}  // namespace awqd
