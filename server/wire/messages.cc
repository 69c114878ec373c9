// Parsing small messages, and the Execution of a response.
#include "server/wire/messages.h"

#include "absl/strings/str_cat.h"
#include "server/wire/matmul_wire.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"

namespace awqd::wire {
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

void FillExecution(const engine::ExecutionReport& report, v1::Execution* out) {
  out->set_path(report.path == Path::kFused ? v1::FUSED : v1::DEQUANTIZE);
  out->set_kernel(report.kernel);
  out->set_device(report.device);
  out->set_batch_tokens(report.batch_tokens);
  out->set_batch_requests(report.batch_requests);
  out->set_queue_us(report.queue_us);
  out->set_compute_us(report.compute_us);
}

}  // namespace awqd::wire
