// Takes the events that are there, runs what was submitted, sleeps.
#include "server/transport/call_loop.h"

#include <pthread.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "grpc/support/time.h"
#include "grpcpp/impl/rpc_service_method.h"
#include "server/obs/logging.h"

namespace awqd::transport {
namespace {

// Events taken in a row while something waits to be run. A batch of a short product can hold as
// many requests, and a loop that never finds its queue empty must compute as well.
constexpr int kEventsInARow = 256;

// A poll handles what one connection has to say, and that need not complete anything. One poll that
// finds nothing says little about the other connections. 32 callers on eight connections: batches
// of 4 tokens with one poll, of 24 with two, and no larger ones with more.
constexpr int kPolls = 2;

// How often the spare thread looks at the other threads, and how long it serves before it looks
// again.
constexpr std::chrono::milliseconds kSparePeriod(10);
// A thread that has computed for so much of that time counts as busy, on a machine that has other
// work too.
constexpr std::chrono::milliseconds kBusy(2);

// Slots of the methods that the server does not have.
constexpr int kUnknownSlots = 4;

void AnswerUnknown(ServerCall* call) {
  call->Finish({grpc::StatusCode::UNIMPLEMENTED,
                absl::StrCat("method: got \"", obs::LogText(call->requested_method()),
                             "\", expected one that this server has")});
}

// The loop whose thread this is, if it runs what is queued; whether the thread takes all requests
// that are there before it runs any; and whether it submitted something since the last run_queued.
thread_local const CallLoop* loop_of_thread = nullptr;
thread_local bool gathers_here = false;
thread_local bool submitted = false;

int64_t ReadClock(clockid_t clock) {
  timespec time = {};
  clock_gettime(clock, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

int RawService::Add(const char* path) {
  AddMethod(new grpc::internal::RpcServiceMethod(path, grpc::internal::RpcMethod::BIDI_STREAMING,
                                                 nullptr));
  MarkMethodRaw(size_);
  return size_++;
}

void CallLoop::RequestCall(Method* method) {
  calls_.fetch_add(1, std::memory_order_relaxed);
  ServerCall* const call = method->make(method);
  if (method->index == Method::kUnknown) {
    unknown_.RequestCall(&call->context_, &call->responder_, queue_.get(), queue_.get(),
                         call->arrived_.tag());
  } else {
    service_.RequestAsyncBidiStreaming(method->index, &call->context_, &call->responder_,
                                       queue_.get(), queue_.get(), call->arrived_.tag());
  }
}

void CallLoop::CountEnd() {
  if (calls_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  MutexLock lock(&mu_);
  none_left_.NotifyAll();
}

void LongestEvents::Stopwatch::Lap(bool ended) {
  const int64_t now = ReadClock(CLOCK_MONOTONIC_COARSE);
  if (now == tick_) return;
  const int64_t processor = ReadClock(CLOCK_THREAD_CPUTIME_ID);
  if (ended) all_->Record(now, now - tick_, processor - processor_);
  tick_ = now;
  processor_ = processor;
}

void LongestEvents::Record(int64_t now, int64_t wall, int64_t processor) {
  const int64_t number = now / kPeriodNs;
  MutexLock lock(&mu_);
  Period& period = periods_[static_cast<size_t>(number % kPeriods)];
  if (period.number != number) period = {.number = number};
  period.wall = std::max(period.wall, wall);
  period.processor = std::max(period.processor, processor);
}

LongestEvents::Times LongestEvents::Longest() const {
  const int64_t oldest = ReadClock(CLOCK_MONOTONIC_COARSE) / kPeriodNs - kPeriods;
  int64_t wall = 0, processor = 0;
  MutexLock lock(&mu_);
  for (const Period& period : periods_) {
    if (period.number <= oldest) continue;
    wall = std::max(wall, period.wall);
    processor = std::max(processor, period.processor);
  }
  return {.wall = absl::Nanoseconds(wall), .processor = absl::Nanoseconds(processor)};
}

CallLoop::CallLoop(grpc::ServerBuilder* builder, Admission* admission, int threads,
                   std::function<bool()> run_queued,
                   std::function<grpc::Status(const absl::Status&)> to_grpc, bool gathers)
    : admission_(admission),
      thread_count_(threads),
      run_queued_(std::move(run_queued)),
      gathers_(gathers),
      to_grpc_(std::move(to_grpc)),
      queue_(builder->AddCompletionQueue()) {
  builder->RegisterService(&service_);
  builder->RegisterAsyncGenericService(&unknown_);
  Admission::Entry* const entry =
      admission_->AddMethod(Admission::kUnknownMethod, security::Need::kIdentity);
  methods_.push_back({this, entry, Method::kUnknown, kUnknownSlots,
                      [](Method* method) -> ServerCall* { return new StreamCall(method); },
                      AnswerUnknown});
}

CallLoop::~CallLoop() { Stop(); }

void CallLoop::AddMethod(absl::string_view method, security::Need need, int slots,
                         Method::Make make, Method::Handler handler) {
  Admission::Entry* const entry = admission_->AddMethod(method, need);
  methods_.push_back({this, entry, service_.Add(entry->path()), slots, make, std::move(handler)});
}

bool CallLoop::WillRunQueued() {
  const CallLoop* const loop = loop_of_thread;
  if (loop == nullptr) return false;
  // Requests that come with others gather in the queue while workers are busy or wake.
  if (!gathers_here && loop->admission_->drain()->in_flight() > 1) return false;
  submitted = true;
  return true;
}

void CallLoop::JoinThread(bool gathers) {
  if (run_queued_ != nullptr) loop_of_thread = this;
  gathers_here = gathers;
}

bool CallLoop::RunSubmitted() {
  if (!std::exchange(submitted, false)) return false;
  if (run_queued_()) submitted = true;
  return submitted;
}

void CallLoop::Start() {
  for (Method& method : methods_) {
    for (int i = 0; i < method.slots; ++i) RequestCall(&method);
  }
  for (int i = 0; i < thread_count_; ++i) {
    states_.push_back(std::make_unique<ThreadState>(&longest_events_));
    threads_.emplace_back([this, state = states_.back().get()] { Run(state); });
    pthread_getcpuclockid(threads_.back().native_handle(), &states_.back()->processor_time);
  }
  spare_thread_ = std::thread([this] { RunSpareThread(); });
}

void CallLoop::Stop() {
  {
    MutexLock lock(&mu_);
    while (calls_.load(std::memory_order_acquire) > 0) none_left_.Wait(&mu_);
  }
  spare_pause_.End();
  if (spare_thread_.joinable()) spare_thread_.join();
  // Nobody starts an operation any more. gRPC would not take one on a queue that was shut down.
  queue_->Shutdown();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  void* tag = nullptr;
  bool ok = false;
  while (queue_->Next(&tag, &ok)) {
  }
}

void CallLoop::Handle(void* tag, bool ok, ThreadState* state) {
  state->events.fetch_add(1, std::memory_order_relaxed);
  state->stopwatch.Time([&] { static_cast<Event*>(tag)->Happened(ok); });
}

bool CallLoop::PollEvent(bool* found, ThreadState* state) {
  const gpr_timespec at_once = gpr_time_0(GPR_CLOCK_MONOTONIC);
  void* tag = nullptr;
  bool ok = false;
  for (int poll = 0; poll < kPolls; ++poll) {
    switch (queue_->AsyncNext(&tag, &ok, at_once)) {
      case grpc::CompletionQueue::GOT_EVENT:
        Handle(tag, ok, state);
        *found = true;
        return true;
      case grpc::CompletionQueue::SHUTDOWN:
        return false;
      case grpc::CompletionQueue::TIMEOUT:
        break;
    }
  }
  *found = false;
  return true;
}

bool CallLoop::RunRound(void* tag, bool ok, ThreadState* state) {
  Handle(tag, ok, state);
  while (submitted) {
    bool found = gathers_;
    for (int i = 0; found && i < kEventsInARow; ++i) {
      if (!PollEvent(&found, state)) return false;
    }
    submitted = false;  // first: answers may let handlers submit more
    state->stopwatch.Time([&] {
      if (run_queued_()) submitted = true;
    });
  }
  return true;
}

void CallLoop::Run(ThreadState* state) {
  JoinThread(gathers_);
  void* tag = nullptr;
  bool ok = false;
  while (queue_->Next(&tag, &ok) && RunRound(tag, ok, state)) {
  }
}

bool CallLoop::AllBusy() {
  bool busy = true;
  for (const auto& state : states_) {
    const int64_t events = state->events.load(std::memory_order_relaxed);
    const std::chrono::nanoseconds time(ReadClock(state->processor_time));
    if (events != state->seen_events) {
      state->seen_events = events;
      state->seen_since = state->seen_last = time;
    }
    // A thread that shares its processor may run for less than kBusy between two calls.
    busy &= time - state->seen_since >= kBusy && time > state->seen_last;
    state->seen_last = time;
  }
  return busy;
}

void CallLoop::RunSpareThread() {
  JoinThread(gathers_);
  ThreadState own(&longest_events_);  // nobody watches the spare thread
  AllBusy();
  while (spare_pause_.WaitFor(absl::FromChrono(kSparePeriod))) {
    while (AllBusy()) {
      const auto until = std::chrono::system_clock::now() + kSparePeriod;
      grpc::CompletionQueue::NextStatus next = grpc::CompletionQueue::GOT_EVENT;
      while (next == grpc::CompletionQueue::GOT_EVENT && std::chrono::system_clock::now() < until) {
        void* tag = nullptr;
        bool ok = false;
        next = queue_->AsyncNext(&tag, &ok, until);
        if (next == grpc::CompletionQueue::GOT_EVENT && !RunRound(tag, ok, &own)) return;
      }
      if (next == grpc::CompletionQueue::SHUTDOWN) return;
    }
  }
}

}  // namespace awqd::transport
