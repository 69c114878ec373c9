// Parses flags to Options, makes the checks that CLI11 cannot, and sets dependent defaults.
#include "server/config/options.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <istream>
#include <iterator>
#include <map>
#include <memory>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "client/command_line/help.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/model_folder.h"
#include "server/config/config_file.h"
#include "server/config/flag_table.h"
#include "server/otlp/otlp_exporter.h"
#include "server/transport/listening.h"

namespace awqd {
namespace {

// Takes "unix:" from a path, and checks it. An empty one stays.
absl::Status ResolveSocketPath(std::string* path) {
  if (path->empty()) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(
      const transport::ListenAddress address,
      transport::ParseListenAddress(absl::StartsWith(*path, "unix:") ? *path : "unix:" + *path));
  *path = address.socket_path;
  return absl::OkStatus();
}

absl::Status CheckEachOnce(const std::vector<repository::NamedFolder>& models) {
  std::map<std::string, std::string> paths;
  for (const repository::NamedFolder& folder : models) {
    const auto [it, fresh] = paths.emplace(folder.name, folder.path);
    if (fresh) continue;
    return BadValue(
        "--model",
        absl::StrCat(folder.name, "=", it->second, " and ", folder.name, "=", folder.path),
        "each name once");
  }
  return absl::OkStatus();
}

// Environment variables that begin with AWQD_ but belong to no flag: those of the CPU kernels, of
// the project's scripts and tests, and those that its clients had before AWQCTL_....
constexpr absl::string_view kOtherVariables[] = {"AWQD_CPU_ISA",
                                                 "AWQD_BUILD",
                                                 "AWQD_CUDA",
                                                 "AWQD_CUDA_ARCH",
                                                 "AWQD_CUDA_ARCHITECTURES",
                                                 "AWQD_MODELS",
                                                 "AWQD_CLIENT_CERT",
                                                 "AWQD_CLIENT_KEY",
                                                 "AWQD_TOKEN_FILE",
                                                 "AWQD_TLS_CA",
                                                 "AWQD_DENSE"};

// Whether an orchestrator makes such a variable for a service or container whose name is awqd or
// begins with it: AWQD_QWEN_SERVICE_HOST, AWQD_PORT, AWQD_PORT_8001_TCP_ADDR of Kubernetes, and
// AWQD_NAME, AWQD_ENV_... of Docker's links.
bool IsOfOrchestrator(absl::string_view name) {
  const std::vector<absl::string_view> words = absl::StrSplit(name, '_');
  for (size_t i = 1; i < words.size(); ++i) {
    const absl::string_view next = i + 1 < words.size() ? words[i + 1] : "";
    const bool number = absl::c_all_of(next, absl::ascii_isdigit);  // or nothing
    if (words[i] == "PORT" && number) return true;
    if (words[i] == "SERVICE" && (next == "HOST" || next == "PORT")) return true;
    if (words[i] == "ENV") return true;
  }
  return words.back() == "NAME";
}

absl::Status CheckEnvironment(const CLI::App& app) {
  std::vector<std::string> known;
  for (const CLI::Option* option : app.get_options([](const CLI::Option*) { return true; })) {
    if (!option->get_envname().empty()) known.push_back(option->get_envname());
  }
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string name = std::string(*variable).substr(0, std::strcspn(*variable, "="));
    if (!absl::StartsWith(name, "AWQD_") || absl::StartsWith(name, "AWQD_TEST_") ||
        absl::c_linear_search(known, name) || absl::c_linear_search(kOtherVariables, name) ||
        IsOfOrchestrator(name)) {
      continue;
    }
    const std::string meant = command_line::Nearest(name, known);
    return absl::InvalidArgumentError(
        meant.empty() ? absl::StrCat("environment: ", name, " is not a setting of awqd")
                      : absl::StrCat("environment: ", name, ": did you mean ", meant, "?"));
  }
  return absl::OkStatus();
}

// Reads the TOML file of --config for CLI11, and checks each key.
class ConfigReader : public CLI::Config {
 public:
  explicit ConfigReader(const CLI::App* app) : app_(*app) {}

  std::string path() const {
    return app_.get_config_ptr()->count() == 0 ? "" : app_.get_config_ptr()->results().front();
  }
  const std::vector<ConfigValue>& values() const { return values_; }

  // "<path>:<line>: " of the flag that begins `message`, "--flag: ...", if the file sets this flag.
  std::string FindPlace(absl::string_view message) const {
    for (const ConfigValue& value : values_) {
      const std::string flag = absl::StrCat("--", value.flag, ": ");
      if (absl::StartsWith(message, flag)) {
        return absl::StrCat(path(), ":", value.line, ": ");
      }
    }
    return "";
  }

