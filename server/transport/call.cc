// The life of a call: requested, arrived, admitted, handled, finished, gone.
#include "server/transport/call.h"

#include <chrono>

#include "absl/time/clock.h"
#include "grpc/support/time.h"
#include "kernels/base/out_of_memory.h"
#include "server/obs/logging.h"
#include "server/transport/call_loop.h"

namespace awqd::transport {
namespace {

// A client has read so much before it acknowledges any of it: HTTP/2's first window.
constexpr size_t kReadAtOnce = 65535;
// An answer of so many bytes may still be on its way when the server stops some time later. A
// status of its own costs less than sending so much takes.
constexpr size_t kTakesLong = 1 << 20;

}  // namespace

ServerCall::ServerCall(Method* method) : responder_(&context_), method_(method) {
  context_.AsyncNotifyWhenDone(ended_.tag());
}

ServerCall::~ServerCall() = default;

absl::string_view ServerCall::method() const { return method_->entry->method(); }

absl::Time ServerCall::deadline() const {
  // Not context_.deadline(), whose nanoseconds since 1970 overflow in the year 2262.
  const gpr_timespec deadline = gpr_convert_clock_type(context_.raw_deadline(), GPR_CLOCK_REALTIME);
  if (gpr_time_cmp(deadline, gpr_inf_future(GPR_CLOCK_REALTIME)) >= 0) {
    return absl::InfiniteFuture();
  }
  return absl::FromUnixSeconds(deadline.tv_sec) + absl::Nanoseconds(deadline.tv_nsec);
}

void ServerCall::Release() {
  if (pending_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  if (reactor_ != nullptr) reactor_->OnDone();
  method_->loop->admission_->RecordEnd(this);
  Method* const method = method_;
  delete this;
  method->loop->CountEnd();
}

void ServerCall::OnArrived(bool ok) {
  Method* const method = method_;
  if (!ok) {  // the server stops; nothing of the call has happened
    delete this;
    method->loop->CountEnd();
    return;
  }
  method->loop->RequestCall(method);
  bool admitted = false;
  const absl::Status checked = CatchExceptions([&] {
    admitted = method->loop->admission_->Admit(this, *method->entry);
    return absl::OkStatus();
  });
  if (!checked.ok()) FinishWith(checked);
  admitted ? Begin() : OnHandlerReturned();
}

void ServerCall::Handle() {
  const absl::Status handled = CatchExceptions([&] {
    method_->handler(this);
    return absl::OkStatus();
  });
  // A handler that throws before there is a reactor has started nothing; reactors catch their own.
  if (!handled.ok() && reactor_ == nullptr) FinishWith(handled);
  OnHandlerReturned();
}

void ServerCall::EndWithoutRequest() {
  absl::Status status = absl::InvalidArgumentError("request: got no message, expected one");
  if (context_.IsCancelled()) status = absl::CancelledError("the client cancelled the call");
  if (deadline() <= absl::Now()) status = absl::DeadlineExceededError("the deadline has passed");
  FinishWith(status);
  OnHandlerReturned();
}

void ServerCall::FinishWith(const absl::Status& status) { Finish(method_->loop->to_grpc_(status)); }

void ServerCall::SetOutcome(grpc::StatusCode outcome) {
  state_.outcome_at = std::chrono::steady_clock::now();
  state_.outcome = outcome;
  method_->loop->admission_->RecordOutcome(this, method_->entry);
}

bool ServerCall::timed() const { return method_->entry->rejected_while_busy(); }

void ServerCall::BeginReceiving() {
  if (timed()) method_->loop->admission_->transit()->receiving.Enter();
}

void ServerCall::EndReceiving(bool ok) {
  if (!timed()) return;
  method_->loop->admission_->transit()->receiving.Leave(state_.arrived_at,
                                                        std::chrono::steady_clock::now(), ok);
}

void ServerCall::BeginSending() {
  sending_ = timed();
  if (sending_) method_->loop->admission_->transit()->sending.Enter();
}

void ServerCall::OnHandlerReturned() {
  if (returned_or_cancelled_.exchange(true)) NotifyCancelled();
  Release();
}

void ServerCall::OnEnded(bool /*ok*/) {
  if (context_.IsCancelled() && returned_or_cancelled_.exchange(true)) NotifyCancelled();
  Release();
}

void ServerCall::NotifyCancelled() {
  if (reactor_ != nullptr) reactor_->OnCancel();
}

void ServerCall::WriteMessage(const grpc::ByteBuffer& message) {
  Retain();
  method_->loop->admission_->write_timeout()->Begin(&write_);
  responder_.Write(message, written_.tag());
}

void ServerCall::OnWritten(bool ok) {
  method_->loop->admission_->write_timeout()->End(&write_);
  OnMessageWritten(ok);
  Release();
}

void ServerCall::WriteAndFinish(const grpc::ByteBuffer& message) {
  method_->loop->admission_->write_timeout()->Begin(&write_);
  responder_.WriteAndFinish(message, grpc::WriteOptions(), grpc::Status::OK, finished_.tag());
}

void ServerCall::SendStatus(const grpc::Status& status) {
  method_->loop->admission_->write_timeout()->Begin(&write_);
  responder_.Finish(status, finished_.tag());
}

void ServerCall::OnFinished(bool ok) {
  Admission* const admission = method_->loop->admission_;
  admission->write_timeout()->End(&write_);
  if (sending_) {
    admission->transit()->sending.Leave(state_.outcome_at, std::chrono::steady_clock::now(), ok);
  }
  Release();
}

// The message is dropped, and the call ends as if its client had cancelled it.
void ServerCall::CancelLateWrite() {
  obs::LogLimited(obs::LogLevel::kWarning,
                  "call cancelled: an answer was not taken in send_timeout_s",
                  {{"method", method()}, {"peer", obs::LogText(peer())}});
  context_.TryCancel();
}

bool ServerCall::stopping() const { return !method_->loop->admission_->drain()->open(); }

void ServerCall::SendStatusOnceRead(const grpc::Status& status) {
  if (!stopping()) return SendStatus(status);
  delayed_ = std::make_unique<Delayed>();
  MutexLock lock(&delayed_->mu);
  delayed_->status = status;
  SetDelay(kRoundTrip);  // in any case: gRPC may not have passed on the last message yet
}

void ServerCall::SetDelay(absl::Duration delay) {
  delayed_->alarm.Set(method_->loop->queue_.get(), absl::ToChronoTime(absl::Now() + delay),
                      delay_over_.tag());
}

void ServerCall::OnDelayed(bool /*ok*/) {
  const absl::Duration left = method_->loop->admission_->StatusDelay(*this);
  grpc::Status status;
  {
    MutexLock lock(&delayed_->mu);
    if (left > absl::ZeroDuration()) return SetDelay(left);
    status = delayed_->status;
  }
  SendStatus(status);
}

void ServerCall::StartAlarm(absl::Duration delay) {
  Retain();
  alarm_.Set(method_->loop->queue_.get(), absl::ToChronoTime(absl::Now() + delay),
             alarm_over_.tag());
}

void ServerCall::OnAlarm(bool /*ok*/) {
  reactor_->OnAlarm();
  Release();
}

void RequestCall::Begin() {
  Retain();
  BeginReceiving();
  responder_.Read(&request_, read_.tag());
}

void RequestCall::OnRequest(bool ok) {
  if (ok) CountReceived(request_);
  EndReceiving(ok);
  ok ? Handle() : EndWithoutRequest();
  Release();
}

void UnaryCall::Answer(const grpc::ByteBuffer& answer) {
  CountSent(answer);
  SetOutcome(grpc::StatusCode::OK);
  BeginSending();
  answer.Length() > (stopping() ? kReadAtOnce : kTakesLong) ? WriteMessage(answer)
                                                            : WriteAndFinish(answer);
}

void UnaryCall::OnMessageWritten(bool /*ok*/) {
  SendStatusOnceRead(grpc::Status::OK);  // to nobody, if the client has gone
}

Charge StreamCall::request_charge() const {
  Charge out = charge();
  out.new_request = true;
  return out;
}

void StreamCall::StartRead(grpc::ByteBuffer* message) {
  Retain();
  message_ = message;
  responder_.Read(message, read_.tag());
}

void StreamCall::OnRead(bool ok) {
  if (ok) CountReceived(*message_);
  reactor()->OnReadDone(ok);
  Release();
}

}  // namespace awqd::transport
