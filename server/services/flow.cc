// Whether a flow is wanted, and its one end.
#include "server/services/flow.h"

#include "server/wire/raw_message.h"
#include "server/wire/status.h"

namespace awqd::services {

absl::Status Flow::StillWanted() const {
  if (deadline_ <= absl::Now()) return absl::DeadlineExceededError("the deadline has passed");
  if (slot_.cancelled()) return absl::CancelledError("the client cancelled the call");
  return absl::OkStatus();
}

absl::Status Flow::Open(grpc::ByteBuffer* message, google::protobuf::Message* request) {
  const auto bytes = static_cast<int64_t>(message->Length());
  log_.bytes_in = bytes;
  absl::StatusOr<transport::ByteLease> lease = env_.in_flight->Take(connection_, bytes, "request");
  if (!lease.ok()) {
    message->Clear();
    return lease.status();
  }
  lease_ = *std::move(lease);
  wire::RawMessage raw;
  raw.Take(message);
  if (wire::ParseWhole(raw.pieces(), request)) return absl::OkStatus();
  request->Clear();
  return wire::DoesNotParse(bytes, *request);
}

absl::Status Flow::Submit(std::unique_ptr<engine::Work> work, const engine::SubmitOptions& options,
                          engine::TaskDone done) {
  // Of several blocks, the first: the steps of the request begin with it.
  if (log_.moments.submitted == absl::InfinitePast()) log_.moments.submitted = absl::Now();
  AWQD_ASSIGN_OR_RETURN(engine::TaskHandle handle,
                        env_.engine->Submit(std::move(work), options, std::move(done)));
  slot_.Set(std::move(handle));
  return absl::OkStatus();
}

void Flow::Settle(const absl::Status& status) {
  if (settled_.exchange(true)) return;
  const absl::Status visible = wire::ForClient(status);
  if (obs::LogsRequests()) Log(visible);
  End(visible);
}

}  // namespace awqd::services
