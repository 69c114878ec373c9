// Flags, config file and environment.
#include "server/options.h"

#include <cstdlib>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/transport/listen_address.h"

namespace awqd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
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

TEST(Options, SharedMemoryIsOffUnlessAPrefixIsGiven) {
  EXPECT_EQ(Parse({"--model_repository", "/m"})->options.rpc.shared_memory.prefix, "");
  const Options options = Parse({"--model_repository", "/m", "--shared_memory_prefix=awqd-",
                                 "--max_shared_memory_ranges=7"})
                              ->options;
  EXPECT_EQ(options.rpc.shared_memory.prefix, "awqd-");
  EXPECT_EQ(options.rpc.shared_memory.max_open, 7);
  EXPECT_THAT(ErrorOf({"--model_repository", "/m", "--shared_memory_prefix=../x"}),
              HasSubstr("--shared_memory_prefix: got \"../x\", expected at most 64 letters"));
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
  for (const char* flag :
       {"--max_queue_delay_us", "--max_starvation_ms", "--drain_timeout_s", "--keepalive_time_s",
        "--keepalive_timeout_s", "--min_ping_interval_s", "--max_connection_idle_s",
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
            16 * (rpc.transport.max_receive_message_bytes + rpc.transport.max_send_message_bytes));
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

TEST(Options, PrintsHelpAndVersion) {
  EXPECT_THAT(Parse({"--help"})->print, HasSubstr("--model_repository"));
  EXPECT_THAT(Parse({"--version"})->print, HasSubstr("awqd "));
}

}  // namespace
}  // namespace awqd
