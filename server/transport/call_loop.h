// CallLoop: the threads that empty gRPC's completion queue, run handlers, and compute what these
// leave to be computed.
//
// A thread of the loop takes every event that is there, and only then runs what the handlers
// submitted to the engine: so requests that come together are multiplied together, and one wakeup
// reads, computes and answers all of them.
//
// Within gRPC a connection that always has something to say can hold a thread for as long as it
// likes. A reserve serves the others then: a thread that does nothing as long as the loop turns.
#pragma once

#include <time.h>

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
#include "absl/strings/string_view.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/impl/rpc_service_method.h"
#include "grpcpp/impl/service_type.h"
#include "grpcpp/server_builder.h"
#include "kernels/base/mutex.h"
#include "server/security/roles.h"
#include "server/transport/call_kinds.h"
#include "server/transport/admission.h"
#include "server/transport/loop_holds.h"

namespace awqd::transport {

class CallLoop;

// One method of the server.
class MethodBase {
 public:
  MethodBase(CallLoop* loop, Admission::Entry* entry) : loop_(loop), entry_(entry) {}
  virtual ~MethodBase() = default;
  // Asks gRPC for one more call.
  virtual void Ask() = 0;
  // Runs the handler of a call that the door let in, and whose request is here if it has one.
  virtual void Handle(ServerCall* call) = 0;
  // Called when a call that was asked for will never come.
  void Gone();
  Admission::Entry* entry() const { return entry_; }
  CallLoop* loop() const { return loop_; }

 protected:
  CallLoop* const loop_;

 private:
  Admission::Entry* const entry_;
};

// The methods by their names, all of them raw: gRPC's generated services keep theirs the same way.
// All are streams to gRPC, which is the same on the wire: of any other kind it would keep a call to
// itself until the request is here, answer one without a request as INTERNAL, and cut uploads off
// that are in progress when the server is told to stop.
class RawService final : public grpc::Service {
 public:
  // "/package.Service/Method", which lives as long as this. Returns its index.
  int Add(const char* path) {
    AddMethod(new grpc::internal::RpcServiceMethod(path, grpc::internal::RpcMethod::BIDI_STREAMING,
                                                   nullptr));
    MarkMethodRaw(size_);
    return size_++;
  }
  using Service::RequestAsyncBidiStreaming;

 private:
  int size_ = 0;
};

class CallLoop {
 public:
  // The queue is the builder's server's, and so are the methods, which all stand behind `door`. A
  // method that is not served is UNIMPLEMENTED, behind the door as well. `run_queued` does what
  // Engine::RunQueued does; null where that runs nothing, so that no thread looks for company in
  // vain. `to_grpc` spells what a handler threw.
  CallLoop(grpc::ServerBuilder* builder, Admission* admission, int threads, std::function<bool()> run_queued,
           std::function<grpc::Status(const absl::Status&)> to_grpc);
  // Stops.
  ~CallLoop();

  // Before the server is built. Of every call of `method`, "package.Service/Method", `handler` is
  // told, on a thread of the loop, once the door has let it in, which asks for `need`. As many as
  // `slots` calls may come at once without waiting to be asked for.
  template <typename Call>
  void Serve(absl::string_view method, security::Need need, int slots,
             std::function<void(Call*)> handler,
             WhileDraining while_draining = WhileDraining::kRejected);

  // Once the server listens.
  void Start();
  // Returns when every call is gone and the threads have ended. The server was shut down, or never
  // came up.
  void Stop();

  const LoopHolds& holds() const { return holds_; }

  // True on a thread of a loop that runs what is queued: it then calls run_queued before it sleeps.
  // The caller is about to submit something.
  static bool WillRunQueued();

 private:
  friend class MethodBase;
  friend class ServerCall;
  template <typename Call>
  friend class Method;

  // What the reserve sees of a thread of the loop. Apart from its neighbours in memory.
  struct alignas(64) Turns {
    explicit Turns(LoopHolds* holds) : stopwatch(holds) {}
    std::atomic<int64_t> taken{0};  // how often it came back to the queue with something
    clockid_t processor_time = {};
    LoopHolds::Stopwatch stopwatch;  // the thread's own
  };
  class Watch;

  void Run(Turns* turns);
  // The reserve: serves while every other thread is busy elsewhere.
  void StandBy();
  void Handle(void* tag, bool ok, Turns* turns);
  bool RunQueued(Turns* turns);
  // Handles an event, and those that are there by then; runs what they submitted. False when the
  // queue has ended.
  bool Round(void* tag, bool ok, Turns* turns);
  // Handles one event without waiting for it; `more`: there was one. False when the queue has
  // ended.
  bool TakeOne(bool* more, Turns* turns);

  Admission* const admission_;
  RawService service_;
  grpc::AsyncGenericService unknown_;
  const int threads_wanted_;
  const std::function<bool()> run_queued_;
  const std::function<grpc::Status(const absl::Status&)> to_grpc_;
  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::vector<std::pair<std::unique_ptr<MethodBase>, int>> methods_;  // and their slots
  std::atomic<int64_t> calls_{0};                                     // asked for or in progress
  Mutex mu_;
  CondVar none_left_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  LoopHolds holds_;
  std::vector<std::unique_ptr<Turns>> turns_;  // of threads_
  std::vector<std::thread> threads_;
  std::thread reserve_;
};

template <typename Call>
class Method final : public MethodBase {
 public:
  using Handler = std::function<void(Call*)>;

  // `index` is the method's in the loop's service.
  Method(CallLoop* loop, Admission::Entry* entry, int index, Handler handler)
      : MethodBase(loop, entry), index_(index), handler_(std::move(handler)) {}

  void Ask() override {
    loop_->calls_.fetch_add(1, std::memory_order_relaxed);
    auto* call = new Call(this);
    grpc::ServerCompletionQueue* const queue = loop_->queue_.get();
    void* const tag = static_cast<Event*>(&call->taken_);
    if constexpr (std::is_same_v<Call, UnknownCall>) {
      loop_->unknown_.RequestCall(&call->context_, &call->responder_, queue, queue, tag);
    } else {
      loop_->service_.RequestAsyncBidiStreaming(index_, &call->context_, &call->responder_, queue,
                                                queue, tag);
    }
  }
  void Handle(ServerCall* call) override { handler_(static_cast<Call*>(call)); }

 private:
  const int index_;
  const Handler handler_;
};

template <typename Call>
void CallLoop::Serve(absl::string_view method, security::Need need, int slots,
                     std::function<void(Call*)> handler, WhileDraining while_draining) {
  Admission::Entry* const entry = admission_->Add(method, need, while_draining);
  methods_.emplace_back(
      std::make_unique<Method<Call>>(this, entry, service_.Add(entry->path()), std::move(handler)),
      slots);
}

}  // namespace awqd::transport
