// In: what may refuse a call. Out: what is kept of it.
#include "server/transport/door.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "server/transport/call.h"

namespace awqd::transport {

int64_t MethodCalls::total() const {
  return std::accumulate(outcomes.begin(), outcomes.end(), int64_t{0});
}

Door::Entry* Door::Add(absl::string_view method, WhileDraining while_draining) {
  entries_.push_back(std::make_unique<Entry>(method, while_draining));
  return entries_.back().get();
}

bool Door::Enter(ServerCall* call, const Entry& entry) {
  call->entered_ = std::chrono::steady_clock::now();
  if (entry.while_draining_ == WhileDraining::kServed) return true;
  // The ticket comes first: the end of the server must see every call that the gate may let in.
  call->ticket_.Hold(&gate_);
  if (gate_.open()) return true;
  gate_.TurnAway([call] { call->Finish(CallGate::Draining()); });
  return false;
}

void Door::Leave(const ServerCall& call, Entry* entry, grpc::StatusCode outcome) {
  constexpr auto kOrder = std::memory_order_relaxed;
  const bool known = outcome >= 0 && outcome < MethodCalls::kOutcomes;
  const auto took = std::chrono::steady_clock::now() - call.entered_;
  entry->outcomes_[known ? outcome : grpc::StatusCode::UNKNOWN].fetch_add(1, kOrder);
  entry->received_bytes_.fetch_add(call.received_bytes(), kOrder);
  entry->sent_bytes_.fetch_add(call.sent_bytes(), kOrder);
  entry->time_ns_.fetch_add(std::chrono::nanoseconds(took).count(), kOrder);
}

std::vector<MethodCalls> Door::Calls() const {
  std::vector<MethodCalls> out;
  for (const auto& entry : entries_) {
    MethodCalls calls = {.method = std::string(entry->method())};
    std::copy(entry->outcomes_.begin(), entry->outcomes_.end(), calls.outcomes.begin());
    calls.received_bytes = entry->received_bytes_;
    calls.sent_bytes = entry->sent_bytes_;
    calls.time = absl::Nanoseconds(entry->time_ns_.load());
    out.push_back(std::move(calls));
  }
  return out;
}

std::vector<std::string> Door::Services() const {
  std::vector<std::string> out;
  for (const auto& entry : entries_) {
    const size_t slash = entry->method().find('/');
    if (slash == absl::string_view::npos) continue;  // of unknown methods
    const std::string service(entry->method().substr(0, slash));
    if (std::find(out.begin(), out.end(), service) == out.end()) out.push_back(service);
  }
  return out;
}

}  // namespace awqd::transport
