// Whether a request is wanted, the bytes that it holds, and its one end.
#include "server/services/request_handler.h"

#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/wire/matmul_wire.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

// Parsing so much takes a fraction of a millisecond.
constexpr int64_t kLargeBytes = int64_t{1} << 20;

}  // namespace

RequestHandler::RequestHandler(const Env& env, absl::string_view method,
                               transport::RequestContext call)
    : env_(env),
      deadline_(call.deadline),
      notes_(call.notes),
      span_(call.span),
      charge_(std::move(call.charge)),
      identity_(std::move(call.identity)) {
  log_.method = method;
}

RequestHandler::~RequestHandler() {
  if (use_ != nullptr) CountOutcome();
}

void RequestHandler::Start(grpc::ByteBuffer* message, const transport::Drain* drain) {
  const auto self = shared_from_this();  // the answer may come, and the call end, before we return
  const absl::Status status = CatchExceptions([&] { return Begin(message, drain); });
  if (status.ok()) return;
  message->Clear();  // when it was not even looked at
  EndRequest(status);
}

void RequestHandler::HoldError(int64_t bytes) {
  if (!lease_.Resize(bytes, "error").ok()) lease_.ShrinkTo(0);
  UpdateHeldBytes();
}

absl::Status RequestHandler::CheckStillWanted() const {
  if (deadline_ <= absl::Now()) return absl::DeadlineExceededError("the deadline has passed");
  if (slot_.cancelled()) return absl::CancelledError("the client cancelled the call");
  return absl::OkStatus();
}

// Memory is asked for before anything is parsed or copied: gRPC holds the message by now, but
// nothing more has been spent on it.
absl::Status RequestHandler::AdmitMessage(grpc::ByteBuffer* message,
                                          const google::protobuf::Descriptor& type,
                                          wire::PayloadPlace payload) {
  const auto bytes = static_cast<int64_t>(message->Length());
  const int64_t limit = env_.options.transport.max_receive_message_bytes;
  log_.bytes_in = bytes;
  message_.TakeSlices(message);
  if (bytes > limit) {
    return wire::WithField(absl::ResourceExhaustedError(
                               absl::StrCat("request: got ", bytes, " bytes, expected at most ",
                                            limit, " (the server's max_receive_message_bytes)")),
                           "request");
  }
  AWQD_ASSIGN_OR_RETURN(lease_, env_.in_flight->AcquireBytes(charge_, bytes, "request"));
  AWQD_ASSIGN_OR_RETURN(scan_, wire::CheckFields(message_.pieces(), type, payload));
  return lease_.Grow(scan_.parsed_bytes, "request, once it is parsed");
}

bool RequestHandler::is_large() const { return scan_.parsed_bytes > kLargeBytes; }

absl::StatusOr<engine::Payload> RequestHandler::PrepareToSend(const engine::Payload& result,
                                                              int64_t* extra) {
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

absl::Status RequestHandler::Submit(std::unique_ptr<engine::Work> work,
                                    engine::SubmitOptions options, engine::TaskDone done) {
  // Only the first of several blocks: the timestamps of the request begin with it.
  if (log_.timestamps.submitted == absl::InfinitePast()) log_.timestamps.submitted = absl::Now();
  options.call = span_;
  options.to_send = env_.admission->transit()->sending.Expect(std::chrono::steady_clock::now());
  if (use_ == nullptr && !work->weights().empty()) use_ = work->weights().front()->statistics;
  AWQD_ASSIGN_OR_RETURN(engine::TaskHandle handle,
                        env_.engine->Submit(std::move(work), options, std::move(done)));
  slot_.Set(std::move(handle));
  return absl::OkStatus();
}

void RequestHandler::CountUse(const absl::Status& status) {
  constexpr auto kOrder = std::memory_order_relaxed;
  const int64_t took = absl::ToInt64Nanoseconds(absl::Now() - started_);
  (status.ok() ? use_->succeeded : use_->refused).fetch_add(1, kOrder);
  (status.ok() ? use_->succeeded_ns : use_->refused_ns).fetch_add(took, kOrder);
}

void RequestHandler::CountOutcome() const {
  const bool computed = report_.batch_id > 0;
  std::atomic<int64_t>& count = succeeded_ && !slot_.cancelled() ? use_->in_time
                                : computed                       ? use_->lost
                                                                 : use_->not_computed;
  count.fetch_add(1, std::memory_order_relaxed);
  if (!computed || deadline_ == absl::InfiniteFuture()) return;
  const bool in_time = &count == &use_->in_time;
  // A client that cancels long before its deadline did not wait for the answer.
  const bool near_deadline = absl::Now() > deadline_ - (deadline_ - started_) / 4;
  if (in_time || near_deadline) env_.engine->RecordAnswer(in_time);
}

void RequestHandler::EndRequest(const absl::Status& status) {
  if (ended_.exchange(true)) return;
  if (!status.ok()) message_.Free();
  succeeded_ = status.ok();
  if (use_ != nullptr) CountUse(status);
  const absl::Status visible = wire::ForClient(EncodeError(status));
  if (obs::LogsRequests()) LogEnd(visible);
  SendEnd(visible);
}

void RequestHandler::KeepNames(absl::string_view request_id, LogName name) {
  if (!obs::LogsRequests()) return;
  // One byte more than a log shows of a name, so that it says what was cut. A client may send
  // megabytes, and the handler stays until its answer is taken.
  constexpr size_t kLoggedBytes = 257;
  log_.request_id = std::string(request_id.substr(0, kLoggedBytes));
  log_.model = std::string(name.model.substr(0, kLoggedBytes));
  log_.weight = std::string(name.weight.substr(0, kLoggedBytes));
}

void RequestHandler::LogEnd(const absl::Status& status) {
  log_.queue_us = report_.queue_us;
  log_.compute_us = report_.compute_us;
  log_.kernel = report_.kernel;
  log_.batch = {report_.batch_id, report_.batch_tokens, report_.batch_requests,
                std::move(report_.batch_calls)};
  log_.timestamps.begun = started_;
  log_.timestamps.settled = absl::Now();
  log_.total_us = absl::ToInt64Microseconds(log_.timestamps.settled - started_);
  obs::LogRequest(log_, status);
  notes_->AddRequest(log_);
}

}  // namespace awqd::services
