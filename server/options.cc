// From flags to Options: parsing, checks that CLI11 cannot make, units and defaults that depend on
// others.
#include "server/options.h"

#include <algorithm>
#include <map>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/base/status.h"
#include "server/flags.h"
#include "server/transport/listen_address.h"

namespace awqd {
namespace {

absl::Duration OrInfinite(double seconds) {
  return seconds == 0 ? absl::InfiniteDuration() : absl::Seconds(seconds);
}

// What CLI11 cannot check by itself.
absl::Status CheckAddresses(const std::vector<std::string>& addresses) {
  for (const std::string& address : addresses) {
    const absl::Status status = transport::ParseListenAddress(address).status();
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--address: ", status.message()));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Options> ToOptions(Flags flags) {
  Options options = std::move(flags.options);
  // Not left to CLI11, which would report it before an unknown flag.
  if (options.model_repository.empty()) {
    return absl::InvalidArgumentError("--model_repository: got nothing, expected a directory");
  }
  AWQD_RETURN_IF_ERROR(CheckAddresses(options.rpc.transport.addresses));
  if (absl::Status prefix = services::CheckSharedMemoryPrefix(options.rpc.shared_memory.prefix);
      !prefix.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--shared_memory_prefix: ", prefix.message()));
  }
  services::Options& rpc = options.rpc;
  transport::Options& transport = rpc.transport;
  transport.unix_socket_mode = static_cast<mode_t>(flags.unix_socket_mode);
  transport.memory_quota_bytes = flags.memory_quota_bytes != 0
                                     ? flags.memory_quota_bytes
                                     : 16 * transport.max_receive_message_bytes;
  const int64_t both = transport.max_receive_message_bytes + transport.max_send_message_bytes;
  if (rpc.in_flight_bytes == 0) rpc.in_flight_bytes = 16 * both;
  if (rpc.in_flight_bytes < both) {
    return absl::InvalidArgumentError(
        absl::StrCat("--max_in_flight_bytes: got ", rpc.in_flight_bytes, ", expected at least ",
                     both, ": max_receive_message_bytes and max_send_message_bytes together"));
  }
  rpc.stream_in_flight_bytes =
      2 * std::max(transport.max_receive_message_bytes, transport.max_send_message_bytes);
  rpc.max_queued_requests = options.engine.batching.max_queued_tasks;
  rpc.max_batch_tokens = options.engine.batching.max_batch_tokens;
  options.engine.batching.max_queue_delay = absl::Microseconds(flags.max_queue_delay_us);
  options.engine.batching.max_starvation = absl::Milliseconds(flags.max_starvation_ms);
  options.drain_delay = absl::Milliseconds(flags.drain_delay_ms);
  options.drain_timeout = absl::Seconds(flags.drain_timeout_s);
  transport.keepalive_time = absl::Seconds(flags.keepalive_time_s);
  transport.keepalive_timeout = absl::Seconds(flags.keepalive_timeout_s);
  transport.min_ping_interval = absl::Seconds(flags.min_ping_interval_s);
  transport.max_connection_idle = OrInfinite(flags.max_connection_idle_s);
  transport.max_connection_age = OrInfinite(flags.max_connection_age_s);
  transport.max_connection_age_grace = OrInfinite(flags.max_connection_age_grace_s);
  for (model::Sharding sharding :
       {model::Sharding::kReplicas, model::Sharding::kColumns, model::Sharding::kModels}) {
    if (flags.shard == Name(sharding)) options.sharding = sharding;
  }
  static const std::map<std::string, obs::LogLevel> levels = {{"debug", obs::LogLevel::kDebug},
                                                              {"info", obs::LogLevel::kInfo},
                                                              {"warning", obs::LogLevel::kWarning},
                                                              {"error", obs::LogLevel::kError}};
  options.log_level = levels.at(flags.log_level);
  options.log_format = flags.log_format == "json" ? obs::LogFormat::kJson : obs::LogFormat::kText;
  return options;
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv) {
  Flags flags;
  CLI::App app("awqd: serves Dequantize and QuantizedMatmul over AWQ checkpoints, by gRPC.",
               "awqd");
  app.set_version_flag("--version", absl::StrCat("awqd ", AWQD_VERSION));
  app.set_config("--config", "", "TOML file of flags without their dashes, key = value.");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.get_formatter()->column_width(34);
  app.footer(
      "Every flag may also be set by the environment variable AWQD_<FLAG>, for example\n"
      "AWQD_MODEL_REPOSITORY. Order: flag, config file, environment, default.");
  app.option_defaults()->always_capture_default();
  AddFlags(&app, &flags);
  CommandLine line;
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    line.print = app.help();
    return line;
  } catch (const CLI::CallForVersion& version) {
    line.print = absl::StrCat(version.what(), "\n");
    return line;
  } catch (const CLI::Error& error) {
    return absl::InvalidArgumentError(
        absl::StrReplaceAll(absl::StripAsciiWhitespace(error.what()), {{"\n", " "}}));
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(error.what());
  }
  AWQD_ASSIGN_OR_RETURN(line.options, ToOptions(std::move(flags)));
  return line;
}

}  // namespace awqd
