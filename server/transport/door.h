// Door: what every call of every service passes, once on its way in and once on its way out.
//
// The loop leads every call through it: no handler can be reached without, and no handler calls it.
// What holds for all calls belongs here and nowhere else.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "grpcpp/support/status_code_enum.h"
#include "server/obs/call_recorder.h"
#include "server/obs/histogram.h"
#include "server/transport/call_gate.h"

namespace awqd::transport {

class ServerCall;

// How calls of a method are treated while the server stops.
enum class WhileDraining {
  kTurnedAway,  // answered UNAVAILABLE; the end waits for those in flight
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

// Thread-safe once the server has started. Outlives the gRPC server.
class Door {
 public:
  // `recorder`, which outlives the door, is told of every call; it may be null.
  explicit Door(obs::CallRecorder* recorder = nullptr) : recorder_(recorder) {}

  // The name in MethodCalls::method of all methods that the server does not have.
  static constexpr absl::string_view kUnknownMethod = "(unknown)";

  // One method in the door's table. Apart from its neighbours in memory, because every call writes.
  class alignas(64) Entry {
   public:
    Entry(absl::string_view method, WhileDraining while_draining);

    absl::string_view method() const { return absl::string_view(path_).substr(1); }
    // As it is on the wire.
    const char* path() const { return path_.c_str(); }

   private:
    friend class Door;
    const std::string path_;
    const WhileDraining while_draining_;
    mutable std::atomic<int64_t> started_{0};
    std::vector<std::unique_ptr<obs::Histogram>> durations_;  // by status
    obs::Histogram received_{obs::kSizeBounds}, sent_{obs::kSizeBounds};
  };

  // Before the server starts. `method` is "package.Service/Method", and new. Owned by the door.
  Entry* Add(absl::string_view method, WhileDraining while_draining);

  // A call on its way in, before its handler. False: it is answered here, at once or later.
  bool Enter(ServerCall* call, const Entry& entry);
  // A call on its way out, once: its status is known and is sent next. On any thread.
  void Leave(const ServerCall& call, Entry* entry, grpc::StatusCode outcome);

  // A call that has ended, last of all: its status was sent.
  void Gone(ServerCall* call);

  CallGate* gate() { return &gate_; }
  // One for each method, in the order of Add. What Leave has counted is in it.
  std::vector<MethodCalls> Calls() const;
  // Of all methods, each once.
  std::vector<std::string> Services() const;

 private:
  // The trace that the call belongs to, which its client is told.
  void Trace(ServerCall* call);

  obs::CallRecorder* const recorder_;
  CallGate gate_;
  std::vector<std::unique_ptr<Entry>> entries_;
};

}  // namespace awqd::transport
