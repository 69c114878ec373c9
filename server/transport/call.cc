// The life of a call: asked for, taken, handled, finished, gone.
#include "server/transport/call.h"

#include <chrono>

#include "absl/time/clock.h"
#include "server/transport/call_loop.h"
#include "server/transport/door.h"
#include "server/transport/guard.h"

namespace awqd::transport {

ServerCall::ServerCall(MethodBase* method) : method_(method) {
  context_.AsyncNotifyWhenDone(&ended_);
}

ServerCall::~ServerCall() = default;

absl::string_view ServerCall::method() const { return method_->entry()->method(); }

absl::Time ServerCall::deadline() const {
  const std::chrono::system_clock::time_point deadline = context_.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  return absl::FromChrono(deadline);
}

void ServerCall::Release() {
  if (pending_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  if (reactor_ != nullptr) reactor_->OnDone();
  method_->loop()->door_->Gone(this);
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
  const absl::Status handled = Guarded([&] {
    method->Receive(this);
    if (method->loop()->door_->Enter(this, *method->entry())) method->Handle(this);
    return absl::OkStatus();
  });
  // What throws before there is a reactor has started nothing; reactors guard what they do.
  if (!handled.ok() && reactor_ == nullptr) Finish(method->loop()->to_grpc_(handled));
  HandlerReturned();
}

void ServerCall::Leave(grpc::StatusCode outcome) {
  left_ = std::chrono::steady_clock::now();
  outcome_ = outcome;
  method_->loop()->door_->Leave(*this, method_->entry(), outcome);
}

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

void ServerCall::SendBegins() { method_->loop()->door_->sends()->Begin(&send_); }

void ServerCall::SendEnds() { method_->loop()->door_->sends()->End(&send_); }

// What was to be sent is dropped, and the call ends as one that its client has cancelled.
void ServerCall::NotTaken() {
  method_->loop()->door_->NotTaken(*this);
  context_.TryCancel();
}

void ServerCall::FinishIn(absl::Duration delay, const grpc::Status& status) {
  if (delay <= absl::ZeroDuration()) return Finish(status);
  delayed_ = std::make_unique<Delayed>();
  MutexLock lock(&delayed_->mu);
  delayed_->status = status;
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
  grpc::Status status;
  {
    MutexLock lock(&delayed_->mu);
    status = delayed_->status;
  }
  Finish(status);
}

}  // namespace awqd::transport
