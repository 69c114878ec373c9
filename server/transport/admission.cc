// The checks of a call that arrives, and the records of one that ends.
#include "server/transport/admission.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpc/grpc_security_constants.h"
#include "grpcpp/security/auth_context.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/retry_delay.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/obs/origin.h"
#include "server/transport/call.h"

namespace awqd::transport {
namespace {

// gRPC calls the peer of every socket file so.
std::string RingPeer() { return "unix:"; }

absl::string_view View(const grpc::string_ref& text) { return {text.data(), text.size()}; }

// gRPC's properties of a certificate, and the prefixes that Identities gives their names.
constexpr std::pair<const char*, absl::string_view> kNames[] = {
    {GRPC_X509_CN_PROPERTY_NAME, "cn:"},   {GRPC_PEER_DNS_PROPERTY_NAME, "dns:"},
    {GRPC_PEER_URI_PROPERTY_NAME, "uri:"}, {GRPC_PEER_EMAIL_PROPERTY_NAME, "email:"},
    {GRPC_PEER_IP_PROPERTY_NAME, "ip:"},
};

security::Credentials ReadCredentials(const grpc::ServerContext& context) {
  security::Credentials out;
  const auto [begin, end] = context.client_metadata().equal_range("authorization");
  for (auto value = begin; value != end; ++value) {
    out.authorizations.emplace_back(View(value->second));
  }
  const std::shared_ptr<const grpc::AuthContext> peer = context.auth_context();
  if (peer == nullptr || !peer->IsPeerAuthenticated()) return out;
  for (const auto& [property, kind] : kNames) {
    for (const grpc::string_ref& value : peer->FindPropertyValues(property)) {
      out.certificate_names.push_back(absl::StrCat(kind, View(value)));
    }
  }
  return out;
}

}  // namespace

static_assert(obs::MethodStats::kCodes == grpc::StatusCode::UNAUTHENTICATED + 1);

Admission::Entry::Entry(absl::string_view method, security::Need need)
    : path_(absl::StrCat("/", method)), need_(need) {
  for (int i = 0; i < obs::MethodStats::kCodes; ++i) durations_.emplace_back(kLatencyBounds);
}

Admission::Admission(const AdmissionLimits& limits, obs::CallRecorder* recorder)
    : limits_(limits),
      recorder_(recorder),
      clients_(limits.client),
      peers_(limits.peer),
      write_timeout_(limits.write_timeout) {}

Admission::Entry* Admission::AddMethod(absl::string_view method, security::Need need) {
  entries_.push_back(std::make_unique<Entry>(method, need));
  return entries_.back().get();
}

void Admission::RejectWhileBusy(absl::string_view method) {
  for (const auto& entry : entries_) {
    if (entry->method() == method) entry->rejected_while_busy_ = true;
  }
}

void Admission::SetTrailingMetadata(std::string key, std::function<std::string()> value) {
  trailing_key_ = std::move(key);
  trailing_value_ = std::move(value);
}

bool Admission::Admit(ServerCall* call, const Entry& entry) {
  call->state_.arrived_at = std::chrono::steady_clock::now();
  entry.started_.fetch_add(1, std::memory_order_relaxed);
  if (recorder_ != nullptr) BeginTrace(call);
  const absl::Status status = Check(call, entry);
  call->state_.admitted = status.ok();
  if (status.ok()) return true;
  // Only the drain answers UNAVAILABLE, and it may hold the answer back.
  const auto answer = [call, status] { call->FinishWith(status); };
  absl::IsUnavailable(status) ? drain_.Reject(answer) : answer();
  return false;
}

absl::Status Admission::Check(ServerCall* call, const Entry& entry) {
  AWQD_RETURN_IF_ERROR(CheckConnection(call));
  AWQD_RETURN_IF_ERROR(CheckDrain(&call->state_, entry));
  AWQD_RETURN_IF_ERROR(CheckAccess(call, entry));
  AWQD_RETURN_IF_ERROR(CheckClient(&call->state_, entry, [call] { return call->peer(); }));
  return entry.rejected_while_busy_ ? CheckTime(*call) : absl::OkStatus();
}

// The message is not here yet, and its answer must leave in time.
absl::Status Admission::CheckTime(const ServerCall& call) {
  // Some are let in all the same, because only their times tell that there is less to do.
  constexpr int64_t kSeen = 16;
  absl::Time deadline = call.deadline();
  if (deadline < absl::InfiniteFuture()) {
    const absl::Duration transit = transit_.Expect(call.state_.arrived_at);
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) return absl::DeadlineExceededError("the deadline has passed");
    if (transit > left && (unread_.fetch_add(1, std::memory_order_relaxed) + 1) % kSeen != 0) {
      return WithRetryDelay(
          absl::ResourceExhaustedError(absl::StrCat(
              "deadline: got ", absl::FormatDuration(left), ", expected at least ",
              absl::FormatDuration(transit), ", as it takes so long to receive a request and to ",
              "send an answer while so many are on their way")),
          transit - left);
    }
    deadline -= transit;
  }
  return busy_check_ == nullptr ? absl::OkStatus() : busy_check_(deadline);
}

