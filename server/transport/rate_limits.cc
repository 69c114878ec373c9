// Counts requests of clients, and lets each call as often as its rate says.
#include "server/transport/rate_limits.h"

#include <algorithm>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/retry_delay.h"
#include "kernels/base/status.h"

namespace awqd::transport {

TokenBucket::TokenBucket(double rate, Clock::time_point now)
    : rate_(rate), burst_(std::max(1.0, rate)), tokens_(burst_), refilled_(now) {}

double TokenBucket::TokensAt(Clock::time_point now) const {
  const double seconds = std::chrono::duration<double>(now - refilled_).count();
  return std::min(burst_, tokens_ + std::max(0.0, seconds) * rate_);
}

absl::Duration TokenBucket::Acquire(Clock::time_point now) {
  if (rate_ <= 0) return absl::ZeroDuration();
  tokens_ = TokensAt(now);
  refilled_ = std::max(refilled_, now);
  if (tokens_ < 1) return absl::Seconds((1 - tokens_) / rate_);
  tokens_ -= 1;
  return absl::ZeroDuration();
}

Client::Client(std::string name, const ClientQuota& quota, Clock::time_point now)
    : name_(std::move(name)),
      quota_(quota),
      bytes_(quota.bytes_in_flight, "max_bytes_in_flight_per_client"),
      bucket_(quota.requests_per_second, now) {}

absl::Status Client::BeginRequest(Clock::time_point now) {
  const int64_t limit = quota_.requests_in_flight;
  if (requests_.fetch_add(1, std::memory_order_relaxed) >= limit && limit > 0) {
    EndRequest();
    return WithRetryDelay(
        absl::ResourceExhaustedError(absl::StrCat(
            name_, ": got a request beside ", limit,
            " in flight, the limit (max_requests_in_flight_per_client); try again when one of "
            "them has ended")),
        kRetrySoon);
  }
  absl::Duration delay;
  {
    MutexLock lock(&mu_);
    delay = bucket_.Acquire(now);
  }
  if (delay == absl::ZeroDuration()) return absl::OkStatus();
  EndRequest();
  return WithRetryDelay(
      absl::ResourceExhaustedError(
          absl::StrCat(name_, ": got more than ", quota_.requests_per_second,
                       " requests a second (max_requests_per_second_per_client); try again in ",
                       absl::FormatDuration(absl::Ceil(delay, absl::Milliseconds(1))))),
      delay);
}

bool Client::IsRested(Clock::time_point now) {
  MutexLock lock(&mu_);
  return bucket_.IsFull(now);
}

void ClientLimiter::Sweep(Shard& shard, Client::Clock::time_point now) {
  // Whatever is in flight of a client holds it too, and clients are handed out under the shard's
  // lock alone.
  std::erase_if(shard.clients, [now](const auto& entry) {
    return entry.second.use_count() == 1 && entry.second->IsRested(now);
  });
  shard.sweep_at = std::max<size_t>(64, 2 * shard.clients.size());
}

absl::StatusOr<ClientRequest> ClientLimiter::BeginRequest(absl::string_view name,
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
      client = std::make_shared<Client>(std::string(name), quota_, now);
      shard.clients.emplace(std::string(name), client);
    }
  }
  AWQD_RETURN_IF_ERROR(client->BeginRequest(now));
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
