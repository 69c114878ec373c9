// Flags, config file and environment.
#include "server/config/options.h"

#include <cstdlib>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/config/flag_table.h"
#include "server/transport/listening.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

absl::StatusOr<CommandLine> Parse(std::vector<const char*> args) {
  args.insert(args.begin(), "awqd");
  return ParseCommandLine(static_cast<int>(args.size()), args.data());
}

std::string ErrorOf(std::vector<const char*> args) {
  const absl::Status status = Parse(std::move(args)).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("\n")));
  return std::string(status.message());
}

TEST(Options, DefaultsHold) {
  const Options options = Parse({"--model_repository", "/m"})->options;
  EXPECT_EQ(options.model_repository, "/m");
  EXPECT_TRUE(options.load_models.empty());
  EXPECT_EQ(options.device, "auto");
  EXPECT_EQ(options.engine.token_threshold, engine::ThresholdTable::kByKernel);
  EXPECT_FALSE(options.batch_invariant);
  EXPECT_EQ(options.rpc.transport.max_receive_message_bytes, 64 << 20);
  EXPECT_EQ(options.rpc.transport.memory_quota_bytes, int64_t{1} << 30);
  EXPECT_TRUE(options.rpc.reflection);
  EXPECT_EQ(options.drain_timeout, absl::Seconds(30));
}

TEST(Options, RingsAreOffUnlessAPathIsGiven) {
  EXPECT_EQ(Parse({"--model_repository", "/m"})->options.rpc.ring.path, "");
  const ring::Options ring =
      Parse({"--model_repository", "/m", "--ring_path=/run/r.sock", "--ring_spin_us=7",
             "--max_rings=9", "--max_rings_per_client=3", "--max_ring_bytes=1MiB"})
          ->options.rpc.ring;
  EXPECT_EQ(ring.path, "/run/r.sock");
  EXPECT_EQ(ring.spin, absl::Microseconds(7));
  EXPECT_EQ(ring.max_rings, 9);
  EXPECT_EQ(ring.max_rings_per_client, 3);
  EXPECT_EQ(ring.max_bytes, 1 << 20);
  EXPECT_EQ(Parse({"--model_repository", "/m", "--ring_path=unix:/r"})->options.rpc.ring.path,
            "/r");
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--ring_path=/a b"}), HasSubstr("--ring_path"));
  EXPECT_EQ(Parse({"--model_repository", "/m", "--lend=unix:/l"})->options.rpc.lend_path, "/l");
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--lend=/a b"}), HasSubstr("--lend"));
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--ring_path=/r", "--max_ring_bytes=1"}),
              HasSubstr("--max_ring_bytes"));
}

TEST(Options, SharedMemoryIsOffUnlessAPrefixIsGiven) {
  EXPECT_THAT(Parse({"--model_repository", "/m"})->options.rpc.shared_memory.prefixes, IsEmpty());
  const Options options = Parse({"--model_repository", "/m", "--shared_memory_prefix=awqd-,x_",
                                 "--shared_memory_prefix=b", "--max_shared_memory_ranges=7"})
                              ->options;
  EXPECT_THAT(options.rpc.shared_memory.prefixes, ElementsAre("awqd-", "x_", "b"));
  EXPECT_EQ(options.rpc.shared_memory.max_open, 7);
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--shared_memory_prefix=../x"}),
              HasSubstr("--shared_memory_prefix: got \"../x\", expected at most 64 letters"));
}

TEST(Options, ListensOnThisMachineUnlessTold) {
  const Options options = Parse({"--model_repository", "/m"})->options;
  EXPECT_THAT(options.rpc.transport.addresses, ElementsAre("127.0.0.1:8001"));
  EXPECT_EQ(options.rpc.transport.security.model_control, security::ModelControl::kAny);
  EXPECT_FALSE(options.rpc.transport.client.any());
}