absl::Status Admission::CheckConnection(ServerCall* call) {
  const int64_t calls = call->state_.connection.Begin(connections_->Find(call->context_.c_call()));
  const bool too_many = calls > limits_.calls_per_connection;
  Connection* const connection = call->connection().get();
  const auto peer = [call] { return obs::PeerHost(call->peer()); };
  peers_.CountArrival(connection, peer, call->state_.arrived_at);
  if (!too_many && calls <= peers_.few()) return absl::OkStatus();
  const PeerCalls::Place place = peers_.Admit(connection, !too_many, peer);
  call->state_.connection.SetPlace(place);
  if (place == PeerCalls::Place::kAdmitted) return absl::OkStatus();
  if (place == PeerCalls::Place::kDropped) call->context_.TryCancel();
  if (too_many && connection->CountRejected() == 4 * limits_.calls_per_connection &&
      limits_.reset != nullptr) {
    limits_.reset(call->peer());
  }
  obs::LogLimited(obs::LogLevel::kWarning,
                  absl::StrCat("call refused: too many on ",
                               too_many ? "one connection" : "the connections of one peer"),
                  {{"peer", obs::LogText(call->peer())}});
  return absl::ResourceExhaustedError(
      too_many ? absl::StrCat("calls: got more than ", limits_.calls_per_connection,
                              " in flight on one connection, which is the most")
               : absl::StrCat("calls: got ", calls,
                              " in flight on one connection, expected no more than are "
                              "left to the others of its peer, or ",
                              peers_.few(), "; try again when some have ended"));
}

absl::Status Admission::CheckDrain(CallState* call, const Entry& entry) {
  if (entry.need_ == security::Need::kHealth) return absl::OkStatus();
  // The guard begins first: a server that stops must see every call that may be admitted.
  call->in_flight = drain_.CountCall();
  if (drain_.open()) return absl::OkStatus();
  return absl::UnavailableError(Drain::UnavailableStatus().error_message());
}

absl::Status Admission::CheckAccess(ServerCall* call, const Entry& entry) {
  security::Credentials shown;
  if (access_->has_identities()) shown = ReadCredentials(call->context_);
  AWQD_ASSIGN_OR_RETURN(call->state_.identity, access_->Admit(entry.method(), entry.need_, shown));
  return absl::OkStatus();
}

absl::Status Admission::CheckClient(CallState* call, const Entry& entry,
                                    absl::FunctionRef<std::string()> peer) {
  // Health is not limited: a client that gets no answer takes a busy server for a dead one.
  if (!clients_.any() || entry.need_ == security::Need::kHealth) return absl::OkStatus();
  const std::string name = call->identity != nullptr ? call->identity->name : obs::PeerHost(peer());
  AWQD_ASSIGN_OR_RETURN(call->client_request, clients_.BeginRequest(name, call->arrived_at));
  return absl::OkStatus();
}

void Admission::BeginTrace(ServerCall* call) {
  const auto& metadata = call->context_.client_metadata();
  const auto it = metadata.find("traceparent");
  CallState& state = call->state_;
  state.trace = recorder_->Began(it == metadata.end() ? absl::string_view() : View(it->second));
  if (recorder_->tracer() != nullptr) state.span = state.trace.ref();
  if (state.trace.valid()) {
    call->context_.AddInitialMetadata("traceparent", state.trace.traceparent());
  }
}

void Admission::RecordOutcome(ServerCall* call, Entry* entry) {
  if (call->state_.admitted && entry->need_ == security::Need::kInfer &&
      trailing_value_ != nullptr) {
    AddTrailingMetadata(call);
  }
  CountOutcome(call->state_, entry);
}

void Admission::CountOutcome(const CallState& call, Entry* entry) {
  const bool known = call.outcome >= 0 && call.outcome < obs::MethodStats::kCodes;
  const auto took = call.outcome_at - call.arrived_at;
  entry->durations_[known ? call.outcome : grpc::StatusCode::UNKNOWN].Observe(
      std::chrono::nanoseconds(took).count());
  entry->received_.Observe(call.received_bytes.load(std::memory_order_relaxed));
  entry->sent_.Observe(call.sent_bytes.load(std::memory_order_relaxed));
}

