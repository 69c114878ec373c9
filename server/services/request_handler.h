// RequestHandler: one request from message to answer, alone in a call or one of many on a stream.
// Here is what all methods share: whether the call is still wanted, its part of the bytes in
// flight, its end, and its line in the log. MethodHandler does what depends on the method.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "google/protobuf/message.h"
#include "grpcpp/support/byte_buffer.h"
#include "kernels/base/mutex.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"
#include "server/engine/engine.h"
#include "server/obs/call_record.h"
#include "server/obs/logging.h"
#include "server/services/env.h"
#include "server/services/weight_lookup.h"
#include "server/transport/call.h"
#include "server/transport/drain.h"
#include "server/transport/limits.h"
#include "server/wire/raw_message.h"

namespace awqd::services {

// The task of a call that is in flight, and whether the call was cancelled. Thread-safe.
class TaskSlot {
 public:
  // A cancel that came before the handle did is applied to it at once.
  void Set(engine::TaskHandle handle) {
    {
      MutexLock lock(&mu_);
      if (!cancelled_) {
        handle_ = std::move(handle);
        return;
      }
    }
    handle.Cancel();
  }
  void Cancel() {
    engine::TaskHandle handle;
    {
      MutexLock lock(&mu_);
      cancelled_ = true;
      handle = handle_;
    }
    handle.Cancel();
  }
  bool cancelled() const {
    MutexLock lock(&mu_);
    return cancelled_;
  }

 private:
  mutable Mutex mu_;
  engine::TaskHandle handle_ ABSL_GUARDED_BY(mu_);
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
};

// Its owner keeps it until the answer was sent. Its part of Env::in_flight is given back with it.
class RequestHandler : public std::enable_shared_from_this<RequestHandler> {
 public:
  // Called exactly once, on any thread, possibly before Start returns. `answer` is the message to
  // send when the status is OK; it is empty where OnWritten sends the answer in chunks.
  using Done = std::function<void(const absl::Status&, grpc::ByteBuffer answer)>;

  virtual ~RequestHandler();

  // Takes the bytes out of `message`. Never blocks. `drain`: for a message on a stream, which is
  // UNAVAILABLE once the server drains; a call of its own was admitted.
  void Start(grpc::ByteBuffer* message, const transport::Drain* drain = nullptr);
  // Withdraws work that has not started; the request still ends.
  void Cancel() { slot_.Cancel(); }
  // A chunk of the answer was written, or not because the client is gone.
  virtual void OnWritten(bool /*ok*/) {}

  // Whether the message is so large that Env::parsings parses it. Known once Start has returned.
  bool is_large() const;
  // From `done` on. Empty when the client sent none, or one that is too long to be echoed.
  virtual absl::string_view request_id() const = 0;
  // Bytes of the request and its answer, those that are expected included. Thread-safe.
  int64_t held_bytes() const { return held_bytes_.load(std::memory_order_relaxed); }
  // Within `done`, for a request that was refused: its error holds so many bytes from here on.
  // Nothing is held where the budget has no room for them.
  void HoldError(int64_t bytes);

 protected:
  // `method` names the request in the log. Its call lives until the request has ended.
  RequestHandler(const Env& env, absl::string_view method, transport::RequestContext call);

  // --- Steps of a method ---
  virtual absl::Status Begin(grpc::ByteBuffer* message, const transport::Drain* drain) = 0;
  // A status in the words of the request's protocol.
  virtual absl::Status EncodeError(const absl::Status& status) const = 0;
  // Called once, with the status as clients may see it.
  virtual void SendEnd(const absl::Status& status) = 0;

  // --- Parts of the steps ---
  // DEADLINE_EXCEEDED or CANCELLED when nobody waits for the answer any more.
  absl::Status CheckStillWanted() const;
  // Takes the bytes out of `message`, and from the budget their number and what they will take
  // when they are parsed. RESOURCE_EXHAUSTED over the receive limit.
  absl::Status AdmitMessage(grpc::ByteBuffer* message, const google::protobuf::Descriptor& type,
                            wire::PayloadPlace payload);
  // Submits to the engine, until Cancel. `done` may be called before this returns.
  absl::Status Submit(std::unique_ptr<engine::Work> work, engine::SubmitOptions options,
                      engine::TaskDone done);
  // The result as it is sent. Results of a batch share a buffer, and one that is sent from there
  // keeps all of it until its client has read it. `*extra` is the size of the others' results,
  // which is counted as well while the budget has plenty; else the result is copied.
  absl::StatusOr<engine::Payload> PrepareToSend(const engine::Payload& result, int64_t* extra);

  // Runs `body`; an error or an exception ends the request.
  template <typename F>
  void RunGuarded(F&& body) {
    if (absl::Status status = CatchExceptions(std::forward<F>(body)); !status.ok()) {
      EndRequest(status);
    }
  }
  // `step` for another thread, where it runs if the request is still wanted by then.
  template <typename F>
  std::function<void()> Later(F step) {
    return [this, self = shared_from_this(), step] {
      RunGuarded([&]() -> absl::Status {
        AWQD_RETURN_IF_ERROR(CheckStillWanted());
        return step();
      });
    };
  }
  // Ends the request, if nothing has yet.
  void EndRequest(const absl::Status& status);
  bool ended() const { return ended_.load(); }
  // Keeps these for the line in the log, if that is wanted.
  void KeepNames(absl::string_view request_id, LogName name);
  // After each change of the lease.
  void UpdateHeldBytes() { held_bytes_.store(lease_.bytes(), std::memory_order_relaxed); }

  const Env& env_;
  absl::Time deadline_;  // the call's, or an earlier one that the request names
  obs::CallAnnotations* const notes_;
  const obs::SpanRef span_;         // the call's; none where it is not traced
  const transport::Charge charge_;  // of its bytes
  const security::IdentityPtr identity_;
  const absl::Time started_ = absl::Now();
  TaskSlot slot_;
  transport::ByteLease lease_;
  wire::RawMessage message_;  // until it was parsed, and its payload staged
  wire::FieldScan scan_;      // of an admitted message
  engine::ExecutionReport report_;
  obs::RequestLog log_;

 private:
  // Writes the line in the log, and the call's notes.
  void LogEnd(const absl::Status& status);
  void CountUse(const absl::Status& status);
  // Counts the request, once its answer was sent or could not be.
  void CountOutcome() const;

  // The statistics of the model whose weights the work reads; null: it reads none, or there was
  // no work.
  std::shared_ptr<model::ModelStatistics> use_;
  std::atomic<bool> ended_{false};
  bool succeeded_ = false;  // once it has ended
  std::atomic<int64_t> held_bytes_{0};
};

}  // namespace awqd::services
