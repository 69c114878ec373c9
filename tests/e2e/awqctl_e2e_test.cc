// Every subcommand of the awqctl binary, and the example, against the real server.
#include <signal.h>

#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_process.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

constexpr char kQuery[] = "encoder.layer.0.attention.self.query";

class AwqctlE2eTest : public ::testing::Test {
 protected:
  AwqctlE2eTest()
      : server_({"--model_repository=" + DemoRepository(),
                 "--load_model=" + std::string(kDemoModel)}) {}
  void SetUp() override { ASSERT_TRUE(server_.WaitServing()) << server_.log(); }

  void Expect(int code, const std::vector<std::string>& args, const std::string& text) const {
    const ExitReport report = server_.Awqctl(args);
    EXPECT_EQ(report.code, code) << ::testing::PrintToString(args) << "\n" << report.log;
    EXPECT_THAT(report.log, HasSubstr(text)) << ::testing::PrintToString(args);
  }

  ServerProcess server_;
  const TempFolder folder_;
};

TEST_F(AwqctlE2eTest, Inspects) {
  Expect(0, {"healthcheck"}, "SERVING");
  Expect(0, {"healthcheck", "--service", "awqd.v1.QuantizedInference"}, "SERVING");
  Expect(3, {"healthcheck", "--service", "absent"}, "NOT_FOUND");
  Expect(0, {"status"}, "cpu");
  Expect(0, {"models"}, "READY");
  Expect(0, {"models", kDemoModel}, "encoder.layer.[0-1].attention.self.query");
  Expect(3, {"models", "absent"}, "NOT_FOUND");
  Expect(0, {"kernels"}, "cpu/");
  Expect(0, {"kernels", "--markdown"}, "|---|");
  Expect(0, {"--json", "status"}, "\"max_receive_bytes\"");
  Expect(1, {"bogus"}, "awqctl: ");
}

TEST_F(AwqctlE2eTest, LoadsAndUnloads) {
  Expect(0, {"load", kDemoModel}, "version 2");
  Expect(0, {"unload", kDemoModel}, "unloaded");
  Expect(3, {"unload", kDemoModel}, "NOT_FOUND");
  Expect(3, {"matmul", kDemoModel, kQuery, "--random", "1"}, "NOT_FOUND");
  Expect(0, {"load", kDemoModel}, "version 3");
  Expect(3, {"load", "../secret"}, "INVALID_ARGUMENT");
}

TEST_F(AwqctlE2eTest, DequantizesAndMultipliesAsTheGoldensSay) {
  const std::string w = folder_ / "w.npy", y = folder_ / "y.npy";
  Expect(0, {"dequantize", kDemoModel, kQuery, "-o", w}, "[384, 384]");
  Expect(0, {"compare", w, Golden(std::string(kQuery) + ".dequantized.npy"), "--bit_exact"},
         "same");
  const std::string golden = Golden(std::string(kQuery) + ".matmul.npy");
  for (const char* path : {"auto", "fused", "dequantize"}) {
    Expect(0,
           {"matmul", kDemoModel, kQuery, Golden("activations_384.npy"), "-o", y, "--path", path},
           "latency");
    Expect(0, {"compare", y, golden, "--max_relative_error", "1e-3"}, "same");
  }
  Expect(1, {"compare", y, golden, "--max_relative_error", "1e-9"}, "different");
  Expect(0, {"matmul", kDemoModel, kQuery, "--random", "300", "--path", "dequantize"},
         "path dequantize");
  Expect(0, {"matmul", kDemoModel, kQuery, "--random", "0"}, "[0, 384]");
  Expect(0, {"matmul", kDemoModel, kQuery, "--random", "3", "--dtype", "bf16", "-o", y}, "BF16");
  Expect(0,
         {"dequantize", kDemoModel, kQuery, "-o", folder_ / "w.safetensors", "--dtype", "bf16",
          "--rows", "1:3", "--columns", "8:"},
         "[2, 376]");
  Expect(5, {"dequantize", kDemoModel, kQuery, "-o", "/nonexistent/w.npy"}, "/nonexistent");
  Expect(3, {"dequantize", kDemoModel, "absent", "-o", w}, "NOT_FOUND");
  Expect(3, {"matmul", kDemoModel, kQuery, Golden("activations_1536.npy")}, "INVALID_ARGUMENT");
}

TEST_F(AwqctlE2eTest, ExampleProgram) {
  const ExitReport report =
      RunProgram(BinaryPath("awqd_example"), {server_.address(), kDemoModel, kQuery});
  EXPECT_EQ(report.code, 0) << report.log;
  EXPECT_THAT(report.log, HasSubstr("y is [2, 384]"));
}

TEST_F(AwqctlE2eTest, SaysWhenTheServerIsGone) {
  EXPECT_EQ(server_.Stop().code, 0);
  Expect(2, {"status"}, "cannot reach");
  Expect(2, {"healthcheck"}, "cannot reach");
  Expect(2, {"healthcheck", "--wait", "0.5"}, "cannot reach");
}

TEST(AwqctlWaitTest, HealthcheckSeesAServerThatComesLate) {
  TempFolder folder;
  ServerProcess port_finder({"--model_repository=" + DemoRepository()});
  ASSERT_TRUE(port_finder.WaitListening()) << port_finder.log();
  const std::string tcp = port_finder.address();
  EXPECT_EQ(port_finder.Stop().code, 0);
  for (const std::string& address : {tcp, "unix:" + (folder / "awqd.sock")}) {
    ExitReport report;
    std::thread waiter([&] {
      report = RunProgram(BinaryPath("awqctl"),
                          {"--address", address, "healthcheck", "--wait", "30"}, absl::Seconds(40));
    });
    const absl::Time start = absl::Now();
    absl::SleepFor(absl::Seconds(2));
    ServerProcess server({"--model_repository=" + DemoRepository()}, address);
    ASSERT_TRUE(server.WaitServing()) << server.log();
    const absl::Duration ready = absl::Now() - start;
    waiter.join();
    EXPECT_EQ(report.code, 0) << report.log;
    EXPECT_LT(report.took, ready + absl::Seconds(1.5)) << address;
    EXPECT_EQ(server.Stop().code, 0);
  }
}

TEST(AwqctlDrainTest, HealthcheckExitsFourWhileDraining) {
  ServerProcess server({"--model_repository=" + DemoRepository(),
                        "--load_model=" + std::string(kDemoModel), "--drain_delay_ms=60000"});
  ASSERT_TRUE(server.WaitServing()) << server.log();
  server.Signal(SIGTERM);
  ExitReport report;
  for (int i = 0; i < 100; ++i) {
    report = server.Awqctl({"healthcheck"});
    if (report.code == 4) break;
  }
  EXPECT_EQ(report.code, 4) << report.log;
}

}  // namespace
}  // namespace awqd
