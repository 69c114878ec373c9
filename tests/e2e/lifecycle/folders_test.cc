// The folders in which the real server finds its models: a cache of the Hub, and single folders;
// and its errors for models that fail to load.
#include <filesystem>
#include <fstream>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/lifecycle/lifecycle_fixture.h"
#include "tests/testing/hub_files.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class FoldersTest : public LifecycleTest {
 protected:
  static void WriteModel(const std::string& folder) {
    SyntheticAwq::Random(256, 64, 64, 1).Write(folder);
  }
  static void WriteBroken(const std::string& folder) {
    WriteModel(folder);
    std::ofstream(folder + "/model.safetensors") << "not a checkpoint at all";
  }
  static void ExpectServes(const ServerProcess& server, const std::string& model) {
    const auto answer = server.NewClient()->QuantizedMatmul(OneToken(model));
    EXPECT_TRUE(answer.ok()) << answer.status();
  }

  TempFolder cache_, elsewhere_;
};

TEST_F(FoldersTest, ServesACacheOfTheHub) {
  WriteModel(elsewhere_ / "staging");
  testing::MakeHubDownload(elsewhere_ / "staging", cache_.path(), "models--org--name");
  std::filesystem::create_directories(cache_ / "datasets--org--data/refs");
  std::filesystem::create_directories(cache_ / ".locks/models--org--name");
  ServerProcess server({"--model_repository=" + cache_.path()});
  ASSERT_TRUE(server.WaitServing()) << server.log();
  ExpectServes(server, "org--name");
  const auto client = server.NewClient();
  ASSERT_TRUE(client->LoadModel("org--name").ok()) << "again";
  EXPECT_TRUE(absl::IsNotFound(client->LoadModel("models--org--name").status()));
  const ExitReport report = server.Stop();
  EXPECT_EQ(report.code, 0);
  const size_t ready = report.log.find(" ready ");
  ASSERT_NE(ready, std::string::npos) << report.log;
  EXPECT_THAT(report.log.substr(0, ready), Not(HasSubstr(" W ")))
      << "data sets and locks are no matter";
}

TEST_F(FoldersTest, LinksOutOfTheCacheAreRefused) {
  WriteModel(elsewhere_ / "staging");
  testing::MakeHubDownload(elsewhere_ / "staging", cache_.path(), "models--org--name");
  std::filesystem::rename(cache_ / "models--org--name/blobs", elsewhere_ / "blobs");
  std::filesystem::create_symlink(elsewhere_ / "blobs", cache_ / "models--org--name/blobs");
  EXPECT_THAT(LastWords(ServerProcess({"--model_repository=" + cache_.path()}).Wait(), 1),
              AllOf(HasSubstr("models--org--name/snapshots/"), HasSubstr("leads out of")));
}

TEST_F(FoldersTest, ServesSingleFoldersWithoutARepository) {
  WriteModel(elsewhere_ / "a");
  WriteModel(elsewhere_ / "b");
  ServerProcess server({"--model=x=" + (elsewhere_ / "a"), "--model=y=" + (elsewhere_ / "b")});
  ASSERT_TRUE(server.WaitServing()) << server.log();
  ExpectServes(server, "x");
  ExpectServes(server, "y");
  const auto client = server.NewClient();
  EXPECT_TRUE(absl::IsNotFound(client->LoadModel("a").status())) << "only by its new name";
  EXPECT_EQ(client->ListModels()->models_size(), 2);
  EXPECT_EQ(server.Stop().code, 0);
}

// Its layers have their settings in tensors beside them.
TEST_F(FoldersTest, ServesAFileOfComfyUi) {
  ServerProcess server({"--model=x=" + DataPath("comfy/markers.safetensors")});
  ASSERT_TRUE(server.WaitServing()) << server.log();
  const auto client = server.NewClient();
  const auto model = client->GetModel("x");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->quant_method(), "comfy_quant");
  EXPECT_EQ(model->weights_size(), 8);
  EXPECT_EQ(model->unserved_size(), 0);
  const auto weight = client->Dequantize({.weight = client::WeightName{"x", "mlp.rotated"}});
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->output.shape, (std::vector<int64_t>{128, 24}));
  EXPECT_EQ(server.Stop().code, 0);
}

TEST_F(FoldersTest, ServesSingleFoldersBesideARepository) {
  WriteModel(elsewhere_ / "a");
  Start({"--model=x=" + (elsewhere_ / "a")});
  ExpectServes(*server_, "x");
  ExpectServes(*server_, "m");
  Stop();
}