TEST(Options, WhoMayLoadModelsDependsOnTheAddresses) {
  const auto control = [](std::vector<const char*> args) {
    args.insert(args.end(), {"--model_repository", "/m"});
    const auto line = Parse(std::move(args));
    EXPECT_TRUE(line.ok()) << line.status();
    return line->options.rpc.transport.security.model_control;
  };
  using security::ModelControl;
  EXPECT_EQ(control({"--address=[::1]:9,unix:/run/a"}), ModelControl::kAny);
  EXPECT_EQ(control({"--address=unix:/run/a,0.0.0.0:9"}), ModelControl::kNone);
  EXPECT_EQ(control({"--address=0.0.0.0:9", "--model_control=any"}), ModelControl::kAny);
  EXPECT_EQ(control({"--address=0.0.0.0:9", "--tokens=t", "--tls_cert=c", "--tls_key=k"}),
            ModelControl::kAdmin);
  EXPECT_EQ(control({"--tokens=t"}), ModelControl::kAdmin);
  EXPECT_EQ(control({"--model_control=none"}), ModelControl::kNone);
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--model_control=root"}), HasSubstr("root"));
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--address=0.0.0.0:9", "--tokens=t"}),
              HasSubstr("--insecure_tokens"));
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--tls_cert=c"}), HasSubstr("--tls_key"));
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--metrics_address=0.0.0.0:8002", "--tokens=t"}),
              AllOf(HasSubstr("--metrics_address"), HasSubstr("--insecure_tokens")));
  for (const char* flag : {"--metrics_address=127.0.0.1:8002", "--metrics_address=[::1]:8002"}) {
    EXPECT_TRUE(Parse({"--model_repository", "/m", "--tokens=t", flag}).ok()) << flag;
  }
}

TEST(Options, BoundsOfOneClient) {
  const Options options =
      Parse({"--model_repository", "/m", "--max_requests_in_flight_per_client=7",
             "--max_bytes_in_flight_per_client=128MiB", "--max_requests_per_second_per_client=2.5"})
          ->options;
  const transport::ClientQuota& client = options.rpc.transport.client;
  EXPECT_EQ(client.requests_in_flight, 7);
  EXPECT_EQ(client.bytes_in_flight, 128 << 20);
  EXPECT_EQ(client.requests_per_second, 2.5);
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--max_bytes_in_flight_per_client=127MiB"}),
              HasSubstr("expected 0 or at least 134217728"));
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--max_requests_per_second_per_client=nan"}),
              HasSubstr("--max_requests_per_second_per_client"));
}

TEST(Options, MetricsHaveAddressesAsGrpcHas) {
  EXPECT_THAT(Parse({"--model_repository", "/m"})->options.metrics_addresses, IsEmpty());
  EXPECT_THAT(Parse({"--model_repository", "/m", "--metrics_address=0.0.0.0:8002,[::1]:8003",
                     "--metrics_address=unix:/run/m"})
                  ->options.metrics_addresses,
              ElementsAre("0.0.0.0:8002", "[::1]:8003", "unix:/run/m"));
  for (const char* bad : {":8002", "8002", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536",
                          "http://127.0.0.1:8002", "127.0.0.1:8002/metrics"}) {
    const std::string flag = absl::StrCat("--metrics_address=", bad);
    EXPECT_THAT(ErrorOf({"--model_repository", "/m", flag.c_str()}),
                AllOf(HasSubstr("--metrics_address: got"), HasSubstr("expected host:port")));
  }
}

// As people have them in their settings.
TEST(Options, AnAddressIsNoUrl) {
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--otlp_endpoint=grpc://host:4317"}),
              HasSubstr("--otlp_endpoint: got \"grpc://host:4317\", expected host:port, http://"));
  for (const char* url : {"http://127.0.0.1:8001", "https://host:8001", "grpc://host:8001"}) {
    const std::string flag = absl::StrCat("--address=", url);
    EXPECT_THAT(ErrorOf({"--model_repository", "/m", flag.c_str()}),
                HasSubstr(absl::StrCat("--address: got \"", url, "\", expected host:port")));
  }
}

