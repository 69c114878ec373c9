// The real server reconciles its repository, unloads idle models, and gives precedence to clients.
#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/lifecycle/lifecycle_fixture.h"

namespace awqd {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class WatchTest : public LifecycleTest {
 protected:
  void StartWatching() {
    Start({"--watch_repository", "--watch_interval_s=0.05", "--watch_settle_s=0.2"});
  }
  bool Serves(const std::string& model) { return client_->QuantizedMatmul(OneToken(model)).ok(); }
  v1::ModelSummary Summary(const std::string& model) {
    const auto models = client_->ListModels();
    EXPECT_TRUE(models.ok()) << models.status();
    for (const v1::ModelSummary& summary : models->models()) {
      if (summary.name() == model) return summary;
    }
    return {};
  }
  bool HasLogged(const std::string& text) { return absl::StrContains(server_->log(), text); }

  TempFolder elsewhere_;
};

TEST_F(WatchTest, LoadsReloadsAndUnloadsWhatTheRepositoryHolds) {
  StartWatching();
  EXPECT_TRUE(Serves("m")) << "what was there is waited for by the start";
  SyntheticAwq::Random(256, 64, 64, 2).Write(repository_ / "n");
  EXPECT_TRUE(Eventually([&] { return Serves("n"); })) << server_->log();
  const std::string before = client_->QuantizedMatmul(OneToken("m"))->output.bytes;
  SyntheticAwq::Random(256, 64, 64, 3).Write(elsewhere_ / "m");
  for (const char* file : {"config.json", "model.safetensors"}) {
    fs::rename(elsewhere_ / "m" + "/" + file, repository_ / "m" + "/" + file);
  }
  EXPECT_TRUE(Eventually([&] { return Summary("m").version() >= 2; })) << server_->log();
  EXPECT_NE(client_->QuantizedMatmul(OneToken("m"))->output.bytes, before);
  fs::remove_all(repository_ / "n");
  EXPECT_TRUE(Eventually([&] {
    return absl::IsNotFound(client_->QuantizedMatmul(OneToken("n")).status());
  })) << server_->log();
  EXPECT_THAT(Stop().log, HasSubstr("unloaded model=n why=\"its folder is gone\""));
}

TEST_F(WatchTest, NoCallFailsWhileAModelIsReplaced) {
  StartWatching();
  std::atomic<bool> stop{false};
  std::atomic<int> good{0}, bad{0};
  std::thread caller([&] {
    while (!stop) ++(Serves("m") ? good : bad);
  });
  for (int i = 0; i < 3; ++i) {
    SyntheticAwq::Random(256, 64, 64, 10 + i).Write(elsewhere_ / "next");
    fs::rename(elsewhere_ / "next/model.safetensors", repository_ / "m/model.safetensors");
    EXPECT_TRUE(Eventually([&] { return Summary("m").version() == i + 2; })) << server_->log();
  }
  stop = true;
  caller.join();
  EXPECT_EQ(bad, 0);
  EXPECT_GT(good, 0);
  Stop();
}

TEST_F(WatchTest, ABadModelIsReportedAndTriedAgainWhenItIsMended) {
  SyntheticAwq::Random(256, 64, 64, 2).Write(repository_ / "bad");
  fs::rename(repository_ / "bad/model.safetensors", elsewhere_ / "good");
  std::ofstream(repository_ / "bad/model.safetensors") << "half of it";
  StartWatching();
  EXPECT_TRUE(Serves("m")) << "it ends no server";
  EXPECT_EQ(Summary("bad").state(), v1::FAILED);
  EXPECT_THAT(Summary("bad").message(), HasSubstr("bad/model.safetensors"));
  EXPECT_THAT(server_->log(), AllOf(HasSubstr("model cannot be loaded model=bad"),
                                    HasSubstr("ready models=1 failed=1")));
  fs::rename(elsewhere_ / "good", repository_ / "bad/model.safetensors");
  EXPECT_TRUE(Eventually([&] { return Serves("bad"); })) << server_->log();
  Stop();
}

// A writer that goes on for a while: the folder is not loaded before it ends.
TEST_F(WatchTest, AFolderThatIsBeingWrittenIsNotLoaded) {
  StartWatching();
  SyntheticAwq::Random(256, 64, 64, 2).Write(elsewhere_ / "n");
  fs::create_directories(repository_ / "n");
  fs::rename(elsewhere_ / "n/config.json", repository_ / "n/config.json");
  const absl::Time end = absl::Now() + absl::Seconds(1);
  for (int i = 0; absl::Now() < end; ++i) {
    std::ofstream(repository_ / "n/.model.safetensors.tmp", std::ios::app) << i;
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_THAT(server_->log(), Not(HasSubstr("model=n"))) << "not even tried";
  fs::rename(elsewhere_ / "n/model.safetensors", repository_ / "n/model.safetensors");
  EXPECT_TRUE(Eventually([&] { return Serves("n"); })) << server_->log();
  EXPECT_THAT(server_->log(), Not(HasSubstr("cannot be loaded")));
  Stop();
}

TEST_F(WatchTest, AClientsUnloadWins) {
  StartWatching();
  ASSERT_TRUE(client_->UnloadModel("m").ok());
  SyntheticAwq::Random(256, 64, 64, 4).Write(repository_ / "m");
  // When this model exists, "m" has been polled as often.
  SyntheticAwq::Random(256, 64, 64, 5).Write(repository_ / "z");
  ASSERT_TRUE(Eventually([&] { return Serves("z"); })) << server_->log();
  EXPECT_TRUE(absl::IsNotFound(client_->QuantizedMatmul(OneToken("m")).status()));
  ASSERT_TRUE(client_->LoadModel("m").ok());
  EXPECT_TRUE(Serves("m"));
  Stop();
}

TEST_F(WatchTest, AnIdleModelIsUnloadedAndTheNextCallWaitsForIt) {
  SyntheticAwq::Random(256, 64, 64, 2).Write(repository_ / "pinned");
  Start({"--idle_unload_s=0.3", "--pin=pinned"});
  const std::string before = client_->QuantizedMatmul(OneToken())->output.bytes;
  ASSERT_TRUE(Eventually([&] { return Summary("m").state() == v1::UNLOADED; }));
  EXPECT_THAT(Summary("m").message(), HasSubstr("the next request that names it loads it"));
  EXPECT_TRUE(HasLogged("unloaded model=m why=\"it was not used\"")) << server_->log();
  const auto again = client_->QuantizedMatmul(OneToken());
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->output.bytes, before);
  EXPECT_TRUE(Eventually([&] { return Summary("m").state() == v1::UNLOADED; }));
  const auto described = client_->GetModel("m");
  EXPECT_TRUE(described.ok()) << described.status();
  EXPECT_TRUE(Eventually([&] { return Summary("m").state() == v1::UNLOADED; }));
  const auto weight = client_->Dequantize({.weight = client::WeightName{"m", "layer"}});
  EXPECT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(Summary("pinned").state(), v1::READY);
  EXPECT_EQ(Summary("pinned").version(), 1);
  Stop();
}

TEST_F(WatchTest, ManyFirstCallsLoadItOnce) {
  Start({"--idle_unload_s=0.3"});
  ASSERT_TRUE(Eventually([&] { return Summary("m").state() == v1::UNLOADED; }));
  Calls calls(*client_, 16);
  EXPECT_EQ(Served(calls.Join()), 16);
  EXPECT_EQ(Summary("m").version(), 2);
  Stop();
}

TEST_F(WatchTest, TheWaitForALoadEndsAtTheDeadline) {
  SyntheticAwq::Random(8192, 8192, 128, 2).Write(repository_ / "big");
  Start({"--idle_unload_s=0.2"});
  ASSERT_TRUE(Eventually([&] { return Summary("big").state() == v1::UNLOADED; }));
  const auto hasty = server_->NewClient(absl::Milliseconds(5));
  const absl::Status late =
      hasty->Dequantize({.weight = client::WeightName{"big", "layer"}, .row_end = 1}).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
  const auto patient =
      client_->Dequantize({.weight = client::WeightName{"big", "layer"}, .row_end = 1});
  EXPECT_TRUE(patient.ok()) << patient.status();
  Stop();
}

TEST_F(WatchTest, ACallThatCannotBeServedHearsWhy) {
  Start({"--idle_unload_s=0.2"});
  ASSERT_TRUE(Eventually([&] { return Summary("m").state() == v1::UNLOADED; }));
  std::ofstream(repository_ / "m/model.safetensors") << "broken";
  const absl::Status status = client_->QuantizedMatmul(OneToken()).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("m/model.safetensors"));
  EXPECT_TRUE(absl::IsNotFound(client_->QuantizedMatmul(OneToken()).status())) << "no second try";
  Stop();
}

}  // namespace
}  // namespace awqd