absl::Status Admission::AdmitRingCall(CallState* call, const Entry& entry, const RingClient& client,
                                      absl::Time deadline, absl::string_view traceparent) {
  call->arrived_at = std::chrono::steady_clock::now();
  entry.started_.fetch_add(1, std::memory_order_relaxed);
  if (recorder_ != nullptr) {
    call->trace = recorder_->Began(traceparent);
    if (recorder_->tracer() != nullptr) call->span = call->trace.ref();
  }
  call->connection.Begin(client.connection);
  call->identity = client.identity;
  AWQD_RETURN_IF_ERROR(CheckDrain(call, entry));
  AWQD_RETURN_IF_ERROR(CheckClient(call, entry, RingPeer));
  if (entry.rejected_while_busy_ && busy_check_ != nullptr) {
    AWQD_RETURN_IF_ERROR(busy_check_(deadline));
  }
  call->admitted = true;
  return absl::OkStatus();
}

void Admission::RecordRingOutcome(CallState* call, Entry* entry, absl::StatusCode outcome) {
  call->outcome_at = std::chrono::steady_clock::now();
  call->outcome = static_cast<grpc::StatusCode>(outcome);
  CountOutcome(*call, entry);
}

void Admission::RecordRingEnd(CallState* call, const Entry& entry) {
  Record(call, entry.method(), RingPeer);
}

void Admission::AddTrailingMetadata(ServerCall* call) const {
  // An answer without it is still the answer.
  (void)CatchExceptions([&] {
    call->context_.AddTrailingMetadata(trailing_key_, trailing_value_());
    return absl::OkStatus();
  });
}

absl::Duration Admission::StatusDelay(const ServerCall& call) const {
  return limits_.idle_time == nullptr ? absl::ZeroDuration()
                                      : kRoundTrip - limits_.idle_time(call.peer());
}

void Admission::RecordEnd(ServerCall* call) {
  Record(&call->state_, call->method(), [call] { return call->peer(); });
}

void Admission::Record(CallState* call, absl::string_view method,
                       absl::FunctionRef<std::string()> peer) {
  if (recorder_ == nullptr) return;
  const auto now = std::chrono::steady_clock::now();
  const auto code = static_cast<absl::StatusCode>(call->outcome);
  const absl::Duration total = absl::FromChrono(now - call->arrived_at);
  absl::Duration waited = call->notes.waited();
  if (waited > absl::ZeroDuration()) waited += absl::FromChrono(now - call->outcome_at);
  const obs::CallRecorder::Wanted wanted = recorder_->Wants(method, code, waited, call->trace);
  if (!wanted.any()) return;
  const absl::Time ended = absl::Now();
  const auto record = [&]() -> absl::Status {
    recorder_->Ended({.method = std::string(method),
                      .peer = peer(),
                      .identity = call->identity == nullptr ? "" : call->identity->name,
                      .trace = call->trace,
                      .code = code,
                      .began = ended - total,
                      .answered = ended - absl::FromChrono(now - call->outcome_at),
                      .ended = ended,
                      .received_bytes = call->received_bytes.load(),
                      .sent_bytes = call->sent_bytes.load(),
                      .sum = call->notes.ReleaseSum()},
                     wanted);
    return absl::OkStatus();
  };
  (void)CatchExceptions(record);  // a record that there is no memory for is not worth the process
}

std::vector<obs::MethodStats> Admission::Calls() const {
  std::vector<obs::MethodStats> out;
  for (const auto& entry : entries_) {
    obs::MethodStats& calls = out.emplace_back();
    calls.method = std::string(entry->method());
    calls.received_bytes = entry->received_.data();
    calls.sent_bytes = entry->sent_.data();
    for (int i = 0; i < obs::MethodStats::kCodes; ++i) {
      calls.durations_ns[i] = entry->durations_[i].data();
    }
    // Read last, so that no call has ended that had not begun.
    calls.started = entry->started_.load(std::memory_order_relaxed);
  }
  return out;
}

std::vector<std::string> Admission::Services() const {
  std::vector<std::string> out;
  for (const auto& entry : entries_) {
    const size_t slash = entry->method().find('/');
    if (slash == absl::string_view::npos) continue;                // of unknown methods
    if (absl::StartsWith(entry->method(), kRingPrefix)) continue;  // no service of gRPC
    const std::string service(entry->method().substr(0, slash));
    if (std::find(out.begin(), out.end(), service) == out.end()) out.push_back(service);
  }
  return out;
}

}  // namespace awqd::transport
