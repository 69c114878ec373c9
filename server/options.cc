// The flags. Each help text says what the flag does and how to choose its value.
#include "server/options.h"

#include <cstdio>
#include <limits>
#include <map>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status.h"
#include "server/rpc/listen_address.h"

namespace awqd {
namespace {

// gRPC counts message bytes in an int, and Protocol Buffers stops at 2 GiB.
constexpr int64_t kMaxMessageBytes = (int64_t{1} << 31) - 65536;
constexpr int64_t kMinMessageBytes = 64 << 10;
constexpr int64_t kAnyBytes = int64_t{1} << 50;

// What flags are read into before they become Options: plain numbers with units in their names.
struct Flags {
  Options options;
  int64_t drain_delay_ms = 0;
  double drain_timeout_s = 30;
  double max_queue_delay_us = 0;
  double max_starvation_ms = 500;
  double keepalive_time_s = 120;
  double keepalive_timeout_s = 20;
  double min_ping_interval_s = 10;
  double max_connection_idle_s = 0;
  double max_connection_age_s = 0;
  double max_connection_age_grace_s = 0;
  int64_t memory_quota_bytes = 0;
  int unix_socket_mode = 0660;
  std::string shard = "replicas";
  std::string log_level = "info";
  std::string log_format = "text";
};

// "64MiB" -> "67108864", so that sizes can be typed by people.
std::string ParseBytes(std::string& text) {
  static const std::map<std::string, int64_t> units = {
      {"", 1}, {"k", 1 << 10}, {"m", 1 << 20}, {"g", 1 << 30}};
  const size_t end = text.find_first_not_of("0123456789");
  std::string unit = absl::AsciiStrToLower(end == std::string::npos ? "" : text.substr(end));
  if (unit == "b") unit = "";
  if (unit.size() > 1 && (unit.substr(1) == "ib" || unit.substr(1) == "b")) unit.resize(1);
  int64_t number = 0;
  const auto factor = units.find(unit);
  if (factor == units.end() || !absl::SimpleAtoi(text.substr(0, end), &number) ||
      number > std::numeric_limits<int64_t>::max() / factor->second) {
    return absl::StrCat("got \"", text, "\", expected bytes such as 1048576 or 64MiB");
  }
  text = absl::StrCat(number * factor->second);
  return "";
}

// "auto" and "default" -> the engine's words for them; a count stays as it is.
std::string ParseThreshold(std::string& text) {
  int64_t tokens = 0;
  if (text == "auto") {
    text = absl::StrCat(ThresholdTable::kAuto);
    return "";
  }
  if (text == "default") {
    text = absl::StrCat(ThresholdTable::kByKernel);
    return "";
  }
  if (absl::SimpleAtoi(text, &tokens) && tokens >= 0) return "";
  return absl::StrCat("got \"", text, "\", expected a number of tokens from 0 on, default or auto");
}

// "0660" -> 432, that number.
std::string ParseMode(std::string& text) {
  int mode = 0;
  const bool octal =
      !text.empty() && text.size() <= 5 && text.find_first_not_of("01234567") == std::string::npos;
  for (const char digit : text) mode = octal ? mode * 8 + (digit - '0') : 0;
  if (!octal || mode > 0777) {
    return absl::StrCat("got \"", text, "\", expected permissions such as 0660");
  }
  text = absl::StrCat(mode);
  return "";
}

// Registers flags with their environment twins.
class Table {
 public:
  explicit Table(CLI::App* app) : app_(app) {}

  void Group(std::string name) { group_ = std::move(name); }

  template <typename T>
  CLI::Option* Add(const std::string& name, T& value, const std::string& help) {
    return Dress(name, app_->add_option("--" + name, value, help));
  }

  void Bytes(const std::string& name, int64_t& value, int64_t min, int64_t max,
             const std::string& help) {
    // Transforms run in the order in which they were added last to first.
    Add(name, value, help)
        ->check(CLI::Range(min, max))
        ->transform(CLI::Validator(ParseBytes, "BYTES", "bytes"));
  }

