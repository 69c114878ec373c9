// Callers over rings: a few threads with a ring each, in which each has several callers' calls in
// flight, with tensors of their own in the payload or in memory of a GPU.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/bench/load.h"
#include "client/device_memory.h"
#include "kernels/base/spin.h"
#include "kernels/base/status.h"

namespace awqd::bench {
namespace {

constexpr int kMaxSlots = 512;  // of a ring
// A thread serves some dozens of callers. The server needs cores too.
constexpr int kMaxThreads = 8;
// How long a thread polls for answers before it sleeps: in one call's wait, or for moments where it
// has several in flight.
constexpr int64_t kSpinNs = 50'000, kManySpinNs = 1'000'000;
constexpr absl::Duration kMoment = absl::Microseconds(50);
// After so long without any answer it waits for one call, which finds out whether the server lives.
constexpr int64_t kSilenceNs = 20'000'000;

// A payload as a ring calls it.
struct RingPayload {
  const Payload* payload = nullptr;
  client::RingPrepared prepared;

  // The activations and the result of a caller, and its other tensors.
  int64_t large_bytes() const {
    return AlignTensor(static_cast<int64_t>(payload->x.size())) +
           AlignTensor(prepared.y_bytes * payload->tokens);
  }
  int64_t small_bytes() const {
    return AlignTensor(static_cast<int64_t>(payload->ids.size())) +
           AlignTensor(static_cast<int64_t>(payload->router_weights.size()));
  }
};

struct Caller {
  std::mt19937_64 random;
  const RingPayload* last = nullptr;
  client::RingCall call;
  Answer answer;
  uint32_t slot = 0;
  bool in_flight = false;
  int64_t large = 0, small = 0;  // where its tensors begin
};

// A thread's.
struct Generator {
  std::unique_ptr<client::DeviceMemory> memory;
  std::unique_ptr<client::Ring> ring;
  std::vector<RingPayload> calls;  // one for each payload
  std::vector<Caller> callers;
  int in_flight = 0;
  Tally tally;
};

class RingLoad {
 public:
  RingLoad(const Plan& plan, const LoadPoint& point, const Payloads& payloads)
      : plan_(plan), payloads_(payloads) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    const int threads = std::clamp(std::max(cores / 4, point.concurrency / kMaxSlots), 1,
                                   std::min(kMaxThreads, point.concurrency));
    generators_ = std::vector<Generator>(threads);
    for (int i = 0; i < point.concurrency; ++i) {
      generators_[i % threads].callers.push_back(
          {.random = std::mt19937_64(plan.seed + static_cast<uint64_t>(i))});
    }
  }

  absl::Status Open(const client::Security& security) {
    // The sizes of answers are known once the calls are prepared, in a ring without payload.
    client::RingOptions options = {
        .path = plan_.ring_path, .slots = 1, .payload_bytes = 0, .spin = {}, .security = security};
    AWQD_ASSIGN_OR_RETURN(const auto first, client::Ring::Open(options));
    AWQD_ASSIGN_OR_RETURN(const std::vector<RingPayload> calls, Prepare(*first, ""));
    int64_t large = 0, small = 0;
    for (const RingPayload& call : calls) {
      large = std::max(large, call.large_bytes());
      small = std::max(small, call.small_bytes());
    }
    for (Generator& generator : generators_) {
      const auto callers = static_cast<int64_t>(generator.callers.size());
      options.slots = std::bit_ceil(static_cast<uint32_t>(callers));
      options.payload_bytes = callers * (small + (plan_.gpu ? 0 : large));
      AWQD_ASSIGN_OR_RETURN(generator.ring, client::Ring::Open(options));
      std::string region;
      if (plan_.gpu) {
        region = absl::StrCat("awqctl-", getpid(), "-", &generator - generators_.data());
        AWQD_ASSIGN_OR_RETURN(generator.memory,
                              client::DeviceMemory::Allocate(*plan_.gpu, callers * large));
        AWQD_RETURN_IF_ERROR(generator.ring->ShareMemory(generator.memory->Request(region)));
      }
      AWQD_ASSIGN_OR_RETURN(generator.calls, Prepare(*generator.ring, region));
      for (int64_t i = 0; i < callers; ++i) {
        Caller& caller = generator.callers[i];
        caller.call.timeout = plan_.deadline;
        caller.large = i * large;
        caller.small = (plan_.gpu ? 0 : callers * large) + i * small;
      }
    }
    return absl::OkStatus();
  }