TEST(Options, ReadsFlags) {
  const Options options = Parse({"--model_repository", "/m", "--load_model", "a", "--load_model",
                                 "b", "--no_reflection", "--max_receive_message_bytes", "8MiB",
                                 "--address=127.0.0.1:0", "--drain_delay_ms", "250", "--log_format",
                                 "json", "--log_level", "debug", "--device_memory_limit=2g"})
                              ->options;
  EXPECT_THAT(options.load_models, ElementsAre("a", "b"));
  EXPECT_FALSE(options.rpc.reflection);
  EXPECT_EQ(options.rpc.transport.max_receive_message_bytes, 8 << 20);
  EXPECT_EQ(options.rpc.transport.memory_quota_bytes, 128 << 20);
  EXPECT_EQ(options.drain_delay, absl::Milliseconds(250));
  EXPECT_EQ(options.log_format, obs::LogFormat::kJson);
  EXPECT_EQ(options.log_level, obs::LogLevel::kDebug);
  EXPECT_EQ(options.device_memory_limit, int64_t{2} << 30);
}

TEST(Options, ModelsAsTheHubSpellsThem) {
  const Options options = Parse({"--model_repository", "/m", "--load_model", "org/name",
                                 "--load_model", "plain", "--pin", "org/other"})
                              ->options;
  EXPECT_THAT(options.load_models, ElementsAre("org--name", "plain"));
  EXPECT_THAT(options.pinned, ElementsAre("org--other"));
}

TEST(Options, SingleFoldersStandBesideARepositoryOrAlone) {
  const Options options =
      Parse({"--model", "a=/x", "--model=b=/y=z,c=rel/ative", "--keep_going"})->options;
  EXPECT_EQ(options.model_repository, "");
  ASSERT_EQ(options.models.size(), 3u);
  EXPECT_EQ(options.models[0].name, "a");
  EXPECT_EQ(options.models[0].path, "/x");
  EXPECT_EQ(options.models[1].name, "b");
  EXPECT_EQ(options.models[1].path, "/y=z");
  EXPECT_EQ(options.models[2].path, "rel/ative");
  EXPECT_TRUE(options.keep_going);
  EXPECT_FALSE(Parse({"--model_repository=/m"})->options.keep_going);
  EXPECT_FALSE(Parse({"--model_repository=/m"})->options.require_all_weights);
  EXPECT_TRUE(
      Parse({"--model_repository=/m", "--require_all_weights"})->options.require_all_weights);
  EXPECT_EQ(Parse({"--model_repository=/m", "--model", "a=/x"})->options.models.size(), 1u);
}

TEST(Options, SingleFoldersHaveLegalNamesEachOnce) {
  for (const char* text : {"a", "a=", ""}) {
    EXPECT_THAT(ErrorOf({"--model", text}),
                HasSubstr(absl::StrCat("--model: got \"", text, "\", expected NAME=DIR")))
        << text;
  }
  for (const char* text : {"=/x", ".a=/x", "a/b=/x", "../a=/x", "a b=/x"}) {
    EXPECT_THAT(ErrorOf({"--model", text}), HasSubstr("--model: model name: got \"")) << text;
  }
  EXPECT_THAT(ErrorOf({"--model", "a=/x", "--model", "a=/y"}),
              HasSubstr("--model: got a=/x and a=/y, expected each name once"));
}

TEST(Options, TokenThreshold) {
  const auto threshold = [](const char* flag) {
    return Parse({"--model_repository", "/m", flag})->options.engine.token_threshold;
  };
  EXPECT_EQ(threshold("--token_threshold=64"), 64);
  EXPECT_EQ(threshold("--token_threshold=0"), 0);
  EXPECT_EQ(threshold("--token_threshold=auto"), engine::ThresholdTable::kAuto);
  EXPECT_EQ(threshold("--token_threshold=default"), engine::ThresholdTable::kByKernel);
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--token_threshold=-2"}),
              HasSubstr("default or auto"));
}

TEST(Options, SeveralDevices) {
  EXPECT_EQ(Parse({"--model_repository", "/m"})->options.sharding, model::Sharding::kReplicas);
  for (model::Sharding sharding :
       {model::Sharding::kReplicas, model::Sharding::kColumns, model::Sharding::kModels}) {
    const Options options = Parse({"--model_repository", "/m", "--device=cuda:0,cuda:1", "--shard",
                                   Name(sharding).data()})
                                ->options;
    EXPECT_EQ(options.sharding, sharding);
    EXPECT_EQ(options.device, "cuda:0,cuda:1");
  }
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--shard", "rows"}), HasSubstr("--shard"));
}

