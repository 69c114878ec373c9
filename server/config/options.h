// Options: every setting of the server, read from flags, the config file and the environment.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/engine.h"
#include "server/model/placed_weight.h"
#include "server/obs/call_recorder.h"
#include "server/obs/logging.h"
#include "server/repository/model_folders.h"
#include "server/repository/reconciler.h"
#include "server/services/env.h"

namespace awqd {

struct TraceOptions {
  double sample = 0;          // fraction of the calls without a traceparent, from 0 to 1
  std::string file;           // for JSON lines; empty: none
  std::string otlp_endpoint;  // address of a collector; empty: none
};

// The defaults are those of the flags. flags.cc explains how to choose each value.
struct Options {
  std::string model_repository;                 // empty: serve `models` alone
  std::vector<repository::NamedFolder> models;  // legal names, all different
  std::vector<std::string> load_models;         // of the repository; empty: all of them
  bool keep_going = false;                      // start although models fail to load
  bool require_all_weights = false;             // a load fails where a weight cannot be read
  repository::WatchOptions watch;
  absl::Duration idle_unload = absl::InfiniteDuration();
  std::vector<std::string> pinned;  // legal names of models that idle_unload spares
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
  std::vector<std::string> metrics_addresses;  // as transport::Options has addresses; empty: none
  obs::LogLevel log_level = obs::LogLevel::kInfo;
  obs::LogFormat log_format = obs::LogFormat::kText;
  obs::AccessLogOptions access_log;
  TraceOptions trace;  // has a file or an endpoint, but not both
};

// The command line asks to serve, or to print a text and exit.
struct CommandLine {
  Options options;
  std::string print;  // help, version or the values of all flags; empty: serve
};

// Reads all settings. A flag takes precedence over the config file, the file over the environment
// variable AWQD_<FLAG>, and that over the default. INVALID_ARGUMENT, in one line, names the first
// unknown flag, key or AWQD_ variable, or value out of range; errors of the file have its line.
absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv);

}  // namespace awqd
