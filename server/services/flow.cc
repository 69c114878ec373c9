// Whether a flow is wanted, and its one end.
#include "server/services/flow.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/wire/matmul_wire.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

// Parsing so much takes a fraction of a millisecond.
constexpr int64_t kHeavyBytes = int64_t{1} << 20;

}  // namespace

absl::Status Flow::StillWanted() const {
  if (deadline_ <= absl::Now()) return absl::DeadlineExceededError("the deadline has passed");
  if (slot_.cancelled()) return absl::CancelledError("the client cancelled the call");
  return absl::OkStatus();
}

// Memory is asked for before anything is parsed or copied: gRPC holds the message by now, but
// nothing more has been spent on it.
absl::Status Flow::Admit(grpc::ByteBuffer* message, const google::protobuf::Descriptor& type,
                         wire::PayloadPlace payload) {
  const auto bytes = static_cast<int64_t>(message->Length());
  const int64_t limit = env_.options.transport.max_receive_message_bytes;
  log_.bytes_in = bytes;
  message_.Take(message);
  if (bytes > limit) {
    return wire::WithField(absl::ResourceExhaustedError(
                               absl::StrCat("request: got ", bytes, " bytes, expected at most ",
                                            limit, " (the server's max_receive_message_bytes)")),
                           "request");
  }
  AWQD_ASSIGN_OR_RETURN(lease_, env_.in_flight->Take(connection_, bytes, "request"));
  AWQD_ASSIGN_OR_RETURN(parsed_bytes_, wire::ParsedBytes(message_.pieces(), type, payload));
  return lease_.Grow(parsed_bytes_, "request, once it is parsed");
}

bool Flow::parsed_elsewhere() const { return parsed_bytes_ > kHeavyBytes; }

absl::Status Flow::Parse(std::function<absl::Status()> parse) {
  if (!parsed_elsewhere()) return parse();
  return env_.parsings->Run([this, self = shared_from_this(), parse = std::move(parse)] {
    Try([&]() -> absl::Status {
      AWQD_RETURN_IF_ERROR(StillWanted());
      return parse();
    });
  });
}

absl::Status Flow::Open(grpc::ByteBuffer* message, google::protobuf::Message* request,
                        std::function<absl::Status()> then) {
  AWQD_RETURN_IF_ERROR(Admit(message, *request->GetDescriptor()));
  return Parse([this, request, then = std::move(then)]() -> absl::Status {
    const bool parses = wire::ParseSifted(message_.pieces(), request);
    message_.Free();
    if (!parses) {
      request->Clear();
      return wire::DoesNotParse(message_.size(), *request->GetDescriptor());
    }
    lease_.ShrinkTo(std::max(message_.size(), parsed_bytes_));
    return then();
  });
}

absl::Status Flow::AdmitPacked(const wire::PackedSize& size) {
  AWQD_RETURN_IF_ERROR(wire::CheckPrepared(size, env_.options.max_inline_weight_bytes));
  return lease_.Grow(size.decoded + size.prepared + size.plans,
                     "packed, once it is decoded and prepared");
}

absl::StatusOr<engine::Payload> Flow::ToBeSent(const engine::Payload& result, int64_t* extra) {
  const int64_t others = result.kept_size() - result.size();
  // Small ones are copied when they are encoded.
  if (result.size() < wire::kSendInPlaceBytes || others == 0) return result;
  if (lease_.GrowFromSpare(others)) {
    *extra = others;
    return result;
  }
  AWQD_ASSIGN_OR_RETURN(engine::Payload copy, env_.engine->staging().Get(result.size()));
  std::memcpy(copy.data(), result.data(), result.size());
  env_.engine->staging().CountCopy(result.size());
  return copy;
}

absl::Status Flow::Submit(std::unique_ptr<engine::Work> work, engine::SubmitOptions options,
                          engine::TaskDone done) {
  // Of several blocks, the first: the steps of the request begin with it.
  if (log_.timestamps.submitted == absl::InfinitePast()) log_.timestamps.submitted = absl::Now();
  options.call = span_;
  if (use_ == nullptr && !work->weights().empty()) use_ = work->weights().front()->use;
  AWQD_ASSIGN_OR_RETURN(engine::TaskHandle handle,
                        env_.engine->Submit(std::move(work), options, std::move(done)));
  slot_.Set(std::move(handle));
  return absl::OkStatus();
}

void Flow::Count(const absl::Status& status) {
  constexpr auto kOrder = std::memory_order_relaxed;
  const int64_t took = absl::ToInt64Nanoseconds(absl::Now() - started_);
  (status.ok() ? use_->succeeded : use_->refused).fetch_add(1, kOrder);
  (status.ok() ? use_->succeeded_ns : use_->refused_ns).fetch_add(took, kOrder);
}

void Flow::Settle(const absl::Status& status) {
  if (settled_.exchange(true)) return;
  if (!status.ok()) message_.Free();
  if (use_ != nullptr) Count(status);
  const absl::Status visible = wire::ForClient(Spelled(status));
  if (obs::LogsRequests()) Log(visible);
  End(visible);
}

}  // namespace awqd::services
