// One counter for all bytes and one for each connection, raised only when the sums stay within
// bounds; and the requests of clients, each of which may call as often as its rate says.
#include "server/transport/limits.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/retry_delay.h"
#include "kernels/base/status.h"

namespace awqd::transport {
namespace {

absl::Status Refused(absl::string_view what, int64_t bytes, int64_t at_most,
                     absl::string_view why) {
  return WithRetryDelay(
      absl::ResourceExhaustedError(absl::StrCat(what, ": got ", bytes, " bytes, expected at most ",
                                                at_most, ": ", why, "; try again later")),
      kRetrySoon);
}

}  // namespace

bool ByteBudget::TakesTooMuch(int64_t held, int64_t own, int64_t of_call, int64_t bytes) const {
  if (own <= of_call) return false;
  const int64_t left = limit_ - held - bytes;
  return own + bytes > left || left < PartOfOthers();
}

// At least this connection holds something, though it may not be counted yet or no longer.
int64_t ByteBudget::PartOfOthers() const {
  return limit_ / (std::max<int64_t>(1, holders_.load(std::memory_order_relaxed)) + 1);
}

// Two calls of one connection that come at the same time may both be let in where one alone had
// taken the last of its part. The limit itself is never passed.
absl::Status ByteBudget::Reserve(Connection* connection, int64_t of_call, int64_t bytes,
                                 absl::string_view what) {
  const int64_t own =
      connection == nullptr ? 0 : connection->bytes_.load(std::memory_order_relaxed);
  int64_t held = in_flight_.load(std::memory_order_relaxed);
  do {
    if (limit_ == 0) continue;
    const int64_t free = limit_ - held;
    if (bytes > free) {
      refused_.fetch_add(1, std::memory_order_relaxed);
      return Refused(what, bytes, free,
                     absl::StrCat("requests and answers in flight hold ", held,
                                  " bytes of the server's ", flag_, ", ", limit_));
    }
    if (TakesTooMuch(held, own, of_call, bytes)) {
      refused_.fetch_add(1, std::memory_order_relaxed);
      const int64_t at_most = std::min((free - own) / 2, free - PartOfOthers());
      return Refused(what, bytes, std::max<int64_t>(0, at_most),
                     absl::StrCat("this connection holds ", own, " bytes, and ", free,
                                  " of the server's ", flag_, ", ", limit_, ", are left for all"));
    }
  } while (!in_flight_.compare_exchange_weak(held, held + bytes, std::memory_order_relaxed));
  if (connection != nullptr && bytes > 0 &&
      connection->bytes_.fetch_add(bytes, std::memory_order_relaxed) == 0) {
    holders_.fetch_add(1, std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

void ByteBudget::GiveBack(Connection* connection, int64_t bytes) {
  if (connection != nullptr && bytes > 0 &&
      connection->bytes_.fetch_sub(bytes, std::memory_order_relaxed) == bytes) {
    holders_.fetch_sub(1, std::memory_order_relaxed);
  }
  in_flight_.fetch_sub(bytes, std::memory_order_relaxed);
}

absl::StatusOr<ByteLease> ByteBudget::AcquireBytes(Charge charge, int64_t bytes,
                                                   absl::string_view what) {
  if (charge.client == nullptr) charge.new_request = false;
  if (charge.new_request) {
    AWQD_RETURN_IF_ERROR(charge.client->BeginRequest(std::chrono::steady_clock::now()));
  }
  ByteLease lease(this, std::move(charge));  // ends the request when there are no bytes for it
  AWQD_RETURN_IF_ERROR(lease.Grow(bytes, what));
  return lease;
}

void ByteLease::Release() {
  ShrinkTo(0);
  budget_ = nullptr;
  if (charge_.new_request) charge_.client->EndRequest();
  charge_ = {};
}

absl::Status ByteLease::Grow(int64_t bytes, absl::string_view what) {
  if (budget_ == nullptr || bytes == 0) return absl::OkStatus();
  Client* const client = charge_.client.get();
  if (client != nullptr) {
    AWQD_RETURN_IF_ERROR(client->bytes()->Reserve(nullptr, 0, bytes, what));
  }
  if (absl::Status status = budget_->Reserve(charge_.connection.get(), bytes_, bytes, what);
      !status.ok()) {
    if (client != nullptr) client->bytes()->GiveBack(nullptr, bytes);
    return status;
  }
  bytes_ += bytes;
  return absl::OkStatus();
}

bool ByteLease::GrowFromSpare(int64_t bytes) {
  if (budget_ == nullptr) return true;
  if (const int64_t limit = budget_->limit(); limit != 0) {
    const int64_t held = budget_->in_flight();
    const int64_t own = charge_.connection == nullptr ? 0 : charge_.connection->bytes();
    if (bytes > limit / 2 - held || budget_->TakesTooMuch(held, own, bytes_, bytes)) return false;
  }
  return Grow(bytes, "spare bytes").ok();
}

void ByteLease::ShrinkTo(int64_t bytes) {
  if (budget_ == nullptr || bytes >= bytes_) return;
  budget_->GiveBack(charge_.connection.get(), bytes_ - bytes);
  if (charge_.client != nullptr) charge_.client->bytes()->GiveBack(nullptr, bytes_ - bytes);
  bytes_ = bytes;
}

Client::Client(std::string name, const ClientQuota& quota, Clock::time_point now)
    : name_(std::move(name)),
      quota_(quota),
      burst_(std::max(1.0, quota.requests_per_second)),
      bytes_(quota.bytes_in_flight, "max_bytes_in_flight_per_client"),
      tokens_(burst_),
      refilled_(now) {}

double Client::TokensAt(Clock::time_point now) const {
  const double seconds = std::chrono::duration<double>(now - refilled_).count();
  return std::min(burst_, tokens_ + std::max(0.0, seconds) * quota_.requests_per_second);
}

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
  const double rate = quota_.requests_per_second;
  if (rate <= 0) return absl::OkStatus();
  absl::Duration delay;  // until there is a token
  {
    MutexLock lock(&mu_);
    tokens_ = TokensAt(now);
    refilled_ = std::max(refilled_, now);
    if (tokens_ < 1) {
      delay = absl::Seconds((1 - tokens_) / rate);
    } else {
      tokens_ -= 1;
    }
  }
  if (delay == absl::ZeroDuration()) return absl::OkStatus();
  EndRequest();
  return WithRetryDelay(
      absl::ResourceExhaustedError(
          absl::StrCat(name_, ": got more than ", rate,
                       " requests a second (max_requests_per_second_per_client); try again in ",
                       absl::FormatDuration(absl::Ceil(delay, absl::Milliseconds(1))))),
      delay);
}

bool Client::IsRested(Clock::time_point now) {
  MutexLock lock(&mu_);
  return quota_.requests_per_second <= 0 || TokensAt(now) >= burst_;
}

absl::StatusOr<ClientRequest> ClientLimiter::BeginRequest(absl::string_view name,
                                                          Client::Clock::time_point now) {
  if (!any()) return ClientRequest();
  std::shared_ptr<Client> client;
  {
    MutexLock lock(&mu_);
    auto found = clients_.find(name);
    if (found == clients_.end()) {
      if (clients_.size() >= sweep_at_) {
        // Whatever is in flight of a client holds it too, and clients are handed out under this
        // lock alone.
        std::erase_if(clients_, [now](const auto& entry) {
          return entry.second.use_count() == 1 && entry.second->IsRested(now);
        });
        sweep_at_ = std::max<size_t>(64, 2 * clients_.size());
      }
      client = std::make_shared<Client>(std::string(name), quota_, now);
      found = clients_.emplace(std::string(name), std::move(client)).first;
    }
    client = found->second;
  }
  AWQD_RETURN_IF_ERROR(client->BeginRequest(now));
  return ClientRequest(std::move(client));
}

int64_t ClientLimiter::clients() const {
  MutexLock lock(&mu_);
  return static_cast<int64_t>(clients_.size());
}

}  // namespace awqd::transport
