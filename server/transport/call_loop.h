// CallLoop: the threads that empty gRPC's completion queue, run handlers, and compute what these
// leave to be computed.
//
// A thread of the loop takes every event that is there, and only then runs what the handlers
// submitted to the engine: so requests that come together are multiplied together, and one wakeup
// reads, computes and answers all of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "grpcpp/server_builder.h"
#include "kernels/base/mutex.h"
#include "server/transport/call.h"

namespace awqd::transport {

class CallLoop;

// One method of a service.
class MethodBase {
 public:
  explicit MethodBase(CallLoop* loop) : loop_(loop) {}
  virtual ~MethodBase() = default;
  // Asks gRPC for one more call.
  virtual void Ask() = 0;
  // Runs the handler.
  virtual void Handle(ServerCall* call) = 0;
  // A call that was asked for is no more.
  void Gone();
  // The loop's.
  grpc::CompletionQueue* queue() const;
  grpc::Status ToGrpc(const absl::Status& status) const;

 protected:
  CallLoop* const loop_;
};

class CallLoop {
 public:
  // The queue is the builder's server's. `run_queued` does what Engine::RunQueued does; null where
  // that runs nothing, so that no thread looks for company in vain. `to_grpc` spells what a handler
  // threw.
  CallLoop(grpc::ServerBuilder* builder, int threads, std::function<bool()> run_queued,
           std::function<grpc::Status(const absl::Status&)> to_grpc);
  // Stops.
  ~CallLoop();

  // Before Start. `service` is one of gRPC's asynchronous ones and `ask` its RequestX for a raw
  // method; of every call, `handler` is told, on a thread of the loop. As many as `slots` calls may
  // come at once without waiting to be asked for.
  template <typename Call, typename Service, typename Ask, typename Handler>
  void Serve(int slots, Service* service, Ask ask, Handler handler);

  // Once the server listens.
  void Start();
  // Returns when every call is gone and the threads have ended. The server was shut down, or never
  // came up.
  void Stop();

  // True on a thread of a loop that runs what is queued: it then calls run_queued before it sleeps.
  // The caller is about to submit something.
  static bool WillRunQueued();

 private:
  friend class MethodBase;
  template <typename Call>
  friend class Method;

  void Run();
  // Handles one event without waiting for it; `more`: there was one. False when the queue has
  // ended.
  bool TakeOne(bool* more);

  const int threads_wanted_;
  const std::function<bool()> run_queued_;
  const std::function<grpc::Status(const absl::Status&)> to_grpc_;
  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::vector<std::pair<std::unique_ptr<MethodBase>, int>> methods_;  // and their slots
  std::atomic<int64_t> calls_{0};                                     // asked for or in progress
  Mutex mu_;
  CondVar none_left_;
  std::vector<std::thread> threads_;
};

template <typename Call>
class Method final : public MethodBase {
 public:
  using AskFor = std::function<void(Call* call, grpc::ServerCompletionQueue* queue, void* tag)>;
  using Handler = std::function<void(Call*)>;

  Method(CallLoop* loop, AskFor ask, Handler handler)
      : MethodBase(loop), ask_(std::move(ask)), handler_(std::move(handler)) {}

  void Ask() override {
    loop_->calls_.fetch_add(1, std::memory_order_relaxed);
    auto* call = new Call(this);
    ask_(call, loop_->queue_.get(), static_cast<Event*>(&call->taken_));
  }
  void Handle(ServerCall* call) override { handler_(static_cast<Call*>(call)); }

  template <typename Service, typename RequestMethod>
  static AskFor For(Service* service, RequestMethod request_method) {
    return [=](Call* call, grpc::ServerCompletionQueue* queue, void* tag) {
      if constexpr (!std::is_same_v<Call, StreamCall>) {
        (service->*request_method)(&call->context_, &call->request_, &call->responder_, queue,
                                   queue, tag);
      } else {
        (service->*request_method)(&call->context_, &call->responder_, queue, queue, tag);
      }
    };
  }

 private:
  const AskFor ask_;
  const Handler handler_;
};

template <typename Call, typename Service, typename Ask, typename Handler>
void CallLoop::Serve(int slots, Service* service, Ask ask, Handler handler) {
  methods_.emplace_back(
      std::make_unique<Method<Call>>(this, Method<Call>::For(service, ask), std::move(handler)),
      slots);
}

}  // namespace awqd::transport