  std::vector<CLI::ConfigItem> from_config(std::istream& in) const override {
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    auto values = ParseConfigText(text, path());
    if (!values.ok()) throw CLI::ConfigError(std::string(values.status().message()));
    std::vector<CLI::ConfigItem> out;
    for (ConfigValue& value : *values) {
      CheckKey(value);
      // An empty value means the default, as in the environment.
      const bool empty =
          absl::c_all_of(value.values, [](const std::string& v) { return v.empty(); });
      if (empty) continue;
      CLI::ConfigItem& item = out.emplace_back();
      item.name = value.flag;
      item.inputs = value.values;
      values_.push_back(std::move(value));
    }
    return out;
  }

  std::string to_config(const CLI::App*, bool, bool, std::string) const override { return ""; }

 private:
  void CheckKey(const ConfigValue& value) const {
    const std::string flag = absl::StrCat("--", value.flag);
    const CLI::Option* const option = app_.get_option_no_throw(flag);
    if (option != nullptr && !option->get_envname().empty()) return;
    std::string meant = command_line::Nearest(flag, command_line::FlagNames(app_));
    meant = meant.empty()
                ? "no flag has that name"
                : absl::StrCat("did you mean ", absl::StrReplaceAll(meant, {{"--", ""}}), "?");
    throw CLI::ConfigError(absl::StrCat(path(), ":", value.line, ": ", value.flag, ": ", meant));
  }

