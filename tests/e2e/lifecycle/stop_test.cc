// The real server is stopped at the worst moments.
#include <signal.h>

#include <chrono>
#include <optional>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/e2e/lifecycle/lifecycle_fixture.h"
#include "tests/testing/pseudo_terminal.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

TEST_F(LifecycleTest, StopsWhenIdle) {
  for (const int signal_number : {SIGTERM, SIGINT}) {
    ServerProcess server(Args());
    ASSERT_TRUE(server.WaitServing()) << server.log();
    server.Signal(signal_number);
    const ExitReport report = server.Wait();
    EXPECT_EQ(report.code, 0) << report.log;
    EXPECT_LT(report.took, absl::Seconds(5));
  }
}

TEST_F(LifecycleTest, StopsWithinMillisecondsOfStart) {
  for (int ms = 0; ms <= 30; ms += 2) {
    ServerProcess server(Args());
    absl::SleepFor(absl::Milliseconds(ms));
    const ExitReport report = server.Stop();
    EXPECT_TRUE(report.exited) << ms;
    // Before main the signal has its default action.
    if (!report.log.empty() || report.code != 128 + SIGTERM) {
      EXPECT_EQ(report.code, 0) << ms << " ms: " << report.log;
    }
  }
}

TEST_F(LifecycleTest, SighupIsNoEnd) {
  WriteBigModels();
  ServerProcess server(Args());
  ASSERT_TRUE(server.WaitListening()) << server.log();
  server.Signal(SIGHUP);  // during a load
  ASSERT_TRUE(server.WaitServing(absl::Seconds(120))) << server.log();
  server.Signal(SIGHUP);
  EXPECT_TRUE(server.NewClient()->QuantizedMatmul(OneToken()).ok());
  const ExitReport report = server.Stop();
  EXPECT_EQ(report.code, 0) << report.log;
  EXPECT_THAT(report.log, HasSubstr("SIGHUP: there are no certificates or tokens to reload"));
}

TEST_F(LifecycleTest, SighupEndsAServerWhoseTerminalIsGone) {
  std::optional<testing::PseudoTerminal> terminal(80);
  ServerProcess server(Args(), "127.0.0.1:0", terminal->slave());
  ASSERT_TRUE(server.WaitServing());
  server.Signal(SIGHUP);
  EXPECT_TRUE(server.NewClient()->QuantizedMatmul(OneToken()).ok()) << "the terminal is there";
  terminal.reset();
  server.Signal(SIGHUP);
  EXPECT_EQ(server.Wait().code, 0);
}

TEST_F(LifecycleTest, StopsDuringALoad) {
  WriteBigModels();
  ServerProcess server(Args());
  ASSERT_TRUE(server.WaitListening()) << server.log();
  const ExitReport report = server.Stop();
  EXPECT_EQ(report.code, 0) << report.log;
  EXPECT_THAT(report.log, ::testing::Not(HasSubstr("ready"))) << "it was still loading";
  const size_t stopping = report.log.find(" stopping ");
  ASSERT_NE(stopping, std::string::npos) << report.log;
  int loads = 0;
  for (size_t at = stopping; (at = report.log.find(" loaded ", at + 1)) != std::string::npos;) {
    ++loads;
  }
  EXPECT_LE(loads, 1) << "one may have been at its end\n" << report.log;
}

TEST_F(LifecycleTest, AnswersWhatWasQueuedWhenStopped) {
  Start({"--max_queue_delay_us=60000000", "--max_queued_requests=6"});
  Calls calls(*client_, 7);
  calls.AwaitFirst();
  server_->Signal(SIGTERM);
  EXPECT_EQ(Served(calls.Join()), 6);
  const ExitReport report = ExpectGoodEnd();
  EXPECT_LT(report.took, absl::Seconds(20)) << "nothing waits for company while stopping";
}

TEST_F(LifecycleTest, WatchSeesTheEndAndDoesNotDelayIt) {
  Start();
  const auto stub = grpc::health::v1::Health::NewStub(
      grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  const auto watch = stub->Watch(&context, {});
  grpc::health::v1::HealthCheckResponse health;
  ASSERT_TRUE(watch->Read(&health));
  EXPECT_EQ(health.status(), health.SERVING);
  server_->Signal(SIGTERM);
  ASSERT_TRUE(watch->Read(&health));
  EXPECT_EQ(health.status(), health.NOT_SERVING);
  EXPECT_FALSE(watch->Read(&health));
  watch->Finish().IgnoreError();
  const ExitReport report = ExpectGoodEnd();
  EXPECT_LT(report.took, absl::Seconds(5));
}

TEST_F(LifecycleTest, TheDrainDelayStillServes) {
  Start({"--drain_delay_ms=1500"});
  server_->Signal(SIGTERM);
  server_->Signal(SIGTERM);
  for (int i = 0; i < 1000 && client_->IsServing("").value_or(false); ++i) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_TRUE(client_->QuantizedMatmul(OneToken()).ok());
  ExpectGoodEnd();
}

TEST_F(LifecycleTest, ASignalWithinASecondIsTheSameAndALaterOneEndsItAtOnce) {
  ServerProcess server(
      Args({"--drain_delay_ms=60000", "--max_queue_delay_us=60000000", "--max_queued_requests=1"}));
  ASSERT_TRUE(server.WaitServing()) << server.log();
  const auto client = server.NewClient();
  Calls calls(*client, 2);
  calls.AwaitFirst();  // the other is queued
  const absl::Time first = absl::Now();
  server.Signal(SIGTERM);
  for (int i = 0; i < 1000 && client->IsServing("").value_or(false); ++i) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  server.Signal(SIGINT);
  const auto health = client->IsServing("");
  if (absl::Now() - first < absl::Milliseconds(900)) {
    EXPECT_TRUE(health.ok()) << "the drain delay still answers: " << health.status();
  }
  absl::SleepFor(first + absl::Milliseconds(1100) - absl::Now());
  server.Signal(SIGTERM);
  const ExitReport report = server.Wait();
  EXPECT_EQ(report.code, 128 + SIGTERM) << report.log;
  EXPECT_LT(report.took, absl::Seconds(2));
  EXPECT_THAT(report.log, HasSubstr("another signal: ends at once abandoned_calls=1 "));
  calls.Join();
}

}  // namespace
}  // namespace awqd