TEST(Options, RefusesWhatItDoesNotKnow) {
  EXPECT_THAT(ErrorOf({"--bogus"}), HasSubstr("--bogus"));
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "stray"}), HasSubstr("stray"));
  EXPECT_THAT(ErrorOf({}), HasSubstr("--model_repository"));
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--log_level", "loud"}), HasSubstr("loud"));
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--token_threshold", "many"}),
              HasSubstr("many"));
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--token_threshold", "-1"}), HasSubstr("-1"));
  EXPECT_EQ(Parse({"--model_repository", "/m", "--token_threshold", "auto"})
                ->options.engine.token_threshold,
            engine::ThresholdTable::kAuto);
}

TEST(Options, ChecksSizes) {
  for (const char* size : {"1", "3GiB", "12parsecs", "99999999999999999999", "-5"}) {
    EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--max_receive_message_bytes", size}),
                HasSubstr("--max_receive_message_bytes"))
        << size;
  }
}

TEST(Options, NumbersAreNumbers) {
  for (const char* flag : {"--max_queue_delay_us", "--max_starvation_ms", "--drain_timeout_s",
                           "--keepalive_time_s", "--keepalive_timeout_s", "--handshake_timeout_s",
                           "--send_timeout_s", "--min_ping_interval_s", "--max_connection_idle_s",
                           "--max_connection_age_s", "--max_connection_age_grace_s"}) {
    for (const char* value : {"nan", "-nan", "inf", "-1", "1e400", "soon"}) {
      const std::string arg = absl::StrCat(flag, "=", value);
      EXPECT_THAT(ErrorOf({"--model_repository", "/m", arg.c_str()}),
                  HasSubstr(absl::StrCat(flag, ": got \"", value, "\", expected a number from ")));
    }
    const std::string arg = absl::StrCat(flag, "=2.5");
    EXPECT_TRUE(Parse({"--model_repository", "/m", arg.c_str()}).ok()) << arg;
  }
}

TEST(Options, ChecksTheAddress) {
  for (const char* address : {"8001", ":8001", "host:", "host:-1", "host:65536", "host:http"}) {
    EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--address", address}), HasSubstr("--address"))
        << address;
  }
  EXPECT_EQ(
      Parse({"--model_repository", "/m", "--address", "[::1]:9"})->options.rpc.transport.addresses,
      std::vector<std::string>{"[::1]:9"});
}

TEST(Options, TakesSeveralAddresses) {
  const services::Options rpc = Parse({"--model_repository", "/m", "--address", "unix:/run/a.sock",
                                       "--address=[::1]:9,unix:b.sock", "--unix_socket_mode=0600"})
                                    ->options.rpc;
  EXPECT_THAT(rpc.transport.addresses, ElementsAre("unix:/run/a.sock", "[::1]:9", "unix:b.sock"));
  EXPECT_EQ(rpc.transport.unix_socket_mode, 0600u);
  EXPECT_EQ(Parse({"--model_repository", "/m"})->options.rpc.transport.unix_socket_mode, 0660u);
  for (const char* mode : {"", "rw", "0o660", "8", "1000", "-1", "07777777777777"}) {
    EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--unix_socket_mode", mode}),
                HasSubstr("--unix_socket_mode"))
        << mode;
  }
}

TEST(Options, ChecksSocketPaths) {
  const std::string longest = "unix:" + std::string(107, 'x');
  EXPECT_TRUE(Parse({"--model_repository", "/m", "--address", longest.c_str()}).ok());
  const std::string longer = longest + "x";
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--address", longer.c_str()}), HasSubstr("107"));
  for (const char* address : {"unix:", "unix://", "unix://host/a", "unix:/a/", "unix:/a b",
                              "unix:/a%41", "unix:/a\n", "unix-abstract:a"}) {
    EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--address", address}), HasSubstr("--address"))
        << address;
  }
  EXPECT_EQ(transport::ParseListenAddress("unix:///run/a")->socket_path, "/run/a");
}

