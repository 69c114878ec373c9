// Admission: what every call of every service passes, once on its way in and once on its way out.
//
// The loop leads every call through it: no handler can be reached without, and no handler calls it.
// What holds for all calls belongs here and nowhere else.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "grpcpp/support/status_code_enum.h"
#include "server/obs/call_recorder.h"
#include "server/obs/histogram.h"
#include "server/security/access.h"
#include "server/transport/drain.h"
#include "server/transport/rate_limits.h"
#include "server/transport/connection.h"
#include "server/transport/peer_calls.h"
#include "server/transport/write_timeout.h"

namespace awqd::transport {

class ServerCall;

// How calls of a method are treated while the server stops.
enum class WhileDraining {
  kRejected,  // answered UNAVAILABLE; the end waits for those in flight
  kServed,      // answered as ever until gRPC stops; the end does not wait for them
};

// The calls of one method that have ended. Bytes are those of messages, without gRPC's framing.
struct MethodCalls {
  static constexpr int kOutcomes = grpc::StatusCode::UNAUTHENTICATED + 1;

  std::string method;                         // "awqd.v1.ServerInfo/GetServerInfo"
  int64_t started = 0;                        // of which some have not ended
  std::array<int64_t, kOutcomes> outcomes{};  // how many, by the status that the server gave
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  absl::Duration time;  // from the door to the status, all calls added up
  // The same one by one: nanoseconds by status, and bytes.
  std::array<obs::HistogramData, kOutcomes> durations;
  obs::HistogramData received, sent;

  int64_t total() const;
};

// What a door lets one connection do.
struct AdmissionLimits {
  // In flight: open streams too, and calls of every service. A client that heeds HTTP/2's own limit
  // (Options::max_concurrent_streams) stays below; gRPC holds nobody to it who never acknowledges
  // it.
  int64_t calls_per_connection = 1024;
  // Ends the connection of this peer, as gRPC spells it, when four times as many calls of it were
  // refused: its client goes on without reading that. May be null.
  std::function<void(const std::string& peer)> cut;
  // How long nothing has been on the way between the server and this peer; infinite when nobody
  // knows. May be null.
  std::function<absl::Duration(const std::string& peer)> still_for;
  // How long an answer, or a message of a stream, may wait for its client to take it.
  absl::Duration send_timeout = absl::InfiniteDuration();
  ClientQuota client;  // of one identity, or of one machine
  PeerCallLimits peer;
};

// Thread-safe once the server has started. Outlives the gRPC server.
class Admission {
 public:
  // `recorder`, which outlives the admission, is told of every call; it may be null.
  explicit Admission(const AdmissionLimits& limits = {}, obs::CallRecorder* recorder = nullptr)
      : calls_per_connection_(limits.calls_per_connection),
        cut_(limits.cut),
        still_for_(limits.still_for),
        recorder_(recorder),
        clients_(limits.client),
        peers_(limits.peer),
        sends_(limits.send_timeout) {}

  // The name in MethodCalls::method of all methods that the server does not have.
  static constexpr absl::string_view kUnknownMethod = "(unknown)";

  // One method in the door's table. Apart from its neighbours in memory, because every call writes.
  class alignas(64) Entry {
   public:
    Entry(absl::string_view method, security::Need need, WhileDraining while_draining);

    absl::string_view method() const { return absl::string_view(path_).substr(1); }
    // As it is on the wire.
    const char* path() const { return path_.c_str(); }

   private:
    friend class Admission;
    const std::string path_;
    const security::Need need_;
    const WhileDraining while_draining_;
    mutable std::atomic<int64_t> started_{0};
    std::vector<std::unique_ptr<obs::Histogram>> durations_;  // by status
    obs::Histogram received_{obs::kSizeBounds}, sent_{obs::kSizeBounds};
  };

  // Before the server starts. `method` is "package.Service/Method", and new. Owned by the door.
  Entry* Add(absl::string_view method, security::Need need, WhileDraining while_draining);
  // Before the server starts; until then nobody has an identity, and none is asked for.
  void Guard(std::unique_ptr<security::Access> access) { access_ = std::move(access); }

  // Before the server starts, once. Calls that ask for Need::kInfer, and were let in, end with what
  // `value` gives, as metadata of this name. It is called on the threads that end calls.
  void SetTrailingMetadata(std::string key, std::function<std::string()> value);

  // A call on its way in, before its handler. False: it is answered here, at once or later.
  bool Enter(ServerCall* call, const Entry& entry);
  // A call on its way out, once: its status is known and is sent next. On any thread.
  void Leave(ServerCall* call, Entry* entry, grpc::StatusCode outcome);

  // How much longer a call that has sent its last message waits before its status, while the server
  // stops: until its connection has been still for kRoundTrip. Zero or less: not at all.
  //
  // gRPC closes a connection that it has told to go away together with its last call. A client that
  // acknowledges something after that is answered with a reset, and loses what it has not read.
  absl::Duration LastWords(const ServerCall& call) const;
  // A call that has ended, last of all: its status was sent.
  void Gone(ServerCall* call);
  // What `call` sends was not taken in time, and the call is cancelled. On any thread.
  void NotTaken(const ServerCall& call);

  Drain* gate() { return &gate_; }
  WriteTimeout* sends() { return &sends_; }
  const ClientLimiter& clients() const { return clients_; }
  // For what is asked for by other ways than a call.
  const security::Access& access() const { return *access_; }
  // One for each method, in the order of Add. What Leave has counted is in it.
  std::vector<MethodCalls> Calls() const;
  // Of all methods, each once.
  std::vector<std::string> Services() const;

 private:
  bool TurnAway(ServerCall* call);
  bool HasRoom(ServerCall* call);
  // The trace that the call belongs to, which its client is told.
  void Trace(ServerCall* call);
  void AddLastMetadata(ServerCall* call) const;

  // Who calls, whether it may, and whether it does so too much.
  absl::Status Admit(ServerCall* call, const Entry& entry);

  const int64_t calls_per_connection_;
  const std::function<void(const std::string& peer)> cut_;
  const std::function<absl::Duration(const std::string& peer)> still_for_;
  obs::CallRecorder* const recorder_;
  Drain gate_;
  std::unique_ptr<security::Access> access_ =
      std::make_unique<security::Access>(security::Options());
  ClientLimiter clients_;
  PeerCalls peers_;
  const std::shared_ptr<Connections> connections_ = Connections::Make();
  WriteTimeout sends_;
  std::string last_key_;
  std::function<std::string()> last_value_;  // null: nothing is told at the end
  std::vector<std::unique_ptr<Entry>> entries_;
};

}  // namespace awqd::transport
