// Counts requests of clients, and lets each call as often as its rate says.
#include "server/transport/rate_limits.h"

#include <algorithm>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/retry_delay.h"
#include "kernels/base/status.h"

namespace awqd::transport {

constinit thread_local const PaidBy* PaidBy::now_ = nullptr;

Client::Client(std::string name, const ClientQuota& bounds, Clock::time_point now)
    : name_(std::move(name)),
      bounds_(bounds),
      burst_(std::max(1.0, bounds.requests_per_second)),
      bytes_(bounds.bytes_in_flight, "max_bytes_in_flight_per_client"),
      left_(burst_),
      refilled_(now) {}

double Client::Refilled(Clock::time_point now) const {
  const double seconds = std::chrono::duration<double>(now - refilled_).count();
  return std::min(burst_, left_ + std::max(0.0, seconds) * bounds_.requests_per_second);
}

absl::Status Client::TakeFromRate(Clock::time_point now) {
  if (bounds_.requests_per_second <= 0) return absl::OkStatus();
  MutexLock lock(&mu_);
  left_ = Refilled(now);
  refilled_ = std::max(refilled_, now);
  if (left_ >= 1) {
    left_ -= 1;
    return absl::OkStatus();
  }
  const absl::Duration delay = absl::Seconds((1 - left_) / bounds_.requests_per_second);
  return WithRetryDelay(
      absl::ResourceExhaustedError(
          absl::StrCat(name_, ": got more than ", bounds_.requests_per_second,
                       " requests a second (max_requests_per_second_per_client); try again in ",
                       absl::FormatDuration(absl::Ceil(delay, absl::Milliseconds(1))))),
      delay);
}

absl::Status Client::Begin(Clock::time_point now) {
  const int64_t limit = bounds_.requests_in_flight;
  if (requests_.fetch_add(1, std::memory_order_relaxed) >= limit && limit > 0) {
    End();
    return WithRetryDelay(
        absl::ResourceExhaustedError(absl::StrCat(
            name_, ": got a request beside ", limit,
            " in flight, the limit (max_requests_in_flight_per_client); try again when one of "
            "them has ended")),
        kRetrySoon);
  }
  absl::Status status = TakeFromRate(now);
  if (!status.ok()) End();
  return status;
}

bool Client::Rested(Clock::time_point now) {
  MutexLock lock(&mu_);
  return bounds_.requests_per_second <= 0 || Refilled(now) >= burst_;
}

void ClientLimiter::Sweep(Shard& shard, Client::Clock::time_point now) {
  // Whatever is in flight of a client holds it too, and it is given out under the shard's lock
  // alone.
  std::erase_if(shard.clients, [now](const auto& entry) {
    return entry.second.use_count() == 1 && entry.second->Rested(now);
  });
  shard.sweep_at = std::max<size_t>(64, 2 * shard.clients.size());
}

absl::StatusOr<ClientRequest> ClientLimiter::Begin(absl::string_view name,
                                                  Client::Clock::time_point now) {
  if (!any()) return ClientRequest();
  Shard& shard = shards_[absl::HashOf(name) % kShards];
  std::shared_ptr<Client> client;
  {
    MutexLock lock(&shard.mu);
    const auto found = shard.clients.find(name);
    if (found != shard.clients.end()) {
      client = found->second;
    } else {
      if (shard.clients.size() >= shard.sweep_at) Sweep(shard, now);
      client = std::make_shared<Client>(std::string(name), bounds_, now);
      shard.clients.emplace(std::string(name), client);
    }
  }
  AWQD_RETURN_IF_ERROR(client->Begin(now));
  return ClientRequest(std::move(client));
}

int64_t ClientLimiter::clients() const {
  int64_t count = 0;
  for (const Shard& shard : shards_) {
    MutexLock lock(&shard.mu);
    count += static_cast<int64_t>(shard.clients.size());
  }
  return count;
}

}  // namespace awqd::transport