TEST(Options, BoundsBytesInFlight) {
  const services::Options rpc = Parse({"--model_repository", "/m"})->options.rpc;
  EXPECT_EQ(rpc.in_flight_bytes,
            8 * (rpc.transport.max_receive_message_bytes + rpc.transport.max_send_message_bytes));
  EXPECT_EQ(Parse({"--model_repository", "/m", "--max_in_flight_bytes=128MiB"})
                ->options.rpc.in_flight_bytes,
            128 << 20);
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--max_in_flight_bytes=127MiB"}),
              HasSubstr("expected at least 134217728"));
}

class EnvironmentVariable {
 public:
  EnvironmentVariable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~EnvironmentVariable() { unsetenv(name_); }

 private:
  const char* const name_;
};

TEST(Options, FlagBeatsConfigFileBeatsEnvironment) {
  const std::string path = testing::TempDir() + "/awqd_options_test.toml";
  std::ofstream(path) << "token_threshold = 64\nmax_queued_requests = 10\n";
  const EnvironmentVariable repository("AWQD_MODEL_REPOSITORY", "/env");
  const EnvironmentVariable threshold("AWQD_TOKEN_THRESHOLD", "32");
  const EnvironmentVariable queued("AWQD_MAX_QUEUED_REQUESTS", "5");
  EXPECT_EQ(Parse({})->options.engine.token_threshold, 32);
  EXPECT_EQ(Parse({})->options.model_repository, "/env");
  const Options file = Parse({"--config", path.c_str()})->options;
  EXPECT_EQ(file.engine.token_threshold, 64);
  EXPECT_EQ(file.rpc.max_queued_requests, 10);
  EXPECT_EQ(
      Parse({"--config", path.c_str(), "--token_threshold=1"})->options.engine.token_threshold, 1);
}

TEST(Options, RefusesUnknownKeysInTheConfigFile) {
  const std::string path = testing::TempDir() + "/awqd_options_bad.toml";
  std::ofstream(path) << "tokens_threshold = 64\n";
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--config", path.c_str()}),
              HasSubstr("tokens_threshold"));
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--config", "/no/such.toml"}),
              HasSubstr("/no/such.toml"));
}

TEST(Options, ErrorsInTheConfigFileNameFileAndLine) {
  const std::string path = testing::TempDir() + "/awqd_options_lines.toml";
  const auto error = [&](absl::string_view text, std::vector<const char*> more = {}) {
    std::ofstream(path) << "# a comment\n" << text << "\n";
    std::vector<const char*> args = {"--model_repository", "/m", "--config", path.c_str()};
    args.insert(args.end(), more.begin(), more.end());
    return ErrorOf(args);
  };
  EXPECT_THAT(error("token_treshold = 64"),
              HasSubstr(path + ":2: token_treshold: did you mean token_threshold?"));
  EXPECT_THAT(error("lanes = 1\nbogus = 1"), HasSubstr(path + ":3: bogus: no flag has that name"));
  EXPECT_THAT(error("help = true"), HasSubstr(path + ":2: help: "));
  EXPECT_THAT(error("lanes = 1\nlog_level = \"loud\""), HasSubstr(path + ":3: --log_level: "));
  EXPECT_THAT(error("log_level = loud"), HasSubstr(path + ":2: "));
  EXPECT_THAT(error("lanes = 1\nlanes = 2"), HasSubstr(path + ":3: "));
  EXPECT_THAT(error("[section]\nlanes = 1"), HasSubstr(path + ":2: section: got a table"));
  EXPECT_THAT(error("lanes = [[1]]"), HasSubstr(path + ":2: lanes: got a value"));
  // An error of a flag names no place in the file.
  EXPECT_THAT(error("lanes = 1", {"--lanes=many"}), Not(HasSubstr(path)));
}

