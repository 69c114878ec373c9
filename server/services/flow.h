// Flow: what the ways of a product and of a Dequantize through the services share: whether the
// call is still wanted, its share of the bytes in flight, its weight, its end and its line in the
// log.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "google/protobuf/message.h"
#include "grpcpp/support/byte_buffer.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status.h"
#include "server/engine/engine.h"
#include "server/obs/call_record.h"
#include "server/services/env.h"
#include "server/services/sources.h"
#include "server/transport/byte_budget.h"
#include "server/transport/call.h"
#include "server/transport/guard.h"
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

// Holds its share of Env::in_flight until it is destroyed. Messages and errors are spelled by the
// flow's codec, in whose protocol it was asked for.
class Flow : public std::enable_shared_from_this<Flow> {
 public:
  // Withdraws what has not started; the flow still ends.
  void Cancel() { slot_.Cancel(); }
  // Whether the message is so large, parsed, that another thread than the caller's parses it. Known
  // once the flow was started.
  bool parsed_elsewhere() const;

 protected:
  // `method` names the flow in the log. `call` is the one that it is of, or one of many of, and
  // lives until the flow has ended.
  Flow(const Env& env, absl::string_view method, transport::ServerCall* call)
      : env_(env),
        deadline_(call->deadline()),
        notes_(call->notes()),
        span_(call->span()),
        connection_(call->connection()) {
    log_.method = method;
  }
  ~Flow() = default;

  // DEADLINE_EXCEEDED or CANCELLED when there is no point in going on.
  absl::Status StillWanted() const;

  // Takes the bytes out of `message`, and from the budget their number and what they will take when
  // they are parsed. RESOURCE_EXHAUSTED over the receive limit.
  absl::Status Admit(grpc::ByteBuffer* message, const google::protobuf::Descriptor& type,
                     wire::PayloadPlace payload = {});
  // Runs `parse` and what follows it: here, or on a worker where an admitted message is so large
  // that it would hold a thread of the loop up.
  absl::Status Parse(std::function<absl::Status()>
                         parse);  // Admits and parses a message whole, then goes on with `then`.
  absl::Status Open(grpc::ByteBuffer* message, google::protobuf::Message* request,
                    std::function<absl::Status()> then);

  // Calls then(weights) once with the weights of the request's source, loaded ones at once, inline
  // ones and those of a model that sleeps from a worker thread; or returns an error, or settles.
  // The request must live until then. Inline weights are packed only if the call is still wanted
  // when its turn has come: packing takes long, and a call that has ended while it waited would
  // take the time of those behind it.
  template <typename Source, typename Request, typename Then>
  absl::Status WithWeights(const Request& request, Then then) {
    if (!request.has_packed()) {
      absl::StatusOr<typename Source::Weights> weights = Source::Find(env_, request);
      if (weights.ok()) return then(*std::move(weights));
      const std::string model = Source::Name(request).model;
      if (!env_.models->Asleep(model)) return weights.status();
      return env_.waking->Wake(
          model, [this, self = shared_from_this(), &request, then](const absl::Status& woken) {
            Try([&]() -> absl::Status {
              AWQD_RETURN_IF_ERROR(woken);
              AWQD_RETURN_IF_ERROR(StillWanted());
              AWQD_ASSIGN_OR_RETURN(typename Source::Weights weights, Source::Find(env_, request));
              return then(std::move(weights));
            });
          });
    }
    AWQD_RETURN_IF_ERROR(Source::Check(env_, request.packed()));
    return env_.packings->Run([this, self = shared_from_this(), &request, then] {
      Try([&]() -> absl::Status {
        AWQD_RETURN_IF_ERROR(StillWanted());
        AWQD_ASSIGN_OR_RETURN(const wire::PackedSize size,
                              wire::MeasurePacked(request.packed(), env_.engine->device().info()));
        AWQD_RETURN_IF_ERROR(AdmitPacked(size));
        AWQD_ASSIGN_OR_RETURN(typename Source::Weights weights,
                              Source::Pack(env_, request.packed()));
        lease_.ShrinkTo(lease_.bytes() - size.decoded);
        return then(std::move(weights));
      });
    });
  }

  // The result as it is sent. Results of a batch share a buffer, and one that is sent from there
  // keeps all of it until its client has read it: that much is counted as well while there is
  // plenty, and `*extra` says how much; else the result is copied.
  absl::StatusOr<engine::Payload> ToBeSent(const engine::Payload& result, int64_t* extra);

  // Takes from the budget what inline weights become, before they do.
  absl::Status AdmitPacked(const wire::PackedSize& size);

  // To the engine, until Cancel. `done` may be called before this returns.
  absl::Status Submit(std::unique_ptr<engine::Work> work, engine::SubmitOptions options,
                      engine::TaskDone done);

  // Runs `body`; an error or an exception ends the flow.
  template <typename F>
  void Try(F&& body) {
    if (absl::Status status = transport::Guarded(std::forward<F>(body)); !status.ok()) {
      Settle(status);
    }
  }
  // Ends the flow, if nothing has yet.
  void Settle(const absl::Status& status);
  bool settled() const { return settled_.load(); }
  // A status in the words of the request's protocol.
  virtual absl::Status Spelled(const absl::Status& status) const { return status; }
  // Both with the status as clients may see it, once: first the line in the log, if it is wanted.
  virtual void Log(const absl::Status& status) = 0;
  virtual void End(const absl::Status& status) = 0;

  // `name`: as the request's source has it.
  void LogOf(const std::string& request_id, LogName name, const absl::Status& status) {
    // One byte more than a log shows of a name, so that it says what was cut. A client may send
    // megabytes, and the flow stays until its answer is taken.
    constexpr size_t kLoggedBytes = 257;
    log_.request_id = request_id.substr(0, kLoggedBytes);
    log_.model = std::move(name.model);
    log_.weight = std::move(name.weight);
    for (std::string* text : {&log_.model, &log_.weight}) {
      if (text->size() > kLoggedBytes) *text = text->substr(0, kLoggedBytes);  // frees the rest
    }
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

  const Env& env_;
  absl::Time deadline_;  // the call's, or an earlier one that the request names
  obs::CallAnnotations* const notes_;
  const obs::SpanRef span_;  // the call's; none where it is not traced
  const std::shared_ptr<transport::Connection> connection_;
  const absl::Time started_ = absl::Now();
  TaskSlot slot_;
  transport::ByteLease lease_;
  wire::RawMessage message_;  // until it was parsed, and its payload staged
  int64_t parsed_bytes_ = 0;  // of an admitted message
  engine::ExecutionReport report_;
  obs::RequestLog log_;

 private:
  void Count(const absl::Status& status);

  // Of the model whose weights the request's work reads; null: of none, or it made no work.
  std::shared_ptr<model::ModelUse> use_;
  std::atomic<bool> settled_{false};
};

}  // namespace awqd::services
