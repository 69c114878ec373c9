// gRPC 1.51 has a function for its log; newer ones log through Abseil's.
#include "server/transport/grpc_log.h"

#include "grpcpp/version_info.h"
#include "server/obs/logging.h"

#if GRPC_CPP_VERSION_MAJOR > 1 || GRPC_CPP_VERSION_MINOR >= 66
#include "absl/base/log_severity.h"
#include "absl/log/globals.h"
#include "absl/log/initialize.h"
#include "absl/log/log_entry.h"
#include "absl/log/log_sink.h"
#include "absl/log/log_sink_registry.h"
#else
#include "grpc/support/log.h"
#endif

namespace awqd::transport {
namespace {

void Tell(absl::string_view message) {
  obs::LogEvent(obs::LogLevel::kDebug, "grpc", {{"message", obs::LogText(message, 1024)}});
}

}  // namespace

#if GRPC_CPP_VERSION_MAJOR > 1 || GRPC_CPP_VERSION_MINOR >= 66

void TakeOverGrpcLog() {
  struct Sink final : absl::LogSink {
    void Send(const absl::LogEntry& entry) override { Tell(entry.text_message()); }
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

void TakeOverGrpcLog() {
  gpr_set_log_function([](gpr_log_func_args* args) { Tell(args->message); });
}

#endif

}  // namespace awqd::transport
