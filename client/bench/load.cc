// Callers and dispatchers over gRPC's callback client.
#include "client/bench/load.h"

#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>

#include "client/convert.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"

namespace awqd::bench {
namespace {

using Stub = grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>;

// A call that states no deadline still ends: the longest that a bench waits for an answer.
constexpr absl::Duration kLongestCall = absl::Minutes(2);
// Answers UNAVAILABLE in a row after which the server counts as gone.
constexpr int kGone = 1000;

// A call that is used again and again, so that nothing but gRPC allocates.
struct Call {
  struct Shard* shard = nullptr;
  Stub* stub = nullptr;
  uint64_t random = 0;
  std::optional<grpc::ClientContext> context;
  grpc::ByteBuffer response;
  const Payload* payload = nullptr;
  int64_t due_ns = 0;
  int64_t sent_ns = 0;
};

// A part of the calls with what they share, so that threads seldom meet.
struct Shard {
  std::mutex mutex;
  Tally tally;
  std::deque<Call> calls;  // stable addresses
  // Open loop:
  std::vector<Call*> idle;
  std::deque<int64_t> backlog;  // due, and every call in use
  int64_t unsent = 0;
};

// splitmix64, as a number in [0, 1).
double Uniform(uint64_t& state) {
  uint64_t x = state += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

class Load {
 public:
  Load(const Plan& plan, const LoadPoint& point, const Payloads& payloads,
       const Connections& connections)
      : plan_(plan), point_(point), payloads_(payloads), credentials_(connections.credentials) {
    for (const auto& channel : connections.channels)
      stubs_.push_back(std::make_unique<Stub>(channel));
    const size_t cores = std::max(1u, std::thread::hardware_concurrency());
    const size_t most =
        point.open() ? std::clamp<size_t>(cores / 4, 1, 4) : static_cast<size_t>(point.concurrency);
    for (size_t i = 0; i < std::min(most, stubs_.size()); ++i) {
      shards_.push_back(std::make_unique<Shard>());
    }
  }

  LoadResult Run(const ProgressSink& progress) {
    start_ns_ = NowNs();
    window_.from_ns = start_ns_ + absl::ToInt64Nanoseconds(plan_.warmup);
    window_.to_ns = plan_.requests > 0 ? std::numeric_limits<int64_t>::max()
                                       : window_.from_ns + absl::ToInt64Nanoseconds(plan_.duration);
    in_flight_ = 1;  // this thread, until everything was started
    std::vector<std::thread> dispatchers;
    if (point_.open()) {
      for (size_t i = 0; i < shards_.size(); ++i) {
        dispatchers.emplace_back([this, i] { Dispatch(i); });
      }
    } else {
      for (int i = 0; i < point_.concurrency; ++i) StartCaller(static_cast<size_t>(i));
    }
    WaitForTheEnd(progress);
    for (std::thread& dispatcher : dispatchers) dispatcher.join();
    Leave();
    std::unique_lock<std::mutex> lock(done_mutex_);
    done_.wait(lock, [this] { return in_flight_ == 0; });
    return Result();
  }

 private:
  Call& NewCall(Shard& shard, size_t channel) {
    Call& call = shard.calls.emplace_back();
    call.shard = &shard;
    call.stub = stubs_[channel % stubs_.size()].get();
    call.random = plan_.seed ^ (next_call_.fetch_add(1) << 32);
    return call;
  }

  void StartCaller(size_t index) {
    Shard& shard = *shards_[index % shards_.size()];
    Call* call = nullptr;
    {
      std::lock_guard<std::mutex> lock(shard.mutex);
      call = &NewCall(shard, index);
    }
    const int64_t now_ns = NowNs();
    if (MayStart(now_ns)) Start(*call, now_ns);
  }

  // Whether a request that is due now belongs to this load point; takes a ticket of --requests.
  bool MayStart(int64_t due_ns) {
    if (stop_ || due_ns >= window_.to_ns) return false;
    if (plan_.requests == 0 || due_ns < window_.from_ns) return true;
    if (tickets_.fetch_add(1) < plan_.requests) return true;
    stop_ = true;
    return false;
  }

  void Start(Call& call, int64_t due_ns) {
    in_flight_.fetch_add(1);
    call.payload = &payloads_.Pick(Uniform(call.random));
    call.context.emplace();
    credentials_.Authorize(*call.context);
    client::AddWeightKey(call.payload->weight_key, *call.context);
    call.response.Clear();
    call.due_ns = due_ns;
    call.sent_ns = NowNs();
    const absl::Duration left =
        std::min(plan_.deadline, kLongestCall) - absl::Nanoseconds(call.sent_ns - due_ns);
    call.context->set_deadline(std::chrono::system_clock::now() + absl::ToChronoNanoseconds(left));
    call.stub->UnaryCall(&*call.context, call.payload->method, grpc::StubOptions(),
                         &call.payload->request, &call.response,
                         [this, &call](const grpc::Status& status) { Finish(call, status); });
  }

  void Finish(Call& call, const grpc::Status& status) {
    Answer answer = {
        call.due_ns, call.sent_ns, NowNs(), call.payload->tokens, call.payload->request_bytes, 0};
    std::optional<v1::Execution> ran;
    if (status.ok()) {
      answer.response_bytes =
          static_cast<int64_t>(call.response.Length()) + call.payload->shared_answer_bytes;
      ran = ReadResponse(call.payload->protocol, call.response);
    }
    Watch(status);
    std::optional<int64_t> next_ns;
    {
      std::lock_guard<std::mutex> lock(call.shard->mutex);
      Count(window_, plan_.deadline, answer, status, ran ? &*ran : nullptr, call.shard->tally);
      if (point_.open()) next_ns = NextOfBacklog(call);
    }
    if (!point_.open() && MayStart(answer.done_ns)) next_ns = answer.done_ns;
    if (next_ns.has_value()) Start(call, *next_ns);
    last_done_ns_ = answer.done_ns;
    if (status.ok()) last_ok_ns_ = answer.done_ns;
    Leave();
  }

  // The shard's mutex is held. Nothing: the call is idle now.
  std::optional<int64_t> NextOfBacklog(Call& call) {
    std::deque<int64_t>& backlog = call.shard->backlog;
    if (backlog.empty() || stop_) {
      call.shard->idle.push_back(&call);
      return std::nullopt;
    }
    const int64_t due_ns = backlog.front();
    backlog.pop_front();
    return due_ns;
  }

  void Watch(const grpc::Status& status) {
    if (status.error_code() != grpc::UNAVAILABLE) {
      unavailable_ = 0;
    } else if (unavailable_.fetch_add(1) >= kGone) {
      gone_ = stop_ = true;
    }
  }

  // One of the threads that start what is due.
  void Dispatch(size_t index) {
    prctl(PR_SET_TIMERSLACK, 1);  // wake on time: the default is 50 us late
    const double parts = static_cast<double>(shards_.size());
    Arrivals arrivals(point_.rate / parts, plan_.poisson, plan_.seed + index,
                      static_cast<double>(index) / parts);
    while (true) {
      const int64_t due_ns = start_ns_ + arrivals.NextNs();
      if (!MayStart(due_ns)) return;
      const int64_t now_ns = NowNs();
      if (due_ns > now_ns) std::this_thread::sleep_for(std::chrono::nanoseconds(due_ns - now_ns));
      if (Call* call = IdleCall(index, due_ns)) Start(*call, due_ns);
    }
  }

  // A call to send what is due with, or null when it waits in the backlog.
  Call* IdleCall(size_t index, int64_t due_ns) {
    Shard& shard = *shards_[index];
    std::lock_guard<std::mutex> lock(shard.mutex);
    if (!shard.idle.empty()) {
      Call* const call = shard.idle.back();
      shard.idle.pop_back();
      return call;
    }
    const size_t most =
        std::max<size_t>(1, static_cast<size_t>(plan_.max_in_flight) / shards_.size());
    if (shard.calls.size() < most) {
      return &NewCall(shard, shard.calls.size() * shards_.size() + index);
    }
    shard.backlog.push_back(due_ns);
    return nullptr;
  }

  // The last act of everything that counts as in flight. Only the last one needs the lock: under it
  // this object cannot go away before it was notified.
  void Leave() {
    int64_t count = in_flight_.load();
    while (count > 1) {
      if (in_flight_.compare_exchange_weak(count, count - 1)) return;
    }
    std::lock_guard<std::mutex> lock(done_mutex_);
    if (in_flight_.fetch_sub(1) == 1) done_.notify_all();
  }

  void WaitForTheEnd(const ProgressSink& progress) {
    while (!stop_) {
      const int64_t left_ns = window_.to_ns - NowNs();
      if (left_ns <= 0) break;
      std::this_thread::sleep_for(
          std::min<std::chrono::nanoseconds>(std::chrono::nanoseconds(left_ns), kProgressInterval));
      if (!stop_ && !progress(Progress())) {
        interrupted_ = true;
        break;
      }
    }
    stop_ = true;
  }

  LoadProgress Progress() {
    Tally sum;
    for (const auto& shard : shards_) {
      std::lock_guard<std::mutex> lock(shard->mutex);
      sum.Merge(shard->tally);
    }
    LoadProgress now;
    const int64_t now_ns = NowNs();
    now.warming_up = now_ns < window_.from_ns;
    now.seconds = static_cast<double>(std::max(int64_t{0}, now_ns - window_.from_ns)) / 1e9;
    now.answers = sum.answers[0];
    now.errors = sum.errors();
    now.p99_ns = sum.latency.QuantileNs(0.99);
    now.share = plan_.requests > 0 ? static_cast<double>(now.answers + now.errors) /
                                         static_cast<double>(plan_.requests)
                                   : static_cast<double>(now_ns - start_ns_) /
                                         static_cast<double>(window_.to_ns - start_ns_);
    now.share = std::clamp(now.share, 0.0, 1.0);
    return now;
  }

  LoadResult Result() {
    LoadResult result;
    for (const auto& shard : shards_) {
      result.tally.Merge(shard->tally);
      result.unsent += std::count_if(shard->backlog.begin(), shard->backlog.end(),
                                     [this](int64_t due_ns) { return window_.Holds(due_ns); });
    }
    result.interrupted = interrupted_;
    result.server_gone = gone_;
    const bool early = plan_.requests > 0 || interrupted_;
    const int64_t end_ns = gone_   ? last_ok_ns_.load()
                           : early ? last_done_ns_.load()
                                   : window_.to_ns;
    result.seconds = static_cast<double>(std::max(int64_t{1}, end_ns - window_.from_ns)) / 1e9;
    return result;
  }

  const Plan& plan_;
  const LoadPoint& point_;
  const Payloads& payloads_;
  const client::Credentials& credentials_;
  std::vector<std::unique_ptr<Stub>> stubs_;
  std::vector<std::unique_ptr<Shard>> shards_;
  int64_t start_ns_ = 0;
  Window window_;
  std::atomic<uint64_t> next_call_{1};
  std::atomic<int64_t> tickets_{0};
  std::atomic<int64_t> last_done_ns_{0}, last_ok_ns_{0};
  std::atomic<int> unavailable_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> gone_{false};
  bool interrupted_ = false;  // of the thread of Run
  std::atomic<int64_t> in_flight_{0};
  std::mutex done_mutex_;
  std::condition_variable done_;
};

}  // namespace

LoadResult RunLoad(const Plan& plan, const LoadPoint& point, const Payloads& payloads,
                   const Connections& connections, const ProgressSink& progress) {
  return Load(plan, point, payloads, connections).Run(progress);
}

}  // namespace awqd::bench
