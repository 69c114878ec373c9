// Start, stop, load and unload of the real server, at the worst moments.
#include <signal.h>
#include <sys/resource.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/synthetic_awq.h"

namespace awqd {
namespace {

using client::Tensor;
using client::WeightName;
using testing::HasSubstr;

client::MatmulCall Call(const std::string& model = "m") {
  return {.weight = WeightName{model, "layer"},
          .activations = *Tensor::FromFloats(v1::FP16, {1, 256}, std::vector<float>(256, 0.5f))};
}

// Calls in flight, each on a thread of its own.
class Calls {
 public:
  Calls(client::Client& client, int count) {
    for (int i = 0; i < count; ++i) {
      threads_.emplace_back([this, &client, i] {
        statuses_[i] = client.QuantizedMatmul(Call()).status();
        ++ended_;
      });
    }
  }
  // Of one call more than the server's queue holds, one ends, refused, when the others are queued.
  void AwaitFirst() const {
    while (ended_ == 0) absl::SleepFor(absl::Milliseconds(1));
  }
  std::vector<absl::Status> Join() {
    for (std::thread& thread : threads_) thread.join();
    return {statuses_, statuses_ + threads_.size()};
  }

 private:
  absl::Status statuses_[16];
  std::atomic<int> ended_{0};
  std::vector<std::thread> threads_;
};

// How many ended well; the others must have been refused for want of room.
int Served(const std::vector<absl::Status>& statuses) {
  int served = 0;
  for (const absl::Status& status : statuses) {
    served += status.ok() ? 1 : 0;
    EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
  }
  return served;
}

class LifecycleTest : public testing::Test {
 protected:
  LifecycleTest() { SyntheticAwq::Random(256, 64, 64, 1).Write(repository_ / "m"); }

  std::vector<std::string> Args(std::vector<std::string> more = {}) const {
    more.push_back("--model_repository=" + repository_.path());
    return more;
  }

  // They are loaded before "m". One such load may be over before the test goes on; twelve are not.
  void WriteBigModels() const {
    SyntheticAwq::Random(8192, 8192, 128, 2).Write(repository_ / "big0");
    for (int i = 1; i < 12; ++i) {
      std::filesystem::copy(repository_ / "big0", repository_ / absl::StrCat("big", i),
                            std::filesystem::copy_options::recursive |
                                std::filesystem::copy_options::create_hard_links);
    }
  }

  TempFolder repository_;
};

// A program that could not start: soon, with this code, and one line that says why.
void ExpectRefusal(const ExitReport& report, int code, const char* text) {
  EXPECT_TRUE(report.exited);
  EXPECT_EQ(report.code, code) << report.log;
  EXPECT_LT(report.took, absl::Seconds(5));
  int lines = 0;
  for (const absl::string_view line : absl::StrSplit(report.log, '\n')) {
    if (!absl::StartsWith(line, "awqd: ")) continue;
    ++lines;
    EXPECT_THAT(std::string(line), HasSubstr(text));
  }
  EXPECT_EQ(lines, 1) << report.log;
}

TEST_F(LifecycleTest, RefusesToStartWithOneLine) {
  ExpectRefusal(ServerProcess(Args({"--bogus"})).Wait(), 2, "--bogus");
  ExpectRefusal(ServerProcess(Args({"--token_threshold=many"})).Wait(), 2, "token_threshold");
  ExpectRefusal(ServerProcess({}).Wait(), 2, "model_repository");
  ExpectRefusal(ServerProcess({"--model_repository=/nonexistent"}).Wait(), 1, "/nonexistent");
  ExpectRefusal(ServerProcess(Args({"--load_model=absent"})).Wait(), 1, "absent");
  ExpectRefusal(ServerProcess(Args({"--load_model=../m"})).Wait(), 1, "load_model");
  ExpectRefusal(ServerProcess(Args(), "nowhere").Wait(), 2, "nowhere");
}

TEST_F(LifecycleTest, RefusesABusyPort) {
  ServerProcess first(Args());
  ASSERT_TRUE(first.WaitServing()) << first.log();
  ExpectRefusal(ServerProcess(Args(), first.address()).Wait(), 1, first.address().c_str());
  EXPECT_TRUE(first.NewClient()->QuantizedMatmul(Call()).ok());
  EXPECT_EQ(first.Stop().code, 0);
}

TEST_F(LifecycleTest, RefusesACheckpointItCannotRead) {
  std::filesystem::remove(repository_ / "m/model.safetensors");
  ExpectRefusal(ServerProcess(Args()).Wait(), 1, "m");
  std::filesystem::create_directory(repository_ / "m/model.safetensors");
  ExpectRefusal(ServerProcess(Args()).Wait(), 1, "model.safetensors");
  std::filesystem::remove(repository_ / "m/model.safetensors");
  std::ofstream(repository_ / "m/model.safetensors") << "not a checkpoint at all";
  ExpectRefusal(ServerProcess(Args()).Wait(), 1, "model.safetensors");
}

TEST_F(LifecycleTest, AModelThatCannotBeOpenedIsNotMissedInSilence) {
  std::filesystem::create_directory_symlink(repository_ / "m", repository_ / "linked");
  ExpectRefusal(ServerProcess(Args()).Wait(), 1, "linked/config.json");
  ServerProcess server(Args({"--load_model=m"}));
  ASSERT_TRUE(server.WaitServing()) << server.log();
  EXPECT_THAT(server.log(), HasSubstr("model cannot be opened model=linked"));
  const size_t before = server.log().size();
  const auto models = server.NewClient()->ListModels();
  ASSERT_TRUE(models.ok() && models->models_size() == 2) << models.status();
  EXPECT_EQ(models->models(0).name(), "linked");
  EXPECT_EQ(models->models(0).state(), v1::FAILED);
  EXPECT_THAT(models->models(0).message(), HasSubstr("leads out of the model repository"));
  EXPECT_EQ(models->models(1).state(), v1::READY);
  EXPECT_EQ(server.log().size(), before) << "clients fill no log";
  EXPECT_EQ(server.Stop().code, 0);
}

TEST_F(LifecycleTest, OpensAsManyFilesAsItMay) {
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit low = {.rlim_cur = 128, .rlim_max = limit.rlim_max};
  ASSERT_GT(limit.rlim_max, low.rlim_cur);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  ServerProcess server(Args());
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_TRUE(server.WaitServing()) << server.log();
  ASSERT_EQ(prlimit(server.pid(), RLIMIT_NOFILE, nullptr, &limit), 0);
  EXPECT_EQ(limit.rlim_cur, limit.rlim_max);
  EXPECT_EQ(server.Stop().code, 0);
}

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
    // Before main, only the default action can answer the signal.
    if (!report.log.empty() || report.code != 128 + SIGTERM) {
      EXPECT_EQ(report.code, 0) << ms << " ms: " << report.log;
    }
  }
}

