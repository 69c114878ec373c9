// Takes slots, starts calls, writes answers.
#include "server/ring/ring.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"

namespace awqd::ring {
namespace {

// As clients read it: the steady clock of Linux is CLOCK_MONOTONIC.
int64_t Nanoseconds() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

absl::string_view TraceparentOf(const Request& request) {
  return {request.traceparent, strnlen(request.traceparent, sizeof(request.traceparent))};
}

// Appends to the text of an answer, as far as it has room. Returns the bytes.
uint32_t AppendText(absl::string_view text, size_t at, Answer* answer) {
  const size_t bytes = std::min(text.size(), kMaxTextBytes - at);
  std::memcpy(answer->text + at, text.data(), bytes);
  return static_cast<uint32_t>(bytes);
}

// `now`: of the same clock. Both are positive, so that the difference cannot overflow.
absl::Time DeadlineOf(const Request& request, int64_t now) {
  if (request.deadline == 0) return absl::InfiniteFuture();
  if (request.deadline < 0) return absl::InfinitePast();
  return absl::Now() + absl::Nanoseconds(request.deadline - now);
}

}  // namespace

// The call of a slot, until its answer. Counts as in flight (transport::Drain) until it is
// destroyed.
class Ring::SlotCall final : public Call {
 public:
  SlotCall(std::shared_ptr<Ring> ring, uint32_t slot, const Request& request,
           transport::Admission::Entry* entry, int64_t received)
      : Call(request, DeadlineOf(request, received), ring->memory_, &state_),
        ring_(std::move(ring)),
        slot_(slot),
        entry_(entry),
        received_(received) {}

  void End(const absl::Status& status) override { ring_->Answer(this, status); }

 private:
  friend class Ring;

