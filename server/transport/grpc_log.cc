// Reads gRPC's messages, and follows its handshakes by them.
#include "server/transport/grpc_log.h"

#include <atomic>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "grpcpp/version_info.h"
#include "kernels/base/mutex.h"
#include "server/obs/logging.h"
#include "server/obs/origin.h"

// gRPC 1.51 has a function for its log. Newer versions log through Abseil's.
#if GRPC_CPP_VERSION_MAJOR > 1 || GRPC_CPP_VERSION_MINOR >= 66
#include "absl/base/log_severity.h"
#include "absl/log/globals.h"
#include "absl/log/initialize.h"
#include "absl/log/log_entry.h"
#include "absl/log/log_sink.h"
#include "absl/log/log_sink_registry.h"
#else
#include "grpc/grpc.h"
#include "grpc/support/log.h"
#endif

namespace awqd::transport {
namespace {

std::atomic<int64_t> g_failed_handshakes{0};

// HandshakePeer's, of this thread; empty without one.
thread_local std::string t_peer;

// gRPC's own messages name its source files and are for debugging it: they become debug lines of
// ours.
void LogGrpcMessage(absl::string_view message) {
  obs::LogEvent(obs::LogLevel::kDebug, "grpc", {{"message", obs::LogText(message, 1024)}});
}

// The part between the first `begin` and the next `end`; empty without one.
absl::string_view Between(absl::string_view text, absl::string_view begin, absl::string_view end) {
  const size_t at = text.find(begin);
  if (at == text.npos) return "";
  text.remove_prefix(at + begin.size());
  return text.substr(0, text.find(end));
}

// `text`: "Tls handshake failed: SSL_ERROR_SSL: error:0A0000C7:SSL routines::REASON", or with
// OPENSSL_internal between the last colons.
void CountFailedHandshake(absl::string_view text, absl::string_view peer) {
  ++g_failed_handshakes;
  absl::string_view reason = text.substr(0, text.find(" {"));
  if (const size_t colon = reason.rfind(':'); colon != reason.npos) {
    reason = absl::StripAsciiWhitespace(reason.substr(colon + 1));
  }
  // Either side may have ended it.
  if (absl::StrContains(text, "Handshake read failed")) {
    reason = "the client ended it; does it trust the server's certificate?";
  }
  if (peer.empty()) peer = "unknown";
  obs::LogRarely(obs::LogLevel::kWarning, "TLS handshake failed",
                 {{"reason", obs::LogText(reason)}, {"peer", obs::LogText(peer)}});
}

void WatchHeaders(absl::string_view message) {
  if (!absl::StrContains(message, "metadata size exceeds")) return;
  obs::LogRarely(obs::LogLevel::kWarning,
                 "call refused with RESOURCE_EXHAUSTED: headers larger than max_metadata_bytes",
                 {{"bytes", Between(message, "(", " ")}});
}

#if GRPC_CPP_VERSION_MAJOR > 1 || GRPC_CPP_VERSION_MINOR >= 66
// These versions begin a handshake on a thread of their own, and name the peer only where the
// connection broke.
void WatchGrpcMessage(absl::string_view message) {
  WatchHeaders(message);
  for (const absl::string_view begin :
       {"Security handshake failed: UNKNOWN:Tls ", "Security handshake failed: UNKNOWN:Handshake ",
        "Handshake failed with error "}) {
    const size_t at = message.find(begin);
    if (at == message.npos) continue;
    return CountFailedHandshake(message.substr(at), Between(message, "target_address:\"", "\""));
  }
}

void RedirectGrpcLog() {
  struct Sink final : absl::LogSink {
    void Send(const absl::LogEntry& entry) override {
      WatchGrpcMessage(entry.text_message());
      LogGrpcMessage(entry.text_message());
    }
  };
  // Kept until the process ends, as gRPC is.
  [[maybe_unused]] static const bool kept = [] {
    absl::AddLogSink(new Sink);
    absl::SetStderrThreshold(absl::LogSeverityAtLeast::kInfinity);
    absl::InitializeLog();  // until then every line goes to stderr as well, as its sender wrote it
    return true;
  }();
}
#else
// The peers of handshakes that have begun, by gRPC's object. gRPC tells the end of each.
class Handshakes {
 public:
  // `message`: "handshake_manager OBJECT: EVENT". gRPC has a third event, which comes before these.
  void Follow(absl::string_view message) {
    const absl::string_view object = Between(message, "handshake_manager ", ":");
    if (absl::StrContains(message, ": calling handshaker ")) {
      if (t_peer.empty()) return;
      MutexLock lock(&mu_);
      peers_[std::string(object)] = t_peer;
    } else if (absl::StrContains(message, ": handshaking complete ")) {
      const std::string peer = Remove(object);
      const absl::string_view error = message.substr(message.find("error=") + 6);
      if (absl::StartsWith(error, "UNKNOWN:Tls ") ||
          absl::StartsWith(error, "UNKNOWN:Handshake ")) {
        CountFailedHandshake(error, peer);
      }
    }
  }

 private:
  std::string Remove(absl::string_view object) {
    MutexLock lock(&mu_);
    const auto it = peers_.find(object);
    if (it == peers_.end()) return "";
    std::string peer = std::move(it->second);
    peers_.erase(it);
    return peer;
  }

  Mutex mu_;
  std::map<std::string, std::string, std::less<>> peers_ ABSL_GUARDED_BY(mu_);
};

void RedirectGrpcLog() {
  // gRPC tells of clients in messages of its level debug. It has one for each call of a connection
  // that breaks, too: these are told apart by the source file, which is cheap. It traces handshakes
  // in a few messages for each connection.
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_DEBUG);
  grpc_tracer_set_enabled("handshaker", 1);
  gpr_set_log_function([](gpr_log_func_args* args) {
    static const bool wants_all = std::getenv("GRPC_VERBOSITY") != nullptr;
    static Handshakes& handshakes = *new Handshakes;  // kept until the process ends, as gRPC is
    const absl::string_view file = args->file;
    if (absl::EndsWith(file, "/transport/handshaker.cc")) handshakes.Follow(args->message);
    if (absl::EndsWith(file, "/hpack_parser.cc")) WatchHeaders(args->message);
    if (wants_all || args->severity == GPR_LOG_SEVERITY_ERROR) LogGrpcMessage(args->message);
  });
}
#endif

}  // namespace

void PrepareGrpcLog() { RedirectGrpcLog(); }

int64_t FailedHandshakes() { return g_failed_handshakes; }

HandshakePeer::HandshakePeer(int fd) { t_peer = obs::Origin(fd); }

HandshakePeer::~HandshakePeer() { t_peer.clear(); }

}  // namespace awqd::transport