TEST_F(LifecycleTest, StopsDuringALoad) {
  WriteBigModels();
  ServerProcess server(Args());
  ASSERT_TRUE(server.WaitListening()) << server.log();
  const ExitReport report = server.Stop();
  EXPECT_EQ(report.code, 0) << report.log;
  EXPECT_THAT(report.log, testing::Not(HasSubstr("ready"))) << "it was still loading";
  const size_t stopping = report.log.find(" stopping ");
  ASSERT_NE(stopping, std::string::npos) << report.log;
  int loads = 0;
  for (size_t at = stopping; (at = report.log.find(" loaded ", at + 1)) != std::string::npos;) {
    ++loads;
  }
  EXPECT_LE(loads, 1) << "one may have been at its end\n" << report.log;
}

TEST_F(LifecycleTest, AModelThatAClientLoadsDuringStartIsNotLoadedAgain) {
  WriteBigModels();
  ServerProcess server(Args());
  ASSERT_TRUE(server.WaitListening()) << server.log();
  const auto client = server.NewClient();
  ASSERT_TRUE(client->LoadModel("m").ok()) << server.log();
  // ThreadSanitizer takes three seconds for each.
  ASSERT_TRUE(server.WaitServing(absl::Seconds(120))) << server.log();
  const auto model = client->GetModel("m");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->model().version(), 1);
  EXPECT_EQ(server.Stop().code, 0);
}

TEST_F(LifecycleTest, AnswersWhatWasQueuedWhenStopped) {
  ServerProcess server(Args({"--max_queue_delay_us=60000000", "--max_queued_requests=6"}));
  ASSERT_TRUE(server.WaitServing()) << server.log();
  const auto client = server.NewClient();
  Calls calls(*client, 7);
  calls.AwaitFirst();
  server.Signal(SIGTERM);
  EXPECT_EQ(Served(calls.Join()), 6);
  const ExitReport report = server.Wait();
  EXPECT_EQ(report.code, 0) << report.log;
  EXPECT_LT(report.took, absl::Seconds(20)) << "nothing waits for company while stopping";
}