TEST(Options, ConfigFilesAreToml) {
  const std::string path = testing::TempDir() + "/awqd_options_toml.toml";
  std::ofstream(path) << "address = [\"127.0.0.1:1\", \"unix:/run/b.sock\"]  # two\n"
                      << "max_receive_message_bytes = \"8MiB\"\nreflection = false\n"
                      << "drain_timeout_s = 2.5\nunix_socket_mode = \"0600\"\nport_file = \"\"\n"
                      << "model_repository = '/a # b'\n";
  const auto line = Parse({"--config", path.c_str()});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->options.rpc.transport.addresses.front(), "127.0.0.1:1");
  EXPECT_EQ(line->options.rpc.transport.max_receive_message_bytes, 8 << 20);
  EXPECT_FALSE(line->options.rpc.reflection);
  EXPECT_EQ(line->options.drain_timeout, absl::Seconds(2.5));
  EXPECT_EQ(line->options.rpc.transport.unix_socket_mode, 0600u);
  EXPECT_EQ(line->options.port_file, "");
  EXPECT_EQ(line->options.model_repository, "/a # b");
}

TEST(Options, AMisspelledFlagComesFirst) {
  EXPECT_EQ(ErrorOf({"--model_repositry=/m"}),
            "--model_repositry: did you mean --model_repository?");
  EXPECT_EQ(ErrorOf({"--log_level=loud", "--adress=a"}), "--adress: did you mean --address?");
  EXPECT_EQ(ErrorOf({"--log_level=loud", "--bogus"}), "--bogus: no such flag");
  EXPECT_EQ(ErrorOf({"--addr=a"}), "--addr: did you mean --address?");
  EXPECT_EQ(ErrorOf({"--model_repo=/m"}), "--model_repo: did you mean --model_repository?");
  EXPECT_EQ(ErrorOf({"--tls=a"}), "--tls: did you mean --tls_cert, --tls_key or --tls_client_ca?");
  EXPECT_EQ(ErrorOf({"--repository=/m"}),
            "--repository: did you mean --model_repository or --watch_repository?");
}

TEST(Options, RefusesUnknownVariables) {
  const char* const args[] = {"--model_repository", "/m"};
  const auto with = [&](const char* name) {
    const EnvironmentVariable variable(name, "1");
    return ErrorOf({args[0], args[1]});
  };
  EXPECT_EQ(with("AWQD_TOKEN_TRESHOLD"),
            "environment: AWQD_TOKEN_TRESHOLD: did you mean AWQD_TOKEN_THRESHOLD?");
  EXPECT_THAT(with("AWQD_BOGUS"), HasSubstr("environment: AWQD_BOGUS is not a setting of awqd"));
  EXPECT_THAT(with("AWQD_PORT_FIEL"), HasSubstr("did you mean AWQD_PORT_FILE?"));
  EXPECT_THAT(with("AWQD_REPORT"), HasSubstr("not a setting"));
  EXPECT_THAT(with("AWQD_METRICS"), HasSubstr("did you mean AWQD_METRICS_ADDRESS?"));
  EXPECT_THAT(with("AWQD_lanes"), HasSubstr("did you mean AWQD_LANES?"));
  // Variables of Kubernetes and Docker, of clients, of the kernels, and of the tests.
  for (const char* name :
       {"AWQD_PORT", "AWQD_PORT_8001_TCP_ADDR", "AWQD_SERVICE_HOST", "AWQD_SERVICE_PORT_GRPC",
        "AWQD_QWEN_PREDICTOR_SERVICE_HOST", "AWQD_QWEN_PREDICTOR_SERVICE_PORT",
        "AWQD_QWEN_PREDICTOR_SERVICE_PORT_HTTP_METRICS", "AWQD_QWEN_PREDICTOR_PORT",
        "AWQD_QWEN_PREDICTOR_PORT_53_UDP_PROTO", "AWQD_NAME", "AWQD_1_ENV_PATH", "AWQD_TLS_CA",
        "AWQD_CLIENT_CERT", "AWQD_CLIENT_KEY", "AWQD_TOKEN_FILE", "AWQD_DENSE", "AWQCTL_BOGUS",
        "AWQD_CPU_ISA", "AWQD_TEST_DEVICE"}) {
    const EnvironmentVariable variable(name, "tcp://10.0.0.7:8001");
    EXPECT_TRUE(Parse({args[0], args[1]}).ok()) << name;
  }
}