  const std::shared_ptr<Ring> ring_;
  const uint32_t slot_;
  transport::Admission::Entry* const entry_;
  const int64_t received_;
  transport::CallState state_;
};

Ring::Ring(std::shared_ptr<Memory> memory, transport::Admission* admission,
           transport::Admission::Entry* empty, transport::RingClient client,
           std::shared_ptr<void> place)
    : place_(std::move(place)),
      memory_(std::move(memory)),
      admission_(admission),
      empty_(empty),
      client_(std::move(client)),
      in_flight_(memory_->slots()) {}

absl::StatusOr<uint32_t> Ring::AddPrepared(PreparedPtr prepared) {
  auto free = std::find(prepared_.begin(), prepared_.end(), nullptr);
  if (free == prepared_.end()) {
    if (prepared_.size() >= kMaxPrepared) {
      return absl::ResourceExhaustedError(
          absl::StrCat("prepared calls: got one more, expected at most ", kMaxPrepared,
                       " of a ring; release some first"));
    }
    prepared_.push_back(nullptr);
    free = prepared_.end() - 1;
  }
  *free = std::move(prepared);
  prepared_count_.fetch_add(1, std::memory_order_relaxed);
  return static_cast<uint32_t>(free - prepared_.begin()) + 1;
}

PreparedPtr Ring::FindPrepared(uint64_t number) const {
  return number == 0 || number > prepared_.size() ? nullptr : prepared_[number - 1];
}

absl::Status Ring::Release(uint64_t number) {
  if (FindPrepared(number) == nullptr) {
    return absl::NotFoundError(absl::StrCat("call: got ", number, ", expected a prepared one"));
  }
  prepared_[number - 1] = nullptr;
  prepared_count_.fetch_sub(1, std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::StatusOr<int> Ring::TakeSubmissions() {
  const uint32_t slots = memory_->slots();
  const uint32_t submitted = memory_->header()->tail.load() - head_;
  if (submitted > slots) {
    return absl::InvalidArgumentError(
        absl::StrCat("tail: got ", submitted, " slots submitted, expected at most ", slots));
  }
  for (uint32_t i = 0; i < submitted; ++i, ++head_) {
    const uint32_t slot =
        memory_->header()->submissions[head_ % slots].load(std::memory_order_relaxed);
    if (slot >= slots) {
      return absl::InvalidArgumentError(
          absl::StrCat("submissions: got slot ", slot, ", expected 0 to ", slots - 1));
    }
    {
      MutexLock lock(&mu_);
      if (std::exchange(in_flight_[slot].busy, true)) {
        return absl::InvalidArgumentError(
            absl::StrCat("submissions: got slot ", slot, ", which is in flight, expected another"));
      }
    }
    Start(slot);
  }
  return static_cast<int>(submitted);
}

void Ring::Start(uint32_t slot) {
  // Without memory for a call, its client would wait for ever: the process ends.
  [&]() noexcept {
    const Request request = memory_->ReadRequest(slot);
    const PreparedPtr prepared = FindPrepared(request.call);
    const auto call =
        std::make_shared<SlotCall>(shared_from_this(), slot, request,
                                   prepared == nullptr ? empty_ : prepared->entry(), Nanoseconds());
    const absl::Status begun = CatchExceptions([&] { return Begin(call.get(), prepared); });
    if (!begun.ok() || prepared == nullptr) return Answer(call.get(), begun);
    std::function<void()> cancel = prepared->Run(call);
    MutexLock lock(&mu_);
    // It may have ended by now, but the slot has no other call: those begin on this thread.
    if (in_flight_[slot].busy) in_flight_[slot].cancel = std::move(cancel);
  }();
}

absl::Status Ring::Begin(SlotCall* call, const PreparedPtr& prepared) {
  const Request& request = call->request();
  AWQD_RETURN_IF_ERROR(admission_->AdmitRingCall(&call->state_, *call->entry_, client_,
                                                 call->deadline(), TraceparentOf(request)));
  if (request.call != 0 && prepared == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("call: got ", request.call, ", expected the number of a prepared call"));
  }
  if (call->deadline() <= absl::Now()) {
    return absl::DeadlineExceededError("the deadline has passed");
  }
  return absl::OkStatus();
}

void Ring::Answer(SlotCall* call, const absl::Status& status) {
  admission_->RecordRingOutcome(&call->state_, call->entry_, status.code());
  const Outcome& outcome = *call->outcome();
  ring::Answer& answer = memory_->slot(call->slot_)->answer;
  answer.status = static_cast<uint32_t>(status.code());
  answer.sequence = call->request().sequence;
  answer.received = call->received_;
  answer.queue_us = outcome.queue_us;
  answer.compute_us = outcome.compute_us;
  answer.batch_tokens = outcome.batch_tokens;
  answer.batch_requests = outcome.batch_requests;
  answer.path = outcome.path;
  answer.y_bytes = status.ok() ? outcome.y_bytes : 0;
  uint32_t bytes = AppendText(status.ok() ? outcome.kernel : status.message(), 0, &answer);
  answer.kernel_bytes = status.ok() ? bytes : 0;
  if (status.ok()) bytes += AppendText(outcome.device, bytes, &answer);
  answer.text_bytes = bytes;
  answer.answered = Nanoseconds();
  std::function<void()> cancel;  // destroyed without the lock, because it owns the handler
  {
    MutexLock lock(&mu_);
    in_flight_[call->slot_].busy = false;
    cancel.swap(in_flight_[call->slot_].cancel);
  }
  memory_->ShowAnswer(call->slot_);
  admission_->RecordRingEnd(&call->state_, *call->entry_);
}

void Ring::Close() {
  memory_->SetClosed();
  std::vector<std::function<void()>> cancels;
  {
    MutexLock lock(&mu_);
    for (const InFlight& call : in_flight_) {
      if (call.cancel) cancels.push_back(call.cancel);
    }
  }
  for (const std::function<void()>& cancel : cancels) cancel();
  prepared_.clear();
}

}  // namespace awqd::ring
