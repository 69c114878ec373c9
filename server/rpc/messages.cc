// Parse and reply.
#include "server/rpc/messages.h"

#include "absl/strings/str_cat.h"
#include "server/rpc/matmul_wire.h"
#include "server/rpc/raw_message.h"
#include "server/rpc/status_grpc.h"

namespace awqd {
namespace {

// These messages hold a name or nothing. What a parser makes of one may be many times its size, and
// nothing counts it.
constexpr size_t kMaxBytes = 64 << 10;

}  // namespace

absl::Status Parse(grpc::ByteBuffer* request, google::protobuf::Message* out) {
  if (const size_t bytes = request->Length(); bytes > kMaxBytes) {
    request->Clear();
    return WithField(absl::ResourceExhaustedError(
                         absl::StrCat("request: got ", bytes, " bytes, expected at most ",
                                      kMaxBytes, " for a ", out->GetTypeName())),
                     "request");
  }
  RawMessage raw;
  raw.Take(request);
  if (ParseWhole(raw.pieces(), out)) return absl::OkStatus();
  out->Clear();
  return DoesNotParse(raw.size(), *out);
}

absl::Status DoesNotParse(int64_t bytes, const google::protobuf::Message& expected) {
  return FieldError("request", absl::StrCat(bytes, " bytes that do not parse"),
                    absl::StrCat("a serialized ", expected.GetTypeName(), ", of at most ",
                                 kMaxFields, " fields and without groups"));
}

void Reply(UnaryCall* call, const absl::Status& status,
           const google::protobuf::MessageLite& message) {
  status.ok() ? call->Answer(Encode(message)) : call->Finish(ToGrpc(status));
}

}  // namespace awqd
