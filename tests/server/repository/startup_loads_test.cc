// A server chooses and loads its models at start, and reports those that cannot be loaded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>

#include "kernels/kernels.h"
#include "server/obs/logging.h"
#include "server/repository/reconciler.h"
#include "tests/kernels/checkpoint/test_files.h"

namespace awqd::repository {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class StartupLoadsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto device = OpenDevice("cpu", {.cpu_threads = 1});
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    options_.model_repository = directory_.At("repository");
    for (const char* name : {"a", "z"}) WriteModel(std::string("repository/") + name);
  }
  void WriteModel(const std::string& folder) {
    directory_.Write(folder + "/config.json", testing::AwqConfig());
    directory_.Write(folder + "/model.safetensors",
                     testing::SafetensorsOf(testing::AwqLinear("up", 64, 16, 32)));
  }
  void WriteBroken(const std::string& folder) {
    directory_.Write(folder + "/config.json", testing::AwqConfig());
    directory_.Write(folder + "/model.safetensors", "too short");
  }
  // The chosen names; log_ has the lines logged.
  absl::StatusOr<std::vector<std::string>> Choose() {
    store_ = std::make_unique<ModelStore>(ModelFolders(options_.model_repository, options_.models),
                                          device_.get());
    ::testing::internal::CaptureStderr();
    obs::SetUpLogging(obs::LogLevel::kInfo, obs::LogFormat::kText);
    auto names = ChooseModels(options_.load_models, false, *store_);
    obs::FlushLog(absl::Seconds(20));
    log_ = ::testing::internal::GetCapturedStderr();
    return names;
  }
  LoadedAtStart Load(const std::vector<std::string>& names) {
    ::testing::internal::CaptureStderr();
    const LoadedAtStart out = LoadAtStart(names, stopping_, store_.get());
    obs::FlushLog(absl::Seconds(20));
    log_ = ::testing::internal::GetCapturedStderr();
    return out;
  }

  testing::TempDirectory directory_;
  std::unique_ptr<Device> device_;
  struct {
    std::string model_repository;
    std::vector<NamedFolder> models;
    std::vector<std::string> load_models;
  } options_;
  std::unique_ptr<ModelStore> store_;
  std::atomic<bool> stopping_{false};
  std::string log_;
};

TEST_F(StartupLoadsTest, AllOfTheRepositoryAndBesideIt) {
  WriteModel("elsewhere");
  options_.models = {{"m", directory_.At("elsewhere")}};
  EXPECT_THAT(*Choose(), ElementsAre("a", "m", "z"));
  EXPECT_EQ(log_, "");
  options_.load_models = {"z", "z", "m"};
  EXPECT_THAT(*Choose(), ElementsAre("m", "z")) << "single folders are always loaded";
  options_.model_repository = "";
  options_.load_models.clear();
  EXPECT_THAT(*Choose(), ElementsAre("m"));
}

TEST_F(StartupLoadsTest, NamesAreCheckedAtOnce) {
  options_.load_models = {"../a"};
  EXPECT_THAT(std::string(Choose().status().message()), HasSubstr("--load_model: model name"));
  options_.model_repository = directory_.At("none");
  EXPECT_THAT(std::string(Choose().status().message()), HasSubstr("--model_repository"));
}

TEST_F(StartupLoadsTest, WarnsOfWhatIsNoModel) {
  std::filesystem::create_directory(directory_.At("repository/empty"));
  EXPECT_THAT(*Choose(), ElementsAre("a", "z"));
  EXPECT_THAT(log_, HasSubstr(" W "));
  EXPECT_THAT(log_, HasSubstr("folder \"empty\": no config.json in it"));
}

TEST_F(StartupLoadsTest, ARepositoryThatCannotServeIsAnError) {
  directory_.Write("repository/config.json", "{}");
  EXPECT_THAT(std::string(Choose().status().message()),
              AllOf(HasSubstr("--model_repository: "), HasSubstr("is itself a model")));
  std::filesystem::create_directory(directory_.At("nothing"));
  options_.model_repository = directory_.At("nothing");
  EXPECT_THAT(std::string(Choose().status().message()),
              AllOf(HasSubstr("--model_repository: "), HasSubstr("put a model there")));
}

TEST_F(StartupLoadsTest, EveryFailureIsReportedAtOnceAndTheOthersLoad) {
  WriteBroken("repository/b");
  WriteBroken("repository/c");
  const auto names = Choose();
  ASSERT_THAT(*names, ElementsAre("a", "b", "c", "z"));
  const LoadedAtStart loaded = Load(*names);
  EXPECT_EQ(loaded.loaded, 2u);
  ASSERT_EQ(loaded.failed.size(), 2u);
  EXPECT_TRUE(store_->Find("z").ok()) << "what comes after a failure is loaded too";
  const std::string error(loaded.Error().message());
  EXPECT_THAT(error, AllOf(HasSubstr("2 of 4 models cannot be loaded: "), HasSubstr("b/model.safe"),
                           HasSubstr("c/model.safe")));
  // All reasons follow one another, after the last load.
  const size_t last = log_.find("loaded model=z");
  const size_t first = log_.find("model cannot be loaded model=b");
  EXPECT_LT(last, first) << log_;
  EXPECT_LT(first, log_.find("model cannot be loaded model=c")) << log_;
}

TEST_F(StartupLoadsTest, OneFailureIsTheErrorItself) {
  WriteBroken("repository/b");
  const LoadedAtStart loaded = Load(*Choose());
  ASSERT_EQ(loaded.failed.size(), 1u);
  EXPECT_EQ(loaded.Error(), loaded.failed[0]);
  EXPECT_TRUE(absl::IsInvalidArgument(loaded.Error()));
  EXPECT_TRUE(LoadedAtStart{}.Error().ok());
}

TEST_F(StartupLoadsTest, AStopIsNoFailure) {
  const auto names = Choose();
  stopping_ = true;
  store_->CancelLoads();
  const LoadedAtStart loaded = Load(*names);
  EXPECT_TRUE(loaded.Error().ok());
  EXPECT_EQ(log_, "");
}

}  // namespace
}  // namespace awqd::repository
