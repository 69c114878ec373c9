// Ring: the calls of one client, from its slots to their answers.
//
// Attacker: a client that writes anything anywhere at any time. What it submits is copied once and
// checked; which slots are in flight is known here alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "awqd/ring/layout.h"
#include "kernels/base/mutex.h"
#include "server/ring/memory.h"
#include "server/transport/admission.h"
#include "server/transport/limits.h"

namespace awqd {
struct StreamPoint;
}

namespace awqd::ring {

class Ring;

// An answer tells this of a call that was computed.
struct Outcome {
  std::string kernel, device;
  int64_t queue_us = 0, compute_us = 0;
  int64_t batch_tokens = 0;
  int32_t batch_requests = 0;
  uint32_t path = 0;
  int64_t y_bytes = 0;
};

// A prepared call is run for this: a slot, or a step of a chain.
class Call {
 public:
  Call(const Request& request, absl::Time deadline, std::shared_ptr<Memory> memory,
       transport::CallState* state)
      : request_(request), deadline_(deadline), memory_(std::move(memory)), state_(state) {}
  virtual ~Call() = default;

  const Request& request() const { return request_; }
  absl::Time deadline() const { return deadline_; }
  transport::CallState* state() { return state_; }
  const std::shared_ptr<Memory>& memory() const { return memory_; }
  Outcome* outcome() { return &outcome_; }
  // A step of a chain whose tensors are on a GPU starts behind the step that marks the one, and marks
  // the other for the next step. Else null.
  const std::shared_ptr<StreamPoint>& waits_for() const { return waits_for_; }
  const std::shared_ptr<StreamPoint>& marks() const { return marks_; }
  void SetPoints(std::shared_ptr<StreamPoint> waits_for, std::shared_ptr<StreamPoint> marks) {
    waits_for_ = std::move(waits_for);
    marks_ = std::move(marks);
  }

  // Ends the call, exactly once, on any thread.
  virtual void End(const absl::Status& status) = 0;

 private:
  const Request request_;
  const absl::Time deadline_;
  const std::shared_ptr<Memory> memory_;
  transport::CallState* const state_;
  Outcome outcome_;
  std::shared_ptr<StreamPoint> waits_for_, marks_;
};

// A prepared call. Thread-safe.
class Prepared {
 public:
  virtual ~Prepared() = default;
  virtual transport::Admission::Entry* entry() const = 0;
  // Bytes of one token.
  virtual const PreparedBody& body() const = 0;
  // The region that its activations and its result are in, empty for the payload; nullopt where they
  // are in objects of shared memory, or apart.
  virtual std::optional<std::string> place() const = 0;
  // A point behind one call for the step that follows it in a chain; null where nothing is in a
  // region.
  virtual std::shared_ptr<StreamPoint> MakePoint() const { return nullptr; }
  // Runs the request of an admitted call, which it ends. Returns a function that withdraws it while
  // it has not started; the call still ends.
  virtual std::function<void()> Run(const std::shared_ptr<Call>& call) const = 0;
};
using PreparedPtr = std::shared_ptr<const Prepared>;

// Functions but the constructor are called on the thread of the rings, unless they say otherwise.
class Ring : public std::enable_shared_from_this<Ring> {
 public:
  // `place` is given back with the ring, which lives as long as its calls. `empty`: counts empty
  // calls.
  Ring(std::shared_ptr<Memory> memory, transport::Admission* admission,
       transport::Admission::Entry* empty, transport::RingClient client,
       std::shared_ptr<void> place);

  const std::shared_ptr<Memory>& memory() const { return memory_; }
  // Whom the bytes of prepared calls are charged to.
  transport::Charge charge() const { return {client_.connection}; }

  // Returns the number of the call. RESOURCE_EXHAUSTED when there are kMaxPrepared.
  absl::StatusOr<uint32_t> AddPrepared(PreparedPtr prepared);
  // The prepared call of this number; null: there is none.
  PreparedPtr FindPrepared(uint64_t number) const;
  // NOT_FOUND. Calls in flight go on.
  absl::Status Release(uint64_t number);
  int64_t prepared() const {
    return prepared_count_.load(std::memory_order_relaxed);
  }  // any thread

  // Starts the calls that were submitted. Returns how many. INVALID_ARGUMENT: the client broke the
  // rules of the ring.
  absl::StatusOr<int> TakeSubmissions();
  // Withdraws all calls that have not started, and tells the client.
  void Close();

  static constexpr size_t kMaxPrepared = 1024;

 private:
  class SlotCall;
  struct InFlight {
    bool busy = false;
    std::function<void()> cancel;
  };

  void Start(uint32_t slot);
  absl::Status Begin(SlotCall* call, const PreparedPtr& prepared);
  // On any thread.
  void Answer(SlotCall* call, const absl::Status& status);

  const std::shared_ptr<void> place_;  // given back last
  const std::shared_ptr<Memory> memory_;
  transport::Admission* const admission_;
  transport::Admission::Entry* const empty_;
  const transport::RingClient client_;
  uint32_t head_ = 0;                  // submissions taken
  std::vector<PreparedPtr> prepared_;  // by number - 1; null: released
  std::atomic<int64_t> prepared_count_{0};
  Mutex mu_;
  std::vector<InFlight> in_flight_ ABSL_GUARDED_BY(mu_);  // by slot
};

}  // namespace awqd::ring