TEST_F(FoldersTest, ANameForTwoFoldersIsRefusedNamingBoth) {
  WriteModel(elsewhere_ / "a");
  EXPECT_THAT(LastWords(ServerProcess(Args({"--model=m=" + (elsewhere_ / "a")})).Wait(), 1),
              AllOf(HasSubstr("--model m=" + (elsewhere_ / "a")), HasSubstr("folder \"m\"")));
  EXPECT_THAT(LastWords(ServerProcess({"--model=x=/a", "--model=x=/b"}).Wait(), 2),
              AllOf(HasSubstr("x=/a"), HasSubstr("x=/b")));
}

TEST_F(FoldersTest, TheStartReportsEveryModelThatCannotBeLoaded) {
  WriteBroken(repository_ / "b");
  WriteBroken(repository_ / "n");
  const ExitReport report = ServerProcess(Args()).Wait();
  EXPECT_THAT(LastWords(report, 1),
              AllOf(HasSubstr("2 of 3 models cannot be loaded"), HasSubstr("b/model.safetensors"),
                    HasSubstr("n/model.safetensors")));
  EXPECT_THAT(report.log, HasSubstr("model cannot be loaded model=b"));
  EXPECT_THAT(report.log, HasSubstr("model cannot be loaded model=n"));
  EXPECT_THAT(report.log, Not(HasSubstr(" ready ")));
}

TEST_F(FoldersTest, KeepGoingServesWhatLoadsAndReportsTheRest) {
  WriteBroken(repository_ / "b");
  WriteBroken(repository_ / "n");
  Start({"--keep_going"});
  ExpectServes(*server_, "m");
  const auto models = client_->ListModels();
  ASSERT_TRUE(models.ok() && models->models_size() == 3) << models.status();
  EXPECT_EQ(models->models(0).state(), v1::FAILED);
  EXPECT_THAT(models->models(0).message(), HasSubstr("b/model.safetensors"));
  EXPECT_EQ(models->models(1).state(), v1::READY);
  const ExitReport report = Stop();
  EXPECT_THAT(report.log, AllOf(HasSubstr("model cannot be loaded model=b"),
                                HasSubstr("model cannot be loaded model=n"),
                                HasSubstr("ready models=1 failed=2")));
}

TEST_F(FoldersTest, KeepGoingStartsWithNoModelAtAll) {
  Start({"--keep_going", "--load_model=absent"});
  EXPECT_TRUE(client_->LoadModel("m").ok());
  ExpectServes(*server_, "m");
  const ExitReport report = Stop();
  EXPECT_THAT(report.log, AllOf(HasSubstr("model cannot be loaded model=absent"),
                                HasSubstr("no model could be loaded")));
}

TEST_F(FoldersTest, WarnsOnceOfEachFolderThatIsNoModel) {
  WriteModel(repository_ / "bad name");
  std::filesystem::create_directory(repository_ / "empty");
  Start();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(client_->ListModels()->models_size(), 1);
  const ExitReport report = Stop();
  const std::vector<std::string> lines = absl::StrSplit(report.log, '\n');
  EXPECT_THAT(lines,
              ::testing::Contains(HasSubstr("folder \"bad name\": no model can have")).Times(1));
  EXPECT_THAT(lines, ::testing::Contains(HasSubstr("folder \"empty\": no config.json")).Times(1));
}

TEST_F(FoldersTest, ARepositoryWithoutModelsIsAnErrorThatSaysWhatToDo) {
  EXPECT_THAT(LastWords(ServerProcess({"--model_repository=" + (repository_ / "m")}).Wait(), 1),
              HasSubstr("is itself a model: give the folder above it"));
  const TempFolder empty;
  EXPECT_THAT(LastWords(ServerProcess({"--model_repository=" + empty.path()}).Wait(), 1),
              HasSubstr("put a model there"));
  for (const char* flag : {"--watch_repository", "--keep_going"}) {
    ServerProcess server({"--model_repository=" + empty.path(), flag});
    ASSERT_TRUE(server.WaitServing()) << server.log();
    const ExitReport end = server.Stop();
    EXPECT_EQ(end.code, 0);
    EXPECT_THAT(end.log, HasSubstr("the repository holds no model"));
  }
}

}  // namespace
}  // namespace awqd