  void Flag(const std::string& name, bool& value, const std::string& help) {
    Dress(name, app_->add_flag("--" + name + ",!--no_" + name, value, help));
  }

 private:
  CLI::Option* Dress(const std::string& name, CLI::Option* option) {
    option->envname("AWQD_" + absl::AsciiStrToUpper(name));
    option->group(group_);
    return option;
  }

  CLI::App* const app_;
  std::string group_;
};

void AddModelFlags(Table& table, Flags& flags) {
  Options& options = flags.options;
  table.Group("Models");
  table.Add(
      "model_repository", options.model_repository,
      "Directory whose subdirectories are models, each as downloaded from the Hub. Clients can "
      "name models beneath it and nothing else.");
  table
      .Add("load_model", options.load_models,
           "Model to load at start; repeat it for several. Default: every directory of the "
           "repository that has a config.json. The server ends when one of them fails to load.")
      ->delimiter(',')
      ->expected(1)
      ->take_all();
  table.Group("Device");
  table.Add("device", options.device,
            "auto: the first GPU that answers, else the CPU. Or cpu, or cuda:N, or several such as "
            "cuda:0,cuda:1, which end the server when one is not there. cpu:0,cpu:1 are devices "
            "that share the cores, to try several without GPUs.");
  table
      .Add(
          "shard", flags.shard,
          "What several devices do. replicas: each holds every model, and a request runs on the "
          "one with the fewest tokens waiting or running; for models that fit, and for throughput. "
          "columns: each holds its share of the columns of every weight, and a request runs on all "
          "of them; for models that are larger than one device. models: each model lives whole on "
          "the device with most free memory when it is loaded; for many small models. Of no "
          "consequence with one device.")
      ->check(CLI::IsMember({"replicas", "columns", "models"}));
  table
      .Add("cpu_threads", options.cpu_threads,
           "Threads of CPU kernels. 0: as many as the process may use; fewer leave cores to gRPC "
           "when clients are many and small.")
      ->check(CLI::Range(0, 4096));
  table.Bytes("device_memory_limit", options.device_memory_limit, 0, kAnyBytes,
              "Bytes that weights and buffers may take on each device. 0: all of it; set it when "
              "the device is shared.");
  table.Flag("batch_invariant", options.batch_invariant,
             "A token's result has the same bits whatever tokens share its batch and however many "
             "they are. Leaves out kernels whose order of summation depends on the count, and the "
             "dense path: free on the CPU up to the token threshold and on a GPU up to 16 tokens, "
             "beyond that 1.0 to 3.6 times as slow on an H100.");
}

void AddListenFlags(Table& table, Flags& flags) {
  RpcOptions& rpc = flags.options.rpc;
  table.Group("Listening");
  table
      .Add("address", rpc.addresses,
           "host:port to listen on, in plaintext and without authentication: outside a trusted "
           "network use 127.0.0.1:8001 behind a proxy. Port 0 picks a free one, which is logged. "
           "unix:/path listens on a socket file instead, for clients of this machine; repeat the "
           "flag for several addresses.")
      ->delimiter(',')
      ->expected(1)
      ->take_all();
  table
      .Add("unix_socket_mode", flags.unix_socket_mode,
           "Permissions of socket files, in octal: whoever may write to one may connect. 0600 for "
           "the server's own user, 0660 for its group, 0666 for everybody who reaches the "
           "directory.")
      ->transform(CLI::Validator(ParseMode, "OCTAL", "mode"));
  table.Add("port_file", flags.options.port_file,
            "File that the bound port is written to once the server listens, for scripts that use "
            "port 0; 0 when it listens on sockets only.");
  table.Flag("reflection", rpc.reflection,
             "Answer gRPC reflection, so that grpcurl needs no proto files. Switch it off with "
             "--no_reflection where the API should not describe itself.");
}

void AddBoundFlags(Table& table, Flags& flags) {
  RpcOptions& rpc = flags.options.rpc;
  RpcLimits& limits = rpc.limits;
  table.Group("Bounds");
  table.Bytes("max_receive_message_bytes", limits.max_receive_message_bytes, kMinMessageBytes,
              kMaxMessageBytes,
              "Largest request. 64 MiB hold 8192 tokens of 4096 FP16 activations. Memory taken is "
              "up to this for each request in flight.");
  table.Bytes("max_send_message_bytes", limits.max_send_message_bytes, kMinMessageBytes,
              kMaxMessageBytes,
              "Largest response; a larger one is refused before it is computed. Clients must allow "
              "as much: gRPC's own default for them is 4 MiB.");
  table.Bytes("max_inline_weight_bytes", limits.max_inline_weight_bytes, 0, kMaxMessageBytes,
              "Tensor bytes of a weight carried in a request. 0 refuses inline weights.");
  table.Bytes("memory_quota_bytes", flags.memory_quota_bytes, 0, kAnyBytes,
              "Bytes gRPC may hold for messages that are being received. 0: 16 x "
              "max_receive_message_bytes. At least twice the largest message times the uploads "
              "that run at once; when it is used up, gRPC closes connections and ends calls with "
              "UNAVAILABLE or RESOURCE_EXHAUSTED.");
  table.Bytes("max_in_flight_bytes", limits.in_flight_bytes, 0, kAnyBytes,
              "Bytes of requests being parsed, queued or running and of answers not yet sent, over "
              "all calls; what would pass it is refused with RESOURCE_EXHAUSTED before it is "
              "parsed. 0: 16 x (max_receive_message_bytes + max_send_message_bytes). Half of what "
              "the process may take beside weights, because gRPC holds a message while it is "
              "copied; at least the two message limits together.");
  table
      .Add(
          "rpc_threads", rpc.rpc_threads,
          "Threads that receive requests and send answers, and on the CPU run short products "
          "themselves. 0: one for every four cores on the CPU, so that requests that come together "
          "run together; half of the cores, 2 to 16, beside a GPU. More when these threads are "
          "busy and cores are not: many clients, or large messages.")
      ->check(CLI::Range(0, 256));
  table
      .Add("max_concurrent_streams", rpc.max_concurrent_streams,
           "Calls at once per connection; more wait in the client. Bounds what one client takes.")
      ->check(CLI::Range(1, 1 << 20));
  table
      .Add("stream_in_flight", limits.stream_in_flight,
           "Requests of one QuantizedMatmulStream in flight; reading pauses beyond. Enough to keep "
           "batches full: tokens per batch / tokens per request.")
      ->check(CLI::Range(1, 1 << 16));
  table.Bytes("stream_chunk_bytes", limits.chunk_bytes, 4096, kMaxMessageBytes,
              "About how many bytes a chunk of DequantizeStream holds. Small ones bound memory per "
              "slow reader, large ones save calls.");
}

void AddSharedMemoryFlags(Table& table, Flags& flags) {
  SharedMemoryOptions& shared = flags.options.rpc.shared_memory;
  table.Group("Shared memory");
  table.Add("shared_memory_prefix", shared.prefix,
            "Takes tensors from, and writes answers to, POSIX shared-memory objects of clients on "
            "this machine, when their names begin with this, for example awqd-. Empty: off. Every "
            "caller can name every such object that this process may open, so switch it on only "
            "where callers may know each other's tensors, or choose names that cannot be guessed.");
  table
      .Add("max_shared_memory_ranges", shared.max_open,
           "Ranges of such objects in use at once, two for a request at most; each is an open "
           "file. Their bytes count for max_in_flight_bytes.")
      ->check(CLI::Range(1, 1 << 20));
}

void AddBatchFlags(Table& table, Flags& flags) {
  EngineOptions& engine = flags.options.engine;
  BatchOptions& batching = engine.batching;
  table.Group("Batching");
  table
      .Add("token_threshold", engine.token_threshold,
           "Merged tokens from which a weight is dequantised for a dense product instead of being "
           "decoded inside the product. 0: always. default: 256, but never where the kernel that "
           "decodes inside is as fast or faster at any count (4-bit weights on compute capability "
           "9.0). auto: what measures best for each shape on this device, a few products per shape "
           "at load.")
      ->default_str("default")
      ->transform(CLI::Validator(ParseThreshold, "TOKENS|default|auto", "threshold"));
  table
      .Add("max_batch_tokens", batching.max_batch_tokens,
           "Tokens that are merged into one batch. More than a few hundred add latency without "
           "saving weight traffic.")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  table
      .Add("max_queue_delay_us", flags.max_queue_delay_us,
           "How long the oldest request may wait for company while the device is idle. 0: an idle "
           "device starts at once and batches form under load.")
      ->check(CLI::Range(0.0, 60e6));
  table
      .Add("max_starvation_ms", flags.max_starvation_ms,
           "A request that has waited this long goes before every priority: the bound on what "
           "urgent traffic can do to the rest.")
      ->check(CLI::Range(0.0, 3.6e6));
  table
      .Add("max_queued_requests", batching.max_queued_tasks,
           "Requests that may wait; the next is refused with RESOURCE_EXHAUSTED. Choose so that a "
           "full queue drains within the clients' deadlines.")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 32));
  table.Add("max_queued_tokens", batching.max_queued_tokens, "As max_queued_requests, in tokens.")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  table.Bytes("max_queued_bytes", batching.max_queued_bytes, 1, kAnyBytes,
              "As max_queued_requests, in bytes of activations: the bound on memory.");
  table.Bytes("staging_bytes", engine.staging_bytes, 0, kAnyBytes,
              "Host memory for payloads and results that each device keeps for reuse, pinned on a "
              "GPU. About what requests and answers hold in flight under normal load; less gives "
              "memory back and allocates for each large request.");
  table
      .Add("lanes", engine.lanes,
           "Worker threads with a device stream each. 0: one on the CPU, two on a GPU.")
      ->check(CLI::Range(0, 64));
  table
      .Add("answer_threads", engine.answer_threads,
           "Threads that help lanes to answer large batches, so that a lane is soon free for the "
           "next. -1: a quarter of the cores, at most four, on a GPU; none on the CPU.")
      ->check(CLI::Range(-1, 64));
}