TEST_F(LifecycleTest, WatchSeesTheEndAndDoesNotDelayIt) {
  ServerProcess server(Args());
  ASSERT_TRUE(server.WaitServing()) << server.log();
  const auto stub = grpc::health::v1::Health::NewStub(
      grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  const auto watch = stub->Watch(&context, {});
  grpc::health::v1::HealthCheckResponse health;
  ASSERT_TRUE(watch->Read(&health));
  EXPECT_EQ(health.status(), health.SERVING);
  server.Signal(SIGTERM);
  ASSERT_TRUE(watch->Read(&health));
  EXPECT_EQ(health.status(), health.NOT_SERVING);
  EXPECT_FALSE(watch->Read(&health));
  watch->Finish().IgnoreError();
  const ExitReport report = server.Wait();
  EXPECT_EQ(report.code, 0) << report.log;
  EXPECT_LT(report.took, absl::Seconds(5));
}

TEST_F(LifecycleTest, SecondSignalEndsItAtOnce) {
  ServerProcess server(Args({"--drain_delay_ms=60000"}));
  ASSERT_TRUE(server.WaitServing()) << server.log();
  server.Signal(SIGTERM);
  const auto client = server.NewClient();
  for (int i = 0; i < 1000 && client->IsServing("").value_or(false); ++i) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_TRUE(client->QuantizedMatmul(Call()).ok()) << "the drain delay still serves";
  server.Signal(SIGTERM);
  const ExitReport report = server.Wait();
  EXPECT_EQ(report.code, 128 + SIGTERM) << report.log;
  EXPECT_LT(report.took, absl::Seconds(2));
}

TEST_F(LifecycleTest, RestartsOnItsPortAfterAKill) {
  ServerProcess first(Args());
  ASSERT_TRUE(first.WaitServing()) << first.log();
  const auto client = first.NewClient();
  ASSERT_TRUE(client->QuantizedMatmul(Call()).ok());
  first.Signal(SIGKILL);
  EXPECT_EQ(first.Wait().code, 128 + SIGKILL);
  EXPECT_EQ(client->QuantizedMatmul(Call()).status().code(), absl::StatusCode::kUnavailable);
  ServerProcess second(Args(), first.address());
  ASSERT_TRUE(second.WaitServing()) << second.log();
  absl::Status status;
  for (int i = 0; i < 1000; ++i) {
    status = client->QuantizedMatmul(Call()).status();
    if (status.ok()) break;
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_TRUE(status.ok()) << "the client reconnects by itself: " << status;
  EXPECT_EQ(second.Stop().code, 0);
}

TEST_F(LifecycleTest, ReloadsUnderLoadWithoutAFailedCall) {
  ServerProcess server(Args());
  ASSERT_TRUE(server.WaitServing()) << server.log();
  const auto client = server.NewClient();
  const std::string expected = client->QuantizedMatmul(Call())->output.bytes;
  std::atomic<bool> stop{false};
  std::atomic<int> good{0}, bad{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      while (!stop) {
        const auto y = client->QuantizedMatmul(Call());
        ++(y.ok() && y->output.shape == std::vector<int64_t>{1, 64} ? good : bad);
      }
    });
  }
  for (int i = 0; i < 50; ++i) {
    const auto loaded = client->LoadModel("m");
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded.ok() ? loaded->model().version() : -1, i + 2);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(bad, 0);
  EXPECT_GT(good, 0);
  EXPECT_EQ(client->QuantizedMatmul(Call())->output.bytes, expected);
  EXPECT_EQ(server.Stop().code, 0);
}

TEST_F(LifecycleTest, LoadsAndUnloadsFromManyThreads) {
  ServerProcess server(Args());
  ASSERT_TRUE(server.WaitServing()) << server.log();
  const auto client = server.NewClient();
  std::atomic<int> unexpected{0}, good{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 40; ++round) {
        const absl::Status status = i == 0   ? client->UnloadModel("m")
                                    : i == 1 ? client->LoadModel("m").status()
                                             : client->QuantizedMatmul(Call()).status();
        good += status.ok() ? 1 : 0;
        const bool fine = status.ok() || absl::IsNotFound(status) || absl::IsUnavailable(status) ||
                          (i == 1 && absl::IsAlreadyExists(status));
        unexpected += fine ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(unexpected, 0);
  EXPECT_GT(good, 0);
  ASSERT_TRUE(client->LoadModel("m").ok());
  EXPECT_TRUE(client->QuantizedMatmul(Call()).ok());
  EXPECT_EQ(server.Stop().code, 0);
}

TEST_F(LifecycleTest, UnloadLetsQueuedRequestsFinish) {
  ServerProcess server(Args({"--max_queue_delay_us=3000000", "--max_queued_requests=6"}));
  ASSERT_TRUE(server.WaitServing()) << server.log();
  const auto client = server.NewClient();
  Calls calls(*client, 7);
  calls.AwaitFirst();
  EXPECT_TRUE(client->UnloadModel("m").ok());
  EXPECT_EQ(client->QuantizedMatmul(Call()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Served(calls.Join()), 6);
  const auto info = client->GetServerInfo();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->devices(0).weights_bytes(), 0) << "freed after the last of them";
  EXPECT_EQ(server.Stop().code, 0);
}

TEST_F(LifecycleTest, FailedReloadKeepsServing) {
  ServerProcess server(Args());
  ASSERT_TRUE(server.WaitServing()) << server.log();
  const auto client = server.NewClient();
  std::ofstream(repository_ / "m/model.safetensors") << "broken";
  const absl::Status status = client->LoadModel("m").status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("model.safetensors"));
  EXPECT_TRUE(client->QuantizedMatmul(Call()).ok());
  const auto models = client->ListModels();
  ASSERT_TRUE(models.ok() && models->models_size() == 1);
  EXPECT_EQ(models->models(0).state(), v1::READY);
  EXPECT_FALSE(models->models(0).message().empty());
  EXPECT_EQ(server.Stop().code, 0);
}

}  // namespace
}  // namespace awqd
