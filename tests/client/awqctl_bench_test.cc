// awqctl bench from arguments to exit code, against services that live in the test.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/client/awqctl_command.h"
#include "tests/client/fake_server.h"

namespace awqd::awqctl {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class AwqctlBenchTest : public AwqctlFixture {
 protected:
  int Run(std::vector<std::string> args) {
    args.insert(args.begin(), {"--address", server_.address, "bench"});
    return RunAlone(args);
  }
  // The first point that --json printed.
  nlohmann::json Point() const { return nlohmann::json::parse(out_)["points"][0]; }

  FakeServer server_;
};

TEST_F(AwqctlBenchTest, ClosedLoopCountsItsRequests) {
  EXPECT_EQ(Run({"--json", "--weight", "m/w", "--concurrency", "3", "--requests", "200", "--warmup",
                 "0"}),
            kOk)
      << err_;
  EXPECT_EQ(Point()["latency"]["count"], 200);
  EXPECT_EQ(Point()["errors"].size(), 0u);
  EXPECT_GT(Point()["requests_per_s"], 0);
  EXPECT_THAT(err_, IsEmpty()) << "no progress without a terminal";
}

TEST_F(AwqctlBenchTest, OpenLoopKeepsItsRate) {
  EXPECT_EQ(Run({"--json", "--weight", "m/w:2", "--rate", "500", "--requests", "100", "--warmup",
                 "0.05", "--arrivals", "constant", "--deadline_ms", "60000"}),
            kOk)
      << err_;
  EXPECT_EQ(Point()["latency"]["count"], 100);
  EXPECT_EQ(Point()["unsent"], 0);
  EXPECT_NEAR(Point()["seconds"], 0.2, 0.1) << "100 requests at 500/s";
}

TEST_F(AwqctlBenchTest, SweepHasARowForEachPointAndWritesFiles) {
  const std::string stem = Path("bench");
  EXPECT_EQ(
      Run({"--weight", "m/w", "--concurrency", "1..4", "--requests", "20", "--tokens", "1,2:2",
           "--warmup", "0", "--health", "--svg", stem + ".svg", "--json_file", stem + ".json"}),
      kOk)
      << err_;
  EXPECT_THAT(out_, HasSubstr("p99.9"));
  EXPECT_THAT(out_, HasSubstr("\n4 callers"));
  EXPECT_THAT(out_, HasSubstr("health Check p99"));
  std::ostringstream svg, json;
  svg << std::ifstream(stem + ".svg").rdbuf();
  json << std::ifstream(stem + ".json").rdbuf();
  EXPECT_THAT(svg.str(), HasSubstr("</svg>"));
  EXPECT_EQ(nlohmann::json::parse(json.str())["points"].size(), 3u);
}

TEST_F(AwqctlBenchTest, TellsAMistakeBeforeItLoads) {
  EXPECT_EQ(Run({"--weight", "x/w"}), kCallFailed);
  EXPECT_THAT(err_, HasSubstr("NOT_FOUND"));
  EXPECT_EQ(Run({"--weight", "m/absent"}), kCallFailed);
  EXPECT_THAT(err_, HasSubstr("no weight 'absent'"));
  server_.inference.status = grpc::Status(grpc::RESOURCE_EXHAUSTED, "queue full");
  EXPECT_EQ(Run({"--weight", "m/w"}), kCallFailed);
  EXPECT_EQ(err_, "awqctl: RESOURCE_EXHAUSTED: queue full\n");
}

TEST_F(AwqctlBenchTest, UnwritableFilesAreToldBeforeTheLoad) {
  for (const char* flag : {"--svg", "--json_file"}) {
    EXPECT_EQ(Run({"--weight", "m/w", "--requests", "5", flag, "/absent/p"}), kFileFailed);
    EXPECT_EQ(err_, "awqctl: cannot write /absent/p: No such file or directory\n");
    EXPECT_THAT(out_, IsEmpty());
    EXPECT_FALSE(server_.inference.last_matmul.has_weight()) << "nothing was sent";
  }
}

TEST_F(AwqctlBenchTest, AFileThatFailsLeavesTheOther) {
  const std::string svg = Path("bench.svg");
  EXPECT_EQ(Run({"--weight", "m/w", "--requests", "5", "--warmup", "0", "--json_file", "/dev/full",
                 "--svg", svg}),
            kFileFailed);
  EXPECT_EQ(err_, "awqctl: cannot write /dev/full: No space left on device\n");
  EXPECT_GT(std::filesystem::file_size(svg), 100u);
}

TEST_F(AwqctlBenchTest, AFailedBenchLeavesFilesAsTheyWere) {
  const std::string stem = Path("bench");
  std::ofstream(stem + ".json") << "old";
  EXPECT_EQ(Run({"--weight", "m/absent", "--svg", stem + ".svg", "--json_file", stem + ".json"}),
            kCallFailed);
  EXPECT_FALSE(std::filesystem::exists(stem + ".svg"));
  EXPECT_EQ(std::filesystem::file_size(stem + ".json"), 3u);
}

TEST_F(AwqctlBenchTest, ShowsProgressOnATerminal) {
  terminal_ = true;
  EXPECT_EQ(Run({"--weight", "m/w", "--duration", "0.5", "--warmup", "0"}), kOk) << err_;
  EXPECT_THAT(err_, HasSubstr("answers/s"));
}

TEST_F(AwqctlBenchTest, BadArgumentsExitOneWithOneLine) {
  const std::vector<std::vector<std::string>> cases = {
      {},
      {"--weight", "m"},
      {"--weight", "m/w", "--tokens", "x"},
      {"--weight", "m/w", "--tokens", "1:0"},
      {"--weight", "m/w", "--concurrency", "0"},
      {"--weight", "m/w", "--concurrency", "1.5"},
      {"--weight", "m/w", "--concurrency", "1", "--rate", "5"},
      {"--weight", "m/w", "--rate", "-5"},
      {"--weight", "m/w", "--arrivals", "sometimes"},
      {"--weight", "m/w", "--deadline_ms", "0"},
      {"--weight", "m/w", "--duration", "0"},
      {"--weight", "m/w", "--duration", "1", "--requests", "5"},
      {"--weight", "m/w", "--dtype", "int8"}};
  for (const auto& args : cases) {
    EXPECT_EQ(Run(args), kBadArguments) << ::testing::PrintToString(args);
    EXPECT_EQ(std::count(err_.begin(), err_.end(), '\n'), 1) << err_;
    EXPECT_THAT(out_, IsEmpty());
  }
}

TEST_F(AwqctlBenchTest, KeepsWhatItMeasuredWhenTheServerGoes) {
  const std::string json = Path("bench.json");
  auto server = std::make_unique<FakeServer>();
  std::thread end([&server] {
    while (server->inference.keyed_calls < 100) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    server.reset();
  });
  const std::string address = server->address;
  const int code = RunAlone({"--address", address, "bench", "--weight", "m/w", "--concurrency",
                             "2,4", "--duration", "600", "--warmup", "0", "--json_file", json});
  end.join();
  EXPECT_EQ(code, kCannotConnect) << err_;
  EXPECT_THAT(err_, HasSubstr("the server has gone away in load point 1 of 2"));
  EXPECT_THAT(out_, HasSubstr("\n2 callers"));
  EXPECT_THAT(out_, HasSubstr("UNAVAILABLE, the first: "));
  std::ostringstream text;
  text << std::ifstream(json).rdbuf();
  const nlohmann::json points = nlohmann::json::parse(text.str())["points"];
  ASSERT_EQ(points.size(), 1u);
  EXPECT_GT(points[0]["latency"]["count"], 50);
  EXPECT_LT(points[0]["seconds"], 300) << "not the time that was planned";
}

TEST_F(AwqctlBenchTest, InterruptedItReportsWhatItHas) {
  const std::string svg = Path("bench.svg");
  struct sigaction before = {};
  sigaction(SIGINT, nullptr, &before);
  std::thread user([&] {
    struct sigaction now = before;
    while (now.sa_handler == before.sa_handler) {  // until the load handles signals
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      sigaction(SIGINT, nullptr, &now);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    kill(getpid(), SIGINT);
  });
  const int code = Run({"--weight", "m/w", "--concurrency", "2,4", "--duration", "600", "--warmup",
                        "0", "--svg", svg});
  user.join();
  EXPECT_EQ(code, 128 + SIGINT) << err_;
  EXPECT_THAT(out_, HasSubstr("\n2 callers"));
  EXPECT_THAT(out_, Not(HasSubstr("4 callers")));
  EXPECT_THAT(err_, HasSubstr("interrupted in load point 1 of 2"));
  std::ostringstream plot;
  plot << std::ifstream(svg).rdbuf();
  EXPECT_THAT(plot.str(), HasSubstr(">latency (us, ms, s; logarithmic)<"));
  EXPECT_THAT(plot.str(), HasSubstr(">requests per second<"));
  struct sigaction after = {};
  sigaction(SIGINT, nullptr, &after);
  EXPECT_EQ(after.sa_handler, before.sa_handler);
}

}  // namespace
}  // namespace awqd::awqctl