  LoadResult Run(const ProgressSink& progress) {
    const int64_t start_ns = NowNs();
    window_.from_ns = start_ns + absl::ToInt64Nanoseconds(plan_.warmup);
    window_.to_ns = plan_.requests > 0 ? std::numeric_limits<int64_t>::max()
                                       : window_.from_ns + absl::ToInt64Nanoseconds(plan_.duration);
    std::vector<std::thread> threads;
    active_ = static_cast<int>(generators_.size());
    for (Generator& generator : generators_) {
      threads.emplace_back([this, &generator] { Generate(generator); });
    }
    LoadResult result;
    while (active_ > 0) {
      std::this_thread::sleep_for(kProgressInterval);
      const int64_t now_ns = NowNs();
      LoadProgress now;
      now.warming_up = now_ns < window_.from_ns;
      now.seconds = static_cast<double>(std::max(int64_t{0}, now_ns - window_.from_ns)) / 1e9;
      now.answers = answers_;
      now.share = plan_.requests > 0
                      ? static_cast<double>(now.answers) / static_cast<double>(plan_.requests)
                      : static_cast<double>(now_ns - start_ns) /
                            static_cast<double>(window_.to_ns - start_ns);
      now.share = std::clamp(now.share, 0.0, 1.0);
      if (!progress(now)) result.interrupted = stop_ = true;
    }
    for (std::thread& thread : threads) thread.join();
    for (const Generator& generator : generators_) result.tally.Merge(generator.tally);
    result.server_gone = gone_;
    const bool early = plan_.requests > 0 || result.interrupted || gone_;
    const int64_t end_ns = early ? last_done_ns_.load() : window_.to_ns;
    result.seconds = static_cast<double>(std::max(int64_t{1}, end_ns - window_.from_ns)) / 1e9;
    return result;
  }

 private:
  absl::StatusOr<std::vector<RingPayload>> Prepare(client::Ring& ring, const std::string& region) {
    std::vector<RingPayload> out;
    for (const Payload& payload : payloads_.all()) {
      AWQD_ASSIGN_OR_RETURN(const client::RingPrepared prepared, payload.prepare(ring, region));
      out.push_back({&payload, prepared});
    }
    return out;
  }

  void Generate(Generator& all) {
    for (Caller& caller : all.callers) Start(all, caller);
    int looks = 0;
    int64_t silent_since = NowNs();
    while (all.in_flight > 0) {
      bool found = false;
      Caller* waiting = nullptr;
      for (Caller& caller : all.callers) {
        if (!caller.in_flight) continue;
        waiting = &caller;
        if (!all.ring->answered(caller.slot)) continue;
        found = true;
        Finish(all, caller);
        Start(all, caller);
      }
      if (found) {
        looks = 0;
        silent_since = NowNs();
        continue;
      }
      Relax(++looks);
      if (looks % 16 != 0) continue;
      const int64_t silence = NowNs() - silent_since;
      if (silence > (all.in_flight == 1 ? kSpinNs : kSilenceNs)) {
        Finish(all, *waiting);
        Start(all, *waiting);
        silent_since = NowNs();
      } else if (silence > kManySpinNs) {
        absl::SleepFor(kMoment);
      }
    }
    active_.fetch_sub(1);
  }

