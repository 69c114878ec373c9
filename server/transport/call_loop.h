// CallLoop: the threads that empty gRPC's completion queue, run handlers, and compute the short
// batches that these submit.
//
// A thread of the loop takes every event that is there, and only then runs what the handlers
// submitted to the engine. So requests that come together are multiplied together, and one wakeup
// reads, computes and answers all of them.
//
// Attacker: a peer that sends megabytes in frames of one byte. gRPC reads a connection for as long
// as it finds something there, and holds the thread for a second. A spare thread serves the others
// then. Shown by `byte_by_byte` of tests/attack.
#pragma once

#include <time.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/impl/service_type.h"
#include "grpcpp/server_builder.h"
#include "kernels/base/mutex.h"
#include "kernels/base/pause.h"
#include "server/security/roles.h"
#include "server/transport/admission.h"
#include "server/transport/call.h"

namespace awqd::transport {

class CallLoop;

// One method of the server.
struct Method {
  // Makes a call of the method's kind.
  using Make = ServerCall* (*)(Method*);
  using Handler = std::function<void(ServerCall*)>;
  static constexpr int kUnknown = -1;

  CallLoop* loop;
  Admission::Entry* entry;
  int index;  // in the loop's service; kUnknown for methods that the server does not have
  int slots;  // as CallLoop::Serve says
  Make make;
  Handler handler;  // for a call that was admitted, and whose request is here if it has one
};

// All methods by their names. gRPC's generated services keep theirs in the same way. All are raw
// streams to gRPC, which are the same on the wire as the other kinds. gRPC would keep a call of
// another kind to itself until the request is here, answer one without a request as INTERNAL, and
// cut uploads off that are in progress when the server is told to stop.
class RawService final : public grpc::Service {
 public:
  // "/package.Service/Method", which lives as long as this. Returns its index.
  int Add(const char* path);
  using Service::RequestAsyncBidiStreaming;

 private:
  int size_ = 0;
};

// The longest times that one event kept a thread of the loop from the next one. Thread-safe.
//
// It measures with the kernel's coarse clock, which costs a few nanoseconds and ticks every few
// milliseconds. An event that ends within the same tick is not recorded.
class LongestEvents {
 public:
  struct Times {
    absl::Duration wall;
    absl::Duration processor;  // of the thread, which other programs do not lengthen
  };

  // Belongs to one thread.
  class Stopwatch {
   public:
    explicit Stopwatch(LongestEvents* all) : all_(all) {}
    // Runs `event` and records it.
    template <typename F>
    void Time(F event) {
      Lap(/*ended=*/false);
      event();
      Lap(/*ended=*/true);
    }

   private:
    // Before each event, and after it with `ended`.
    void Lap(bool ended);

    LongestEvents* const all_;
    int64_t tick_ = 0, processor_ = 0;  // nanoseconds at the last tick that was seen
  };

  // The longest within the last minute.
  Times Longest() const;

 private:
  struct Period {
    int64_t number = -1;
    int64_t wall = 0, processor = 0;
  };
  static constexpr int64_t kPeriodNs = 10'000'000'000;
  static constexpr int64_t kPeriods = 7;  // a minute, and the period that has just begun

  void Record(int64_t now, int64_t wall, int64_t processor);

  mutable Mutex mu_;
  std::array<Period, kPeriods> periods_ ABSL_GUARDED_BY(mu_);
};

class CallLoop {
 public:
  // The completion queue and the methods are those of the builder's server. Every call passes
  // `admission`, a call of an unknown method too, which is then UNIMPLEMENTED. `run_queued` does
  // what Engine::RunQueued does. It is null where that runs nothing, so that no thread waits in
  // vain for more requests. `to_grpc` turns an error into the status that the client gets.
  // `gathers`: as in Options.
  CallLoop(grpc::ServerBuilder* builder, Admission* admission, int threads,
           std::function<bool()> run_queued,
           std::function<grpc::Status(const absl::Status&)> to_grpc, bool gathers = true);
  // Stops.
  ~CallLoop();

  // Before the server is built. `handler` is called on a thread of the loop for every call of
  // `method`, "package.Service/Method", that was admitted; admission requires `need`. As many as
  // `slots` calls may come at once without waiting to be requested.
  template <typename Call>
  void Serve(absl::string_view method, security::Need need, int slots,
             std::function<void(Call*)> handler) {
    AddMethod(
        method, need, slots, [](Method* method) -> ServerCall* { return new Call(method); },
        [handler = std::move(handler)](ServerCall* call) { handler(static_cast<Call*>(call)); });
  }

  // Once the server listens.
  void Start();
  // Returns when every call is gone and the threads have ended. The server was shut down, or never
  // came up.
  void Stop();

  // For another thread that submits to the engine: WillRunQueued answers it as a thread of the loop
  // from here on, and it calls RunSubmitted before it sleeps. `gathers`: it takes all requests that
  // are there before it does, so that they run as one batch.
  void JoinThread(bool gathers);
  // Runs the next batch, if the calling thread submitted something. True: more is left for it.
  bool RunSubmitted();

  const LongestEvents& longest_events() const { return longest_events_; }

  // For a caller that is about to submit something to the engine. True on a thread of a loop that
  // runs what is queued, without gathering only while no other call is in flight: the thread then
  // calls run_queued before it sleeps.
  static bool WillRunQueued();

 private:
  friend class ServerCall;

  // The state of a thread of the loop that the spare thread sees. Apart from its neighbours in
  // memory.
  struct alignas(64) ThreadState {
    explicit ThreadState(LongestEvents* longest) : stopwatch(longest) {}
    std::atomic<int64_t> events{0};  // how often it came back to the queue with something
    clockid_t processor_time = {};
    LongestEvents::Stopwatch stopwatch;  // the thread's own
    // The spare thread's memory of the last time that it looked: the events, the processor time
    // when there were first so many, and the processor time then.
    int64_t seen_events = 0;
    std::chrono::nanoseconds seen_since{0}, seen_last{0};
  };

  // Requests one more call of the method from gRPC.
  void RequestCall(Method* method);
  // A call that was requested is gone, or will never come.
  void CountEnd();
  void AddMethod(absl::string_view method, security::Need need, int slots, Method::Make make,
                 Method::Handler handler);
  void Run(ThreadState* state);
  // Whether since the last call every thread of states_ has been busy and none has come back to the
  // queue. A thread that sleeps in the queue has not been busy.
  bool AllBusy();
  // The spare thread: serves while every other thread is busy elsewhere. A second thread that always
  // serves would split batches.
  void RunSpareThread();
  void Handle(void* tag, bool ok, ThreadState* state);
  // Handles an event and those that are there by then, and runs what they submitted. False when the
  // queue has ended.
  bool RunRound(void* tag, bool ok, ThreadState* state);
  // Handles one event without waiting for it. `found`: there was one. False when the queue has
  // ended.
  bool PollEvent(bool* found, ThreadState* state);

  Admission* const admission_;
  RawService service_;
  grpc::AsyncGenericService unknown_;
  const int thread_count_;
  const std::function<bool()> run_queued_;
  const bool gathers_;
  const std::function<grpc::Status(const absl::Status&)> to_grpc_;
  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::deque<Method> methods_;
  std::atomic<int64_t> calls_{0};  // requested or in progress
  Mutex mu_;
  CondVar none_left_;
  Pause spare_pause_;
  LongestEvents longest_events_;
  std::vector<std::unique_ptr<ThreadState>> states_;  // of threads_
  std::vector<std::thread> threads_;
  std::thread spare_thread_;
};

}  // namespace awqd::transport
