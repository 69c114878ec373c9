// In: what may refuse a call. Out: what is kept of it.
#include "server/transport/door.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "absl/time/clock.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/transport/call.h"
#include "server/transport/caller.h"
#include "server/transport/guard.h"

namespace awqd::transport {

int64_t MethodCalls::total() const {
  return std::accumulate(outcomes.begin(), outcomes.end(), int64_t{0});
}

Door::Entry::Entry(absl::string_view method, security::Need need, WhileDraining while_draining)
    : path_(absl::StrCat("/", method)), need_(need), while_draining_(while_draining) {
  for (int i = 0; i < MethodCalls::kOutcomes; ++i) {
    durations_.push_back(std::make_unique<obs::Histogram>(obs::kLatencyBounds));
  }
}

Door::Entry* Door::Add(absl::string_view method, security::Need need,
                       WhileDraining while_draining) {
  entries_.push_back(std::make_unique<Entry>(method, need, while_draining));
  return entries_.back().get();
}

bool Door::Enter(ServerCall* call, const Entry& entry) {
  call->entered_ = std::chrono::steady_clock::now();
  entry.started_.fetch_add(1, std::memory_order_relaxed);
  if (recorder_ != nullptr) Trace(call);
  if (!HasRoom(call)) return false;
  if (entry.while_draining_ == WhileDraining::kTurnedAway && TurnAway(call)) return false;
  const absl::Status status = Admit(call, entry);
  call->admitted_ = status.ok();
  if (!status.ok()) call->Refuse(status);
  return status.ok();
}

absl::Status Door::Admit(ServerCall* call, const Entry& entry) {
  AWQD_ASSIGN_OR_RETURN(call->identity_,
                        access_->Admit(entry.method(), entry.need_, Caller(call->context_)));
  // A server that is busy is not one that is ill: who asks for that is not bounded.
  if (!clients_.any() || entry.need_ == security::Need::kHealth) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(
      call->client_request_,
      clients_.Begin(call->identity_ != nullptr ? call->identity_->name : MachineOf(call->peer()),
                     call->entered_));
  return absl::OkStatus();
}

bool Door::HasRoom(ServerCall* call) {
  const int64_t calls = call->connection_.Hold(connections_->Of(call->context_.c_call()));
  const bool too_many = calls > calls_per_connection_;
  PeerCalls::Share* const share = call->connection()->share();
  const auto peer = [call] { return MachineOf(call->peer()); };
  peers_.Count(share, peer, call->entered_);
  if (!too_many && calls <= peers_.few()) return true;
  const PeerCalls::Place place = peers_.Take(share, !too_many, peer);
  call->connection_.Keep(place);
  if (place == PeerCalls::Place::kTaken) return true;
  if (place == PeerCalls::Place::kDropped) call->context_.TryCancel();
  if (too_many && call->connection()->Refused() == 4 * calls_per_connection_ && cut_ != nullptr) {
    cut_(call->peer());
  }
  const absl::string_view whose = too_many ? "one connection" : "the connections of one peer";
  obs::LogLimited(obs::LogLevel::kWarning, absl::StrCat("call refused: too many on ", whose),
                  {{"peer", obs::LogText(call->peer())}});
  call->Finish({grpc::StatusCode::RESOURCE_EXHAUSTED,
                too_many ? absl::StrCat("calls: got more than ", calls_per_connection_,
                                        " in flight on one connection, which is the most")
                         : absl::StrCat("calls: got ", calls,
                                        " in flight on one connection, expected no more than are "
                                        "left to the others of its peer, or ",
                                        peers_.few(), "; try again when some have ended")});
  return false;
}

bool Door::TurnAway(ServerCall* call) {
  // The ticket comes first: the end of the server must see every call that the gate may let in.
  call->ticket_.Hold(&gate_);
  if (gate_.open()) return false;
  gate_.TurnAway([call] { call->Finish(CallGate::Draining()); });
  return true;
}

void Door::NotTaken(const ServerCall& call) {
  obs::LogLimited(obs::LogLevel::kWarning,
                  "call cancelled: an answer was not taken in send_timeout_s",
                  {{"method", call.method()}, {"peer", obs::LogText(call.peer())}});
}

void Door::Leave(ServerCall* call, Entry* entry, grpc::StatusCode outcome) {
  if (call->admitted_ && entry->need_ == security::Need::kInfer && last_value_ != nullptr) {
    AddLastMetadata(call);
  }
  const bool known = outcome >= 0 && outcome < MethodCalls::kOutcomes;
  const auto took = call->left_ - call->entered_;
  entry->durations_[known ? outcome : grpc::StatusCode::UNKNOWN]->Observe(
      std::chrono::nanoseconds(took).count());
  entry->received_.Observe(call->received_bytes());
  entry->sent_.Observe(call->sent_bytes());
}

absl::Duration Door::LastWords(const ServerCall& call) const {
  return still_for_ == nullptr ? absl::ZeroDuration() : kRoundTrip - still_for_(call.peer());
}

void Door::TellAtTheEnd(std::string key, std::function<std::string()> value) {
  last_key_ = std::move(key);
  last_value_ = std::move(value);
}

void Door::AddLastMetadata(ServerCall* call) const {
  // An answer without it is still the answer.
  (void)Guarded([&] {
    call->context_.AddTrailingMetadata(last_key_, last_value_());
    return absl::OkStatus();
  });
}

void Door::Trace(ServerCall* call) {
  const auto& metadata = call->context_.client_metadata();
  const auto it = metadata.find("traceparent");
  absl::string_view header;
  if (it != metadata.end()) header = {it->second.data(), it->second.size()};
  call->trace_ = recorder_->Began(header);
  if (recorder_->tracer() != nullptr) call->span_ = call->trace_.ref();
  if (call->trace_.valid()) {
    call->context_.AddInitialMetadata("traceparent", call->trace_.traceparent());
  }
}

void Door::Gone(ServerCall* call) {
  if (recorder_ == nullptr) return;
  const auto now = std::chrono::steady_clock::now();
  const auto code = static_cast<absl::StatusCode>(call->outcome_);
  const absl::Duration total = absl::FromChrono(now - call->entered_);
  absl::Duration waited = call->notes_.waited();
  if (waited > absl::ZeroDuration()) waited += absl::FromChrono(now - call->left_);
  const obs::CallRecorder::Wanted wanted =
      recorder_->Wants(call->method(), code, waited, call->trace_);
  if (!wanted.any()) return;
  const absl::Time ended = absl::Now();
  const auto record = [&]() -> absl::Status {
    recorder_->Ended({.method = std::string(call->method()),
                      .peer = call->peer(),
                      .identity = call->identity_ == nullptr ? "" : call->identity_->name,
                      .trace = call->trace_,
                      .code = code,
                      .began = ended - total,
                      .answered = ended - absl::FromChrono(now - call->left_),
                      .ended = ended,
                      .received_bytes = call->received_bytes(),
                      .sent_bytes = call->sent_bytes(),
                      .sum = call->notes_.ReleaseSum()},
                     wanted);
    return absl::OkStatus();
  };
  (void)Guarded(record);  // a record that there is no memory for is not worth the process
}

std::vector<MethodCalls> Door::Calls() const {
  std::vector<MethodCalls> out;
  for (const auto& entry : entries_) {
    MethodCalls calls = {.method = std::string(entry->method()),
                         .received = entry->received_.data(),
                         .sent = entry->sent_.data()};
    for (int i = 0; i < MethodCalls::kOutcomes; ++i) {
      calls.durations[i] = entry->durations_[i]->data();
      calls.outcomes[i] = calls.durations[i].total();
      calls.time += absl::Nanoseconds(calls.durations[i].sum);
    }
    // Read last, so that no call has ended that had not begun.
    calls.started = entry->started_.load(std::memory_order_relaxed);
    calls.received_bytes = calls.received.sum;
    calls.sent_bytes = calls.sent.sum;
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