void AddLifecycleFlags(Table& table, Flags& flags) {
  table.Group("Lifecycle");
  table
      .Add("drain_delay_ms", flags.drain_delay_ms,
           "After SIGTERM: how long to go on serving with health NOT_SERVING, so that load "
           "balancers look away first. In Kubernetes a few seconds.")
      ->check(CLI::Range(0, 600000));
  table
      .Add("drain_timeout_s", flags.drain_timeout_s,
           "After that: how long calls in flight may take before they are cancelled. With the "
           "delay, less than the time the supervisor waits before SIGKILL.")
      ->check(CLI::Range(0.0, 86400.0));
  table
      .Add("keepalive_time_s", flags.keepalive_time_s,
           "Silence after which a connection is pinged, to find clients that vanished.")
      ->check(CLI::Range(1.0, 86400.0));
  table
      .Add("keepalive_timeout_s", flags.keepalive_timeout_s,
           "How long that ping may stay unanswered before the connection is closed.")
      ->check(CLI::Range(1.0, 86400.0));
  table
      .Add("min_ping_interval_s", flags.min_ping_interval_s,
           "Clients that ping an idle connection more often than this are sent away. At most their "
           "keepalive time.")
      ->check(CLI::Range(0.0, 86400.0));
  table
      .Add("max_connection_idle_s", flags.max_connection_idle_s,
           "Close connections without calls after this long, at once: a call sent in that moment "
           "fails with UNAVAILABLE. 0: never.")
      ->check(CLI::Range(0.0, 1e9));
  table
      .Add("max_connection_age_s", flags.max_connection_age_s,
           "Close connections after this long, so that clients look for new servers. 0: never.")
      ->check(CLI::Range(0.0, 1e9));
  table
      .Add("max_connection_age_grace_s", flags.max_connection_age_grace_s,
           "How long calls may go on on a connection that is too old; then they are cut off. 0: "
           "as long as they take. Longer than the longest call and stream that is still wanted.")
      ->check(CLI::Range(0.0, 1e9));
  table.Group("Logging");
  table
      .Add("log_level", flags.log_level,
           "debug, info, warning or error. debug has a line per request.")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}));
  table
      .Add("log_format", flags.log_format,
           "text for people, json (one object a line) for machines.")
      ->check(CLI::IsMember({"text", "json"}));
}

