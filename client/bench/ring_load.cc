// Callers over a ring: a thread each, with tensors of its own in the payload.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/bench/load.h"
#include "kernels/base/status.h"

namespace awqd::bench {
namespace {

constexpr int64_t kAlignment = 256;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// A payload as a ring calls it.
struct RingPayload {
  const Payload* payload = nullptr;
  client::RingPrepared prepared;

  int64_t y_bytes() const { return prepared.y_bytes * payload->tokens; }
  int64_t bytes() const {
    return Aligned(static_cast<int64_t>(payload->x.size())) +
           Aligned(static_cast<int64_t>(payload->ids.size())) +
           Aligned(static_cast<int64_t>(payload->router_weights.size())) + Aligned(y_bytes());
  }
};

class RingLoad {
 public:
  RingLoad(const Plan& plan, const LoadPoint& point, const Payloads& payloads)
      : plan_(plan), point_(point), payloads_(payloads), tallies_(point.concurrency) {}

  absl::Status Open(const client::Security& security) {
    // The sizes of answers are known once the calls are prepared, in a ring without payload.
    client::RingOptions options = {
        .path = plan_.ring_path, .slots = 1, .payload_bytes = 0, .security = security};
    AWQD_ASSIGN_OR_RETURN(ring_, client::Ring::Open(options));
    AWQD_RETURN_IF_ERROR(Prepare());
    for (const RingPayload& call : calls_) part_ = std::max(part_, call.bytes());
    while (options.slots < static_cast<uint32_t>(point_.concurrency)) options.slots *= 2;
    options.payload_bytes = part_ * point_.concurrency;
    AWQD_ASSIGN_OR_RETURN(ring_, client::Ring::Open(options));
    return Prepare();
  }

  LoadResult Run(const ProgressSink& progress) {
    const int64_t start_ns = NowNs();
    window_.from_ns = start_ns + absl::ToInt64Nanoseconds(plan_.warmup);
    window_.to_ns = plan_.requests > 0 ? std::numeric_limits<int64_t>::max()
                                       : window_.from_ns + absl::ToInt64Nanoseconds(plan_.duration);
    std::vector<std::thread> callers;
    active_ = point_.concurrency;
    for (int i = 0; i < point_.concurrency; ++i) callers.emplace_back([this, i] { Call(i); });
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
    for (std::thread& caller : callers) caller.join();
    for (const Tally& tally : tallies_) result.tally.Merge(tally);
    result.server_gone = gone_;
    const bool early = plan_.requests > 0 || result.interrupted || gone_;
    const int64_t end_ns = early ? last_done_ns_.load() : window_.to_ns;
    result.seconds = static_cast<double>(std::max(int64_t{1}, end_ns - window_.from_ns)) / 1e9;
    return result;
  }

 private:
  absl::Status Prepare() {
    calls_.clear();
    for (const Payload& payload : payloads_.all()) {
      AWQD_ASSIGN_OR_RETURN(const client::RingPrepared prepared, payload.prepare(*ring_));
      calls_.push_back({&payload, prepared});
    }
    return absl::OkStatus();
  }

  void Call(int caller) {
    Tally& tally = tallies_[static_cast<size_t>(caller)];
    std::mt19937_64 random(plan_.seed + static_cast<uint64_t>(caller));
    const RingPayload* last = nullptr;
    client::RingCall call;
    call.timeout = plan_.deadline;
    while (!stop_) {
      const double uniform = static_cast<double>(random() >> 11) * 0x1p-53;
      const auto index = static_cast<size_t>(&payloads_.Pick(uniform) - payloads_.all().data());
      if (last != &calls_[index]) {
        last = &calls_[index];
        if (!plan_.ring_empty) Place(caller, *last, &call);
      }
      Answer answer = {.due_ns = NowNs(), .tokens = plan_.ring_empty ? 0 : last->payload->tokens};
      if (answer.due_ns >= window_.to_ns) break;
      if (plan_.requests > 0 && answer.due_ns >= window_.from_ns &&
          tickets_.fetch_add(1) >= plan_.requests) {
        break;
      }
      answer.sent_ns = answer.due_ns;
      const client::RingAnswer got = ring_->Run(call);
      answer.done_ns = NowNs();
      answer.request_bytes = plan_.ring_empty ? 0 : static_cast<int64_t>(last->payload->x.size());
      answer.response_bytes = got.y_bytes;
      const grpc::Status status(static_cast<grpc::StatusCode>(got.status.code()),
                                std::string(got.status.message()));
      Count(window_, plan_.deadline, answer, status, got.status.ok() ? &got.execution : nullptr,
            tally);
      last_done_ns_ = answer.done_ns;
      answers_.fetch_add(1, std::memory_order_relaxed);
      if (absl::IsUnavailable(got.status)) gone_ = stop_ = true;
    }
    active_.fetch_sub(1);
  }

  // Puts the tensors into the caller's part of the payload.
  void Place(int caller, const RingPayload& payload, client::RingCall* call) {
    int64_t at = part_ * caller;
    const auto place = [&](const std::string& bytes) {
      const int64_t begin = at;
      std::memcpy(ring_->payload() + at, bytes.data(), bytes.size());
      at += Aligned(static_cast<int64_t>(bytes.size()));
      return begin;
    };
    call->call = payload.prepared.number;
    call->tokens = payload.payload->tokens;
    call->x_offset = place(payload.payload->x);
    call->ids_offset = place(payload.payload->ids);
    call->router_offset = place(payload.payload->router_weights);
    call->y_offset = at;
  }

  const Plan& plan_;
  const LoadPoint& point_;
  const Payloads& payloads_;
  std::unique_ptr<client::Ring> ring_;
  std::vector<RingPayload> calls_;  // one for each payload
  int64_t part_ = 0;                // bytes of a caller in the payload
  std::vector<Tally> tallies_;      // one for each caller
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