  const CLI::App& app_;
  // mutable, because CLI11 declares from_config const.
  mutable std::vector<ConfigValue> values_;
};

// Whether all of the addresses can be reached from this machine alone.
absl::StatusOr<bool> AreLocal(absl::string_view flag, const std::vector<std::string>& addresses) {
  bool local = true;
  for (const std::string& text : addresses) {
    const auto address = transport::ParseListenAddress(text);
    AWQD_RETURN_IF_ERROR(Prefixed(flag, address.status()));
    local &= address->local();
  }
  return local;
}

// Makes the checks that CLI11 cannot, and sets defaults that depend on other options.
absl::Status CompleteOptions(Options& options) {
  // Checked here because CLI11 would report it before an unknown flag.
  if (options.model_repository.empty() && options.models.empty()) {
    return BadValue("--model_repository", "nothing", "a directory (or --model NAME=DIR)");
  }
  AWQD_RETURN_IF_ERROR(CheckEachOnce(options.models));
  for (std::vector<std::string>* names : {&options.load_models, &options.pinned}) {
    for (std::string& name : *names) name = model::NameOfHubId(name);
  }
  for (const std::string& name : options.pinned) {
    AWQD_RETURN_IF_ERROR(Prefixed("--pin", repository::CheckModelName(name)));
  }
  std::erase(options.metrics_addresses, "");
  AWQD_ASSIGN_OR_RETURN(const bool metrics_local,
                        AreLocal("--metrics_address", options.metrics_addresses));
  if (!options.trace.file.empty() && !options.trace.otlp_endpoint.empty()) {
    return BadValue("--trace_file and --otlp_endpoint", "both", "one of them");
  }
  if (!options.trace.otlp_endpoint.empty()) {
    AWQD_RETURN_IF_ERROR(
        Prefixed("--otlp_endpoint", otlp::CheckOtlpEndpoint(options.trace.otlp_endpoint)));
  }
  services::Options& rpc = options.rpc;
  transport::Options& transport = rpc.transport;
  AWQD_ASSIGN_OR_RETURN(const bool local, AreLocal("--address", transport.addresses));
  AWQD_RETURN_IF_ERROR(security::ResolveOptions(&transport.security, local));
  AWQD_RETURN_IF_ERROR(security::CheckMetrics(transport.security, metrics_local));
  std::erase(rpc.shared_memory.prefixes, "");
  for (const std::string& text : rpc.shared_memory.prefixes) {
    AWQD_RETURN_IF_ERROR(
        Prefixed("--shared_memory_prefix", services::CheckSharedMemoryPrefix(text)));
  }
  AWQD_RETURN_IF_ERROR(Prefixed("--ring_path", ResolveSocketPath(&rpc.ring.path)));
  AWQD_RETURN_IF_ERROR(Prefixed("--lend", ResolveSocketPath(&rpc.lend_path)));
  if (transport.memory_quota_bytes == 0) {
    transport.memory_quota_bytes = 16 * transport.max_receive_message_bytes;
  }
  const int64_t both = transport.max_receive_message_bytes + transport.max_send_message_bytes;
  if (rpc.in_flight_bytes == 0) rpc.in_flight_bytes = 8 * both;
  if (rpc.in_flight_bytes < both) {
    return BadValue(
        "--max_in_flight_bytes", rpc.in_flight_bytes,
        absl::StrCat("at least ", both,
                     ", the sum of max_receive_message_bytes and max_send_message_bytes"));
  }
  if (const int64_t bytes = transport.client.bytes_in_flight; bytes != 0 && bytes < both) {
    return BadValue(
        "--max_bytes_in_flight_per_client", bytes,
        absl::StrCat("0 or at least ", both,
                     ", the sum of max_receive_message_bytes and max_send_message_bytes"));
  }
  rpc.stream_in_flight_bytes =
      2 * std::max(transport.max_receive_message_bytes, transport.max_send_message_bytes);
  rpc.max_queued_requests = options.engine.batching.max_queued_tasks;
  rpc.max_batch_tokens = options.engine.batching.max_batch_tokens;
  return absl::OkStatus();
}

constexpr char kFooter[] =
    "Every flag may also be set by an environment variable AWQD_<FLAG>, for example "
    "AWQD_MODEL_REPOSITORY. A flag takes precedence over the config file, the file over the "
    "environment, and the environment over the default. --help prints the first sentence of each "
    "flag; with =all it prints the whole text. --print_config prints the values in effect.";

// Adds the flags that are not settings: neither the environment nor the config file has them.
void AddGeneralFlags(CLI::App* app, const std::shared_ptr<ConfigReader>& config,
                     bool* print_config) {
  app->set_help_flag("-h,--help",
                     "Print this help and exit; --help=all prints the whole text of each flag.")
      ->group("General");
  app->set_version_flag("--version", absl::StrCat("awqd ", AWQD_VERSION),
                        "Print the version and exit.")
      ->group("General");
  app->set_config(
         "--config", "",
         "TOML file of settings: a line is key = value, where key is a flag without its dashes.")
      ->type_name("FILE")
      ->group("General");
  app->add_flag(
         "--print_config", *print_config,
         "Print the value of every flag and its source, in the form of such a file, and exit.")
      ->group("General");
  app->config_formatter(config);
  app->allow_config_extras(CLI::config_extras_mode::error);
  app->footer(kFooter);
  app->option_defaults()->always_capture_default();
}

// Whether `args` have the flag that begins `message`, "--flag: ...".
bool GivenAsFlag(const std::vector<std::string>& args, absl::string_view message) {
  const absl::string_view flag = message.substr(0, message.find(':'));
  return absl::c_any_of(args, [&](const std::string& arg) {
    return absl::StartsWith(arg, flag) && (arg.size() == flag.size() || arg[flag.size()] == '=');
  });
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv) {
  CommandLine line;
  line.options.rpc.transport.memory_quota_bytes = 0;  // derived from the size of messages
  const std::vector<std::string> args(argv + 1, argv + argc);
  CLI::App app("awqd: serves Dequantize and QuantizedMatmul over quantised checkpoints, with gRPC.",
               "awqd");
  bool print_config = false;
  const auto config = std::make_shared<ConfigReader>(&app);
  AddGeneralFlags(&app, config, &print_config);
  AddFlags(&app, &line.options);
  if (const auto detail = command_line::HelpAsked(args)) {
    app.formatter(std::make_shared<command_line::HelpFormatter>(*detail));
    line.print = app.help();
    return line;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForVersion& version) {
    line.print = absl::StrCat(version.what(), "\n");
    return line;
  } catch (const CLI::Error& error) {
    if (const auto unknown = command_line::FindUnknownFlag(app, args)) {
      return absl::InvalidArgumentError(unknown->Message());
    }
    const std::string text =
        absl::StrReplaceAll(absl::StripAsciiWhitespace(error.what()), {{"\n", " "}});
    const bool of_flag = GivenAsFlag(args, text);
    return absl::InvalidArgumentError(absl::StrCat(of_flag ? "" : config->FindPlace(text), text));
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(error.what());
  }
  AWQD_RETURN_IF_ERROR(CheckEnvironment(app));
  if (print_config) {
    line.print = PrintedConfig(app, args, config->values(), config->path());
    return line;
  }
  AWQD_RETURN_IF_ERROR(CompleteOptions(line.options));
  return line;
}

}  // namespace awqd