absl::Duration OrInfinite(double seconds) {
  return seconds == 0 ? absl::InfiniteDuration() : absl::Seconds(seconds);
}

// What CLI11 cannot check by itself.
absl::Status CheckAddresses(const std::vector<std::string>& addresses) {
  for (const std::string& address : addresses) {
    const absl::Status status = ParseListenAddress(address).status();
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
  AWQD_RETURN_IF_ERROR(CheckAddresses(options.rpc.addresses));
  if (absl::Status prefix = CheckSharedMemoryPrefix(options.rpc.shared_memory.prefix);
      !prefix.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--shared_memory_prefix: ", prefix.message()));
  }
  options.rpc.unix_socket_mode = static_cast<mode_t>(flags.unix_socket_mode);
  RpcLimits& limits = options.rpc.limits;
  options.rpc.memory_quota_bytes = flags.memory_quota_bytes != 0
                                       ? flags.memory_quota_bytes
                                       : 16 * limits.max_receive_message_bytes;
  const int64_t both = limits.max_receive_message_bytes + limits.max_send_message_bytes;
  if (limits.in_flight_bytes == 0) limits.in_flight_bytes = 16 * both;
  if (limits.in_flight_bytes < both) {
    return absl::InvalidArgumentError(
        absl::StrCat("--max_in_flight_bytes: got ", limits.in_flight_bytes, ", expected at least ",
                     both, ": max_receive_message_bytes and max_send_message_bytes together"));
  }
  limits.stream_in_flight_bytes =
      2 * std::max(limits.max_receive_message_bytes, limits.max_send_message_bytes);
  limits.max_queued_requests = options.engine.batching.max_queued_tasks;
  limits.max_batch_tokens = options.engine.batching.max_batch_tokens;
  options.engine.batching.max_queue_delay = absl::Microseconds(flags.max_queue_delay_us);
  options.engine.batching.max_starvation = absl::Milliseconds(flags.max_starvation_ms);
  options.drain_delay = absl::Milliseconds(flags.drain_delay_ms);
  options.drain_timeout = absl::Seconds(flags.drain_timeout_s);
  options.rpc.keepalive_time = absl::Seconds(flags.keepalive_time_s);
  options.rpc.keepalive_timeout = absl::Seconds(flags.keepalive_timeout_s);
  options.rpc.min_ping_interval = absl::Seconds(flags.min_ping_interval_s);
  options.rpc.max_connection_idle = OrInfinite(flags.max_connection_idle_s);
  options.rpc.max_connection_age = OrInfinite(flags.max_connection_age_s);
  options.rpc.max_connection_age_grace = OrInfinite(flags.max_connection_age_grace_s);
  for (Sharding sharding : {Sharding::kReplicas, Sharding::kColumns, Sharding::kModels}) {
    if (flags.shard == Name(sharding)) options.sharding = sharding;
  }
  static const std::map<std::string, LogLevel> levels = {{"debug", LogLevel::kDebug},
                                                         {"info", LogLevel::kInfo},
                                                         {"warning", LogLevel::kWarning},
                                                         {"error", LogLevel::kError}};
  options.log_level = levels.at(flags.log_level);
  options.log_format = flags.log_format == "json" ? LogFormat::kJson : LogFormat::kText;
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
  Table table(&app);
  AddModelFlags(table, flags);
  AddListenFlags(table, flags);
  AddBoundFlags(table, flags);
  AddSharedMemoryFlags(table, flags);
  AddBatchFlags(table, flags);
  AddLifecycleFlags(table, flags);
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
