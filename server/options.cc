// From flags to Options: parsing, checks that CLI11 cannot make, defaults that depend on others.
#include "server/options.h"

#include <algorithm>
#include <map>

#include "CLI/CLI.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "checkpoint/file.h"
#include "kernels/base/status.h"
#include "server/flags.h"
#include "server/transport/listen_address.h"

namespace awqd {
namespace {

absl::Status CheckEachOnce(const std::vector<model::NamedFolder>& models) {
  std::map<std::string, std::string> paths;
  for (const model::NamedFolder& folder : models) {
    const auto [it, fresh] = paths.emplace(folder.name, folder.path);
    if (fresh) continue;
    return absl::InvalidArgumentError(absl::StrCat("--model: got ", folder.name, "=", it->second,
                                                   " and ", folder.name, "=", folder.path,
                                                   ", expected each name once"));
  }
  return absl::OkStatus();
}

// The rest: checks that CLI11 cannot make, and defaults that depend on other options.
absl::Status Complete(Options& options) {
  // Not left to CLI11, which would report it before an unknown flag.
  if (options.model_repository.empty() && options.models.empty()) {
    return absl::InvalidArgumentError(
        "--model_repository: got nothing, expected a directory (or --model NAME=DIR)");
  }
  AWQD_RETURN_IF_ERROR(CheckEachOnce(options.models));
  for (const std::string& address : options.rpc.transport.addresses) {
    const absl::Status status = transport::ParseListenAddress(address).status();
    if (!status.ok()) return model::Prefixed("--address", status);
  }
  const absl::Status prefix = services::CheckSharedMemoryPrefix(options.rpc.shared_memory.prefix);
  if (!prefix.ok()) return model::Prefixed("--shared_memory_prefix", prefix);
  services::Options& rpc = options.rpc;
  transport::Options& transport = rpc.transport;
  if (transport.memory_quota_bytes == 0) {
    transport.memory_quota_bytes = 16 * transport.max_receive_message_bytes;
  }
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
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv) {
  CommandLine line;
  line.options.rpc.transport.memory_quota_bytes = 0;  // by the size of messages
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
  AddFlags(&app, &line.options);
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
  AWQD_RETURN_IF_ERROR(Complete(line.options));
  return line;
}

}  // namespace awqd