TEST(Options, PrintsEveryValueAndItsSource) {
  const std::string path = testing::TempDir() + "/awqd_options_print.toml";
  std::ofstream(path) << "lanes = 3\nload_model = [\"a\", \"b\"]\nanswer_threads = 1\n";
  const EnvironmentVariable queued("AWQD_MAX_QUEUED_REQUESTS", "5");
  const EnvironmentVariable hidden("AWQD_LANES", "7");
  const auto line =
      Parse({"--config", path.c_str(), "--print_config", "--max_receive_message_bytes", "8MiB",
             "--no_reflection", "--keep_going", "--unix_socket_mode=0600", "--answer_threads=2"});
  ASSERT_TRUE(line.ok()) << line.status();
  const auto has = [&](const std::string& value, const std::string& source) {
    EXPECT_THAT(line->print, ::testing::ContainsRegex(value + " *  # " + source + "\n"));
  };
  has("lanes = 3", path + ":1");
  has("load_model = .\"a\", \"b\".", path + ":2");
  has("answer_threads = 2", "flag");
  EXPECT_THAT(Parse({"--answer_threads=-1", "--print_config"})->print,
              HasSubstr("\nanswer_threads = -1 "));
  has("max_queued_requests = 5", "environment AWQD_MAX_QUEUED_REQUESTS");
  has("max_receive_message_bytes = \"8MiB\"", "flag");
  has("reflection = false", "flag");
  has("keep_going = true", "flag");
  has("batch_invariant = false", "default");
  has("unix_socket_mode = \"0600\"", "flag");
  has("token_threshold = \"default\"", "default");
  has("\n# model_repository = \"\"", "default");
  // Reading the printed file gives the same values, with the file as their source.
  std::ofstream(path) << line->print;
  const auto again = Parse({"--config", path.c_str(), "--model_repository=/m"});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->options.rpc.transport.max_receive_message_bytes, 8 << 20);
  EXPECT_THAT(again->options.load_models, ElementsAre("a", "b"));
  EXPECT_FALSE(again->options.rpc.reflection);
  EXPECT_TRUE(again->options.keep_going);
  EXPECT_EQ(again->options.rpc.transport.unix_socket_mode, 0600u);
}

// The default that the comment of `key` in the file `text` shows; empty without a comment.
std::string DefaultIn(absl::string_view text, const std::string& key) {
  const std::string comment = "\n# " + key + " = ";
  const size_t at = text.find(comment);
  if (at == text.npos) return "";
  text.remove_prefix(at + comment.size());
  return std::string(text.substr(0, text.find('\n')));
}

TEST(Options, TheCommentedFileHasEverySetting) {
  const std::string path = DataPath("../../deploy/awqd.toml");
  const auto line = Parse({"--config", path.c_str()});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->options.model_repository, "/var/lib/awqd/models");
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const std::string printed = Parse({"--print_config"})->print;
  int settings = 0;
  for (absl::string_view setting : absl::StrSplit(printed, '\n')) {
    const size_t equals = setting.find(" = ");
    if (equals == setting.npos) continue;
    absl::ConsumePrefix(&setting, "# ");
    const std::string key(setting.substr(0, setting.find(" = ")));
    EXPECT_THAT(text, ::testing::ContainsRegex("\n(# )?" + key + " = ")) << key;
    ++settings;
    if (key == "model_repository" || key == "model") continue;  // examples
    const std::string preset(setting.substr(key.size() + 3, setting.find("  ") - key.size() - 3));
    EXPECT_EQ(DefaultIn(text, key), preset) << key;
  }
  EXPECT_GT(settings, 40);
}

TEST(Options, PrintsHelpAndVersion) {
  EXPECT_THAT(Parse({"--help"})->print, HasSubstr("--model_repository"));
  EXPECT_THAT(Parse({"--version"})->print, HasSubstr("awqd "));
  const std::string some = Parse({"--help"})->print, all = Parse({"--help=all"})->print;
  EXPECT_GT(all.size(), some.size());
  for (const std::string& help : {some, all}) {
    EXPECT_THAT(help, HasSubstr("\nBatching:\n"));
    for (const absl::string_view line : absl::StrSplit(help, '\n')) EXPECT_LE(line.size(), 80u);
  }
  EXPECT_THAT(some, HasSubstr("(default 127.0.0.1:8001)"));
  EXPECT_THAT(some, HasSubstr("Largest request. (default 64MiB)"));
}

}  // namespace
}  // namespace awqd
