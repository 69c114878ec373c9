// Options: every knob of the server, and the only reader of flags, config file and environment.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/local_engine.h"
#include "server/model/placed_weight.h"
#include "server/obs/access_log.h"
#include "server/obs/logging.h"
#include "server/repository/model_folders.h"
#include "server/repository/reconciler.h"
#include "server/services/env.h"

namespace awqd {

struct TraceOptions {
  double sample = 0;          // of the calls without a traceparent, from 0 to 1
  std::string file;           // of JSON lines; empty: none
  std::string otlp_endpoint;  // of a collector; empty: none
};

// Defaults are those of the flags. server/flags.cc says of each how to choose it.
struct Options {
  std::string model_repository;                 // empty: `models` alone
  std::vector<repository::NamedFolder> models;  // legal names, all different
  std::vector<std::string> load_models;         // of the repository; empty: every one
  bool keep_going = false;                      // without the models that cannot be loaded
  repository::WatchOptions watch;
  absl::Duration idle_unload = absl::InfiniteDuration();
  std::vector<std::string> pinned;  // legal names that idle_unload does not concern
  std::string device = "auto";
  int cpu_threads = 0;
  bool cpu_pin_threads = false;
  bool cpu_interleave = false;
  int64_t device_memory_limit = 0;  // for each device
  bool batch_invariant = false;
  model::Sharding sharding = model::Sharding::kReplicas;
  services::Options rpc;
  engine::EngineOptions engine;
  absl::Duration drain_delay = absl::ZeroDuration();
  absl::Duration drain_timeout = absl::Seconds(30);
  std::string port_file;
  std::string metrics_address;  // empty: none
  obs::LogLevel log_level = obs::LogLevel::kInfo;
  obs::LogFormat log_format = obs::LogFormat::kText;
  obs::AccessLogOptions access_log;
  TraceOptions trace;  // to one of file and endpoint at most
};

// What the command line asks for: to serve, or to print something and leave.
struct CommandLine {
  Options options;
  std::string print;  // help, version or the values of all flags; empty: serve
};

// A flag wins over the config file, the config file over the environment (AWQD_<FLAG>), that over
// the default. INVALID_ARGUMENT, in one line, for anything unknown or out of range: a misspelled
// flag first; of the file with its line; of variables that begin with AWQD_ and are no flag's too.
absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv);

}  // namespace awqd
