// Take what is there, run what was submitted, sleep.
#include "server/transport/call_loop.h"

#include <pthread.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "grpc/support/time.h"
#include "server/obs/logging.h"

namespace awqd::transport {
namespace {

// Events taken in a row while something waits to be run: as many as a batch of a short product can
// hold are worth waiting for, and a loop that never sees its queue empty must compute as well.
constexpr int kEventsInARow = 256;

// A look handles what one connection has to say, and that need not complete anything: one look that
// finds nothing says little about the other connections. 32 callers on eight connections: batches
// of 4 tokens with one look, of 24 with two, and no larger ones with more.
constexpr int kLooks = 2;

// How often the reserve looks at the other threads, and serves before it looks again; and how much
// of that time they must have computed to count as busy, on a machine that has other work too.
constexpr std::chrono::milliseconds kStandByFor(10);
constexpr std::chrono::milliseconds kBusy(2);

// Of methods that the server does not have.
constexpr int kUnknownSlots = 4;

void Unimplemented(UnknownCall* call) {
  call->Finish({grpc::StatusCode::UNIMPLEMENTED,
                absl::StrCat("method: got \"", obs::LogText(call->asked_for()),
                             "\", expected one that this server has")});
}

// Of this thread: it is a loop's that runs what is queued, and something was submitted since the
// last run_queued.
thread_local bool on_loop = false;
thread_local bool submitted = false;

}  // namespace

void MethodBase::Gone() {
  CallLoop* const loop = loop_;
  if (loop->calls_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  MutexLock lock(&loop->mu_);
  loop->none_left_.NotifyAll();
}

CallLoop::CallLoop(grpc::ServerBuilder* builder, Admission* admission, int threads,
                   std::function<bool()> run_queued,
                   std::function<grpc::Status(const absl::Status&)> to_grpc)
    : admission_(admission),
      threads_wanted_(threads),
      run_queued_(std::move(run_queued)),
      to_grpc_(std::move(to_grpc)),
      queue_(builder->AddCompletionQueue()) {
  builder->RegisterService(&service_);
  builder->RegisterAsyncGenericService(&unknown_);
  Admission::Entry* const entry =
      admission_->Add(Admission::kUnknownMethod, security::Need::kIdentity, WhileDraining::kRejected);
  methods_.emplace_back(std::make_unique<Method<UnknownCall>>(this, entry, -1, Unimplemented),
                        kUnknownSlots);
}

CallLoop::~CallLoop() { Stop(); }

bool CallLoop::WillRunQueued() {
  if (on_loop) submitted = true;
  return on_loop;
}

void CallLoop::Start() {
  for (const auto& [method, slots] : methods_) {
    for (int i = 0; i < slots; ++i) method->Ask();
  }
  for (int i = 0; i < threads_wanted_; ++i) {
    turns_.push_back(std::make_unique<Turns>(&holds_));
    threads_.emplace_back([this, turns = turns_.back().get()] { Run(turns); });
    pthread_getcpuclockid(threads_.back().native_handle(), &turns_.back()->processor_time);
  }
  reserve_ = std::thread([this] { StandBy(); });
}

void CallLoop::Stop() {
  {
    MutexLock lock(&mu_);
    while (calls_.load(std::memory_order_acquire) > 0) none_left_.Wait(&mu_);
    stopping_ = true;
    stop_.NotifyAll();
  }
  if (reserve_.joinable()) reserve_.join();
  // Nobody starts an operation any more, which gRPC would not take on a queue that was shut down.
  queue_->Shutdown();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  void* tag = nullptr;
  bool ok = false;
  while (queue_->Next(&tag, &ok)) {
  }
}

void CallLoop::Handle(void* tag, bool ok, Turns* turns) {
  turns->taken.fetch_add(1, std::memory_order_relaxed);
  turns->stopwatch.Start();
  static_cast<Event*>(tag)->Happened(ok);
  turns->stopwatch.Stop();
}

bool CallLoop::RunQueued(Turns* turns) {
  turns->stopwatch.Start();
  const bool more = run_queued_();
  turns->stopwatch.Stop();
  return more;
}

bool CallLoop::TakeOne(bool* more, Turns* turns) {
  const gpr_timespec at_once = gpr_time_0(GPR_CLOCK_MONOTONIC);
  void* tag = nullptr;
  bool ok = false;
  for (int look = 0; look < kLooks; ++look) {
    switch (queue_->AsyncNext(&tag, &ok, at_once)) {
      case grpc::CompletionQueue::GOT_EVENT:
        Handle(tag, ok, turns);
        *more = true;
        return true;
      case grpc::CompletionQueue::SHUTDOWN:
        return false;
      case grpc::CompletionQueue::TIMEOUT:
        break;
    }
  }
  *more = false;
  return true;
}

bool CallLoop::Round(void* tag, bool ok, Turns* turns) {
  Handle(tag, ok, turns);
  while (submitted) {
    bool more = true;
    for (int i = 0; more && i < kEventsInARow; ++i) {
      if (!TakeOne(&more, turns)) return false;
    }
    submitted = false;  // first: answers may let handlers submit more
    if (RunQueued(turns)) submitted = true;
  }
  return true;
}

void CallLoop::Run(Turns* turns) {
  on_loop = run_queued_ != nullptr;
  void* tag = nullptr;
  bool ok = false;
  while (queue_->Next(&tag, &ok) && Round(tag, ok, turns)) {
  }
}

// What the reserve knows of the other threads from its last look.
class CallLoop::Watch {
 public:
  explicit Watch(const std::vector<std::unique_ptr<Turns>>& threads)
      : threads_(threads), seen_(threads.size()) {}

  // Whether since the last look every thread has been busy and none has come back to the queue. One
  // that sleeps in the queue has not been busy.
  bool AllAway() {
    bool away = true;
    for (size_t i = 0; i < threads_.size(); ++i) {
      const int64_t taken = threads_[i]->taken.load(std::memory_order_relaxed);
      const std::chrono::nanoseconds time = ProcessorTime(*threads_[i]);
      Seen& seen = seen_[i];
      if (taken != seen.taken) seen = {taken, time, time};
      // A thread that shares its processor may run for less than kBusy between two looks.
      away &= time - seen.since >= kBusy && time > seen.last;
      seen.last = time;
    }
    return away;
  }

 private:
  struct Seen {
    int64_t taken = 0;
    // Processor time when it had taken so many, and at the last look.
    std::chrono::nanoseconds since{0}, last{0};
  };

  static std::chrono::nanoseconds ProcessorTime(const Turns& turns) {
    timespec time = {};
    clock_gettime(turns.processor_time, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  }

  const std::vector<std::unique_ptr<Turns>>& threads_;
  std::vector<Seen> seen_;
};

void CallLoop::StandBy() {
  on_loop = run_queued_ != nullptr;
  Turns own(&holds_);  // nobody watches the reserve
  Watch watch(turns_);
  watch.AllAway();
  for (;;) {
    {
      MutexLock lock(&mu_);
      if (!stopping_) stop_.WaitUntil(&mu_, std::chrono::steady_clock::now() + kStandByFor);
      if (stopping_) return;
    }
    while (watch.AllAway()) {
      const auto until = std::chrono::system_clock::now() + kStandByFor;
      grpc::CompletionQueue::NextStatus next = grpc::CompletionQueue::GOT_EVENT;
      while (next == grpc::CompletionQueue::GOT_EVENT && std::chrono::system_clock::now() < until) {
        void* tag = nullptr;
        bool ok = false;
        next = queue_->AsyncNext(&tag, &ok, until);
        if (next == grpc::CompletionQueue::GOT_EVENT && !Round(tag, ok, &own)) return;
      }
      if (next == grpc::CompletionQueue::SHUTDOWN) return;
    }
  }
}

}  // namespace awqd::transport
