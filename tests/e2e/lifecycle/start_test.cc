// Starts of the real server that fail, and files that a start leaves unchanged.
#include <signal.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/lifecycle/lifecycle_fixture.h"

namespace awqd {
namespace {

using testing::HasSubstr;

// Expects a program that exits soon, with this code and one line that has the reason.
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
  const auto models = server.NewClient()->ListModels();
  ASSERT_TRUE(models.ok() && models->models_size() == 2) << models.status();
  EXPECT_EQ(models->models(0).name(), "linked");
  EXPECT_EQ(models->models(0).state(), v1::FAILED);
  EXPECT_THAT(models->models(0).message(), HasSubstr("leads out of the model repository"));
  EXPECT_EQ(models->models(1).state(), v1::READY);
  const ExitReport report = server.Stop();
  EXPECT_EQ(report.code, 0);
  const std::vector<std::string> parts =
      absl::StrSplit(report.log, "model cannot be opened model=linked");
  EXPECT_EQ(parts.size(), 2u) << "told once, whatever clients ask: " << report.log;
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

TEST_F(LifecycleTest, AModelThatAClientLoadsDuringStartIsNotLoadedAgain) {
  WriteBigModels();
  ServerProcess server(Args());
  ASSERT_TRUE(server.WaitListening()) << server.log();
  const auto client = server.NewClient();
  ASSERT_TRUE(client->LoadModel("m").ok()) << server.log();
  ASSERT_TRUE(server.WaitServing(absl::Seconds(120))) << server.log();
  const auto model = client->GetModel("m");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->model().version(), 1);
  EXPECT_EQ(server.Stop().code, 0);
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

}  // namespace
}  // namespace awqd