  // Submits the caller's next call, unless the load has ended. A caller whose call cannot be
  // submitted stops.
  void Start(Generator& all, Caller& caller) {
    if (stop_) return;
    const double uniform = static_cast<double>(caller.random() >> 11) * 0x1p-53;
    const auto index = static_cast<size_t>(&payloads_.Pick(uniform) - payloads_.all().data());
    if (caller.last != &all.calls[index]) {
      caller.last = &all.calls[index];
      const absl::Status placed = plan_.ring_empty ? absl::OkStatus() : Place(all, caller);
      if (!placed.ok()) return Record(all, caller, {.status = placed});
    }
    Answer& answer = caller.answer;
    answer = {.due_ns = NowNs(), .tokens = plan_.ring_empty ? 0 : caller.last->payload->tokens};
    answer.sent_ns = answer.due_ns;
    if (answer.due_ns >= window_.to_ns) return;
    if (plan_.requests > 0 && answer.due_ns >= window_.from_ns &&
        tickets_.fetch_add(1) >= plan_.requests) {
      return;
    }
    const absl::StatusOr<uint32_t> slot = all.ring->Submit(caller.call);
    if (!slot.ok()) return Record(all, caller, {.status = slot.status()});
    caller.slot = *slot;
    caller.in_flight = true;
    ++all.in_flight;
  }

  // Waits for the caller's answer.
  void Finish(Generator& all, Caller& caller) {
    caller.in_flight = false;
    --all.in_flight;
    Record(all, caller, all.ring->Wait(caller.slot));
  }

  void Record(Generator& all, Caller& caller, const client::RingAnswer& got) {
    Answer& answer = caller.answer;
    answer.done_ns = NowNs();
    answer.request_bytes =
        plan_.ring_empty ? 0 : static_cast<int64_t>(caller.last->payload->x.size());
    answer.response_bytes = got.y_bytes;
    const grpc::Status status(static_cast<grpc::StatusCode>(got.status.code()),
                              std::string(got.status.message()));
    Count(window_, plan_.deadline, answer, status, got.status.ok() ? &got.execution : nullptr,
          all.tally);
    last_done_ns_ = answer.done_ns;
    answers_.fetch_add(1, std::memory_order_relaxed);
    if (absl::IsUnavailable(got.status)) gone_ = stop_ = true;
  }

  // Puts the caller's tensors where its calls have them.
  absl::Status Place(Generator& all, Caller& caller) {
    const Payload& payload = *caller.last->payload;
    client::RingCall& call = caller.call;
    call.call = caller.last->prepared.number;
    call.tokens = payload.tokens;
    call.x_offset = caller.large;
    call.y_offset = caller.large + AlignTensor(static_cast<int64_t>(payload.x.size()));
    call.ids_offset = caller.small;
    call.router_offset = caller.small + AlignTensor(static_cast<int64_t>(payload.ids.size()));
    char* const memory = all.ring->payload();
    std::memcpy(memory + call.ids_offset, payload.ids.data(), payload.ids.size());
    std::memcpy(memory + call.router_offset, payload.router_weights.data(),
                payload.router_weights.size());
    if (all.memory != nullptr) return all.memory->Write(call.x_offset, payload.x);
    std::memcpy(memory + call.x_offset, payload.x.data(), payload.x.size());
    return absl::OkStatus();
  }

  const Plan& plan_;
  const Payloads& payloads_;
  std::vector<Generator> generators_;
  Window window_;
  std::atomic<int64_t> tickets_{0}, answers_{0}, last_done_ns_{0};
  std::atomic<int> active_{0};
  std::atomic<bool> stop_{false}, gone_{false};
};

}  // namespace

absl::StatusOr<LoadResult> RunRingLoad(const Plan& plan, const LoadPoint& point,
                                       const Payloads& payloads, const client::Security& security,
                                       const ProgressSink& progress) {
  RingLoad load(plan, point, payloads);
  AWQD_RETURN_IF_ERROR(load.Open(security));
  return load.Run(progress);
}

}  // namespace awqd::bench
