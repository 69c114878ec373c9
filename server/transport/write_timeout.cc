// A list in order of time, and a thread that polls its front.
#include "server/transport/write_timeout.h"

#include <algorithm>

namespace awqd::transport {
namespace {

// Polls in each timeout: a write is ended an eighth of it too late at most.
constexpr int kPolls = 8;

std::chrono::nanoseconds Period(absl::Duration timeout) {
  return absl::ToChronoNanoseconds(
      std::clamp(timeout / kPolls, absl::Milliseconds(1), absl::Seconds(10)));
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

void WriteTimeout::Begin(Write* write) {
  if (!thread_.joinable()) return;
  const auto until = std::chrono::steady_clock::now() + timeout_;
  MutexLock lock(&mu_);
  write->until_ = until;
  write->watched_ = true;
  write->before_ = last_;
  write->after_ = nullptr;
  (last_ == nullptr ? first_ : last_->after_) = write;
  last_ = write;
}

void WriteTimeout::End(Write* write) {
  if (!thread_.joinable()) return;
  MutexLock lock(&mu_);
  if (write->watched_) Unlink(write);
}

void WriteTimeout::Unlink(Write* write) {
  write->watched_ = false;
  (write->before_ == nullptr ? first_ : write->before_->after_) = write->after_;
  (write->after_ == nullptr ? last_ : write->after_->before_) = write->before_;
}

void WriteTimeout::Run() {
  MutexLock lock(&mu_);
  while (!stopping_) {
    stop_.WaitUntil(&mu_, std::chrono::steady_clock::now() + period_);
    const auto now = std::chrono::steady_clock::now();
    while (first_ != nullptr && first_->until_ <= now) {
      Write* const late = first_;
      Unlink(late);
      late->late_();
    }
  }
}

}  // namespace awqd::transport
