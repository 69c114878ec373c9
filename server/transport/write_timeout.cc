// A list in order of time, and a thread that looks at its front.
#include "server/transport/write_timeout.h"

#include <algorithm>

namespace awqd::transport {
namespace {

// Looks in each timeout: an answer is late by an eighth of it at most.
constexpr int kLooks = 8;

std::chrono::nanoseconds Period(absl::Duration timeout) {
  return absl::ToChronoNanoseconds(
      std::clamp(timeout / kLooks, absl::Milliseconds(1), absl::Seconds(10)));
}

}  // namespace

WriteTimeout::WriteTimeout(absl::Duration timeout)
    : timeout_(absl::ToChronoNanoseconds(timeout)), period_(Period(timeout)) {
  if (timeout != absl::InfiniteDuration()) thread_ = std::thread([this] { Run(); });
}

WriteTimeout::~WriteTimeout() {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    stop_.NotifyAll();
  }
  thread_.join();
}

void WriteTimeout::Begin(Send* send) {
  if (!thread_.joinable()) return;
  const auto until = std::chrono::steady_clock::now() + timeout_;
  MutexLock lock(&mu_);
  send->until_ = until;
  send->watched_ = true;
  send->before_ = last_;
  send->after_ = nullptr;
  (last_ == nullptr ? first_ : last_->after_) = send;
  last_ = send;
}

void WriteTimeout::End(Send* send) {
  if (!thread_.joinable()) return;
  MutexLock lock(&mu_);
  if (send->watched_) Unlink(send);
}

void WriteTimeout::Unlink(Send* send) {
  send->watched_ = false;
  (send->before_ == nullptr ? first_ : send->before_->after_) = send->after_;
  (send->after_ == nullptr ? last_ : send->after_->before_) = send->before_;
}

void WriteTimeout::Run() {
  MutexLock lock(&mu_);
  while (!stopping_) {
    stop_.WaitUntil(&mu_, std::chrono::steady_clock::now() + period_);
    const auto now = std::chrono::steady_clock::now();
    while (first_ != nullptr && first_->until_ <= now) {
      Send* const late = first_;
      Unlink(late);
      late->late_();
    }
  }
}

}  // namespace awqd::transport
