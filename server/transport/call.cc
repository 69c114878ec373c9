// The life of a call: asked for, taken, handled, finished, gone.
#include "server/transport/call.h"

#include "absl/time/clock.h"
#include "grpc/support/time.h"
#include "server/transport/call_loop.h"
#include "server/transport/admission.h"
#include "server/transport/guard.h"

namespace awqd::transport {

ServerCall::ServerCall(MethodBase* method) : method_(method) {
  context_.AsyncNotifyWhenDone(&ended_);
}

ServerCall::~ServerCall() = default;

absl::string_view ServerCall::method() const { return method_->entry()->method(); }

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
  method_->loop()->admission_->Gone(this);
  MethodBase* const method = method_;
  delete this;
  method->Gone();
}

void ServerCall::OnTaken(bool ok) {
  MethodBase* const method = method_;
  if (!ok) {  // the server stops; nothing of the call has happened
    delete this;
    method->Gone();
    return;
  }
  method->Ask();
  bool let_in = false;
  const absl::Status entered = Guarded([&] {
    let_in = method->loop()->admission_->Enter(this, *method->entry());
    return absl::OkStatus();
  });
  if (!entered.ok()) Finish(method->loop()->to_grpc_(entered));
  let_in ? Begin() : HandlerReturned();
}

void ServerCall::Handle() {
  const absl::Status handled = Guarded([&] {
    const PaidBy paid_by(client_request_, false);
    method_->Handle(this);
    return absl::OkStatus();
  });
  // What throws before there is a reactor has started nothing; reactors guard what they do.
  if (!handled.ok() && reactor_ == nullptr) Finish(method_->loop()->to_grpc_(handled));
  HandlerReturned();
}

void ServerCall::EndWithoutRequest() {
  absl::Status status = absl::InvalidArgumentError("request: got no message, expected one");
  if (context_.IsCancelled()) status = absl::CancelledError("the client cancelled the call");
  if (deadline() <= absl::Now()) status = absl::DeadlineExceededError("the deadline has passed");
  Finish(method_->loop()->to_grpc_(status));
  HandlerReturned();
}

void ServerCall::Leave(grpc::StatusCode outcome) {
  left_ = std::chrono::steady_clock::now();
  outcome_ = outcome;
  method_->loop()->admission_->Leave(this, method_->entry(), outcome);
}

void ServerCall::Refuse(const absl::Status& status) { Finish(method_->loop()->to_grpc_(status)); }

void ServerCall::HandlerReturned() {
  if (one_of_two_.exchange(true)) Cancelled();
  Release();
}

void ServerCall::OnEnded(bool /*ok*/) {
  if (context_.IsCancelled() && one_of_two_.exchange(true)) Cancelled();
  Release();
}

void ServerCall::Cancelled() {
  if (reactor_ != nullptr) reactor_->OnCancel();
}

void ServerCall::OnFinished(bool /*ok*/) {
  SendEnds();
  Release();
}

void ServerCall::SendBegins() { method_->loop()->admission_->sends()->Begin(&send_); }

void ServerCall::SendEnds() { method_->loop()->admission_->sends()->End(&send_); }

// What was to be sent is dropped, and the call ends as one that its client has cancelled.
void ServerCall::NotTaken() {
  method_->loop()->admission_->NotTaken(*this);
  context_.TryCancel();
}

bool ServerCall::stopping() const { return !method_->loop()->admission_->drain()->open(); }

void ServerCall::SendOnceRead(const grpc::Status& status) {
  if (!stopping()) return SendLast(status);
  delayed_ = std::make_unique<Delayed>();
  MutexLock lock(&delayed_->mu);
  delayed_->status = status;
  Delay(kRoundTrip);  // however still it is: gRPC may not have passed on the last message yet
}

void ServerCall::Delay(absl::Duration delay) {
  delayed_->alarm.Set(method_->loop()->queue_.get(), absl::ToChronoTime(absl::Now() + delay),
                      static_cast<Event*>(&delay_over_));
}

void ServerCall::StartAlarm(absl::Duration delay) {
  Retain();
  alarm_.Set(method_->loop()->queue_.get(), absl::ToChronoTime(absl::Now() + delay),
             static_cast<Event*>(&alarm_over_));
}

void ServerCall::OnAlarm(bool /*ok*/) {
  reactor_->OnAlarm();
  Release();
}

void ServerCall::OnDelayed(bool /*ok*/) {
  const absl::Duration left = method_->loop()->admission_->LastWords(*this);
  grpc::Status status;
  {
    MutexLock lock(&delayed_->mu);
    if (left > absl::ZeroDuration()) return Delay(left);
    status = delayed_->status;
  }
  SendLast(status);
}

}  // namespace awqd::transport
