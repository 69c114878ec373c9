// Folders as the packers of other projects write them: what is served, and what of them is told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "kernels/checkpoint/checkpoint.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;
namespace fs = std::filesystem;

// A copy of a golden folder, opened after changes.
class SavedFolder {
 public:
  explicit SavedFolder(const std::string& golden) {
    fs::copy(DataPath(golden), directory_.At("m"));
  }
  absl::StatusOr<model::Checkpoint> Open() const {
    const auto root = model::RepositoryRoot::Open(directory_.path());
    return model::Checkpoint::Open(*root, "m");
  }
  std::string Text(const std::string& file) const {
    std::ifstream in(directory_.At("m/" + file), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void Write(const std::string& file, const std::string& text) const {
    directory_.Write("m/" + file, text);
  }
  // The error of reading one linear, or OK.
  absl::Status Read(const std::string& path) const {
    const auto checkpoint = Open();
    if (!checkpoint.ok()) return checkpoint.status();
    std::vector<uint8_t> scratch;
    for (const model::LinearLocation& linear : checkpoint->linears()) {
      if (linear.path == path) return checkpoint->Read(linear, &scratch).status();
    }
    return absl::NotFoundError(path);
  }

 private:
  testing::TempDirectory directory_;
};

TEST(SavedFolders, EveryTensorIsAccountedFor) {
  for (const auto& [golden, linears] :
       {std::pair("torchao/saved", 7u), {"quanto/saved", 6u}, {"quanto-packed/groups", 7u}}) {
    SCOPED_TRACE(golden);
    const auto checkpoint = SavedFolder(golden).Open();
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(checkpoint->linears().size(), linears);
    EXPECT_TRUE(checkpoint->unserved().empty());
    EXPECT_EQ(checkpoint->note(), "");
    for (const auto& [name, place] : checkpoint->tensors()) {
      if (place.served) continue;
      constexpr absl::string_view kOthers[] = {
          "norm.weight",  "embed_tokens.weight", "lm_head.weight", "input_scale",
          "output_scale", "gate_proj.weight",    "up_proj.weight"};
      EXPECT_TRUE(absl::c_any_of(kOthers, [&, tensor = name](auto ending) {
        return absl::EndsWith(tensor, ending);
      })) << name;
      EXPECT_TRUE(absl::c_linear_search(std::vector{"BF16", "F32"}, place.info->dtype)) << name;
    }
  }
}

TEST(SavedFolders, TorchAosMetadataTellTheClass) {
  const SavedFolder folder("torchao/saved");
  const std::string path = "model.layers.0.self_attn.q_proj";
  EXPECT_TRUE(folder.Read(path).ok());
  const std::string file = folder.Text("model.safetensors");
  folder.Write("model.safetensors", absl::StrReplaceAll(file, {{"_type", "_kind"}}));
  EXPECT_THAT(std::string(folder.Read(path).message()),
              HasSubstr("\"model.layers.0.self_attn.q_proj\": metadata of the weight: got other "
                        "text, expected a JSON object with \"_type\""));
  folder.Write("model.safetensors", absl::StrReplaceAll(file, {{"Int8Tensor", "Int9Tensor"}}));
  EXPECT_THAT(std::string(folder.Read(path).message()),
              HasSubstr("tensor_type: got \"int9tensor\", expected Int8Tensor"));
  folder.Write("model.safetensors",
               absl::StrReplaceAll(file, {{"q_proj.weight", "q_proj.other_"}}));
  EXPECT_THAT(std::string(folder.Read(path).message()),
              HasSubstr("tensor_type: got nothing, nor in the metadata of the file"));
  EXPECT_TRUE(folder.Read("model.layers.0.self_attn.k_proj").ok());
}

// Tensors of quanto do not tell K of groups. A bias tells it, and so does config.json.
TEST(SavedFolders, QuantoNeedsTheSizesOfConfigJson) {
  const SavedFolder folder("quanto-packed/groups");
  const std::string path = "model.layers.0.mlp.up_proj";
  EXPECT_TRUE(folder.Read(path).ok()) << folder.Read(path);
  const Json config = Json::parse(folder.Text("config.json"));
  const auto expect = [&](const Json& other, const std::string& says) {
    folder.Write("config.json", other.dump());
    EXPECT_THAT(std::string(folder.Read(path).message()), HasSubstr(says));
  };
  Json other = config;
  other.erase("hidden_size");
  expect(other, "expected a bias [N], in_features, or a config.json whose hidden_size tells K");
  EXPECT_TRUE(folder.Read("model.layers.0.self_attn.q_proj").ok()) << "has a bias";
  other = config;
  other["vision_config"]["hidden_size"] = 320;
  expect(other, "a config.json whose hidden_size tells K");
  other["vision_config"] = {{"embed_dim", 320}};
  expect(other, "a config.json whose hidden_size tells K");
  other = config;
  other["text_config"]["hidden_size"] = 160;
  folder.Write("config.json", other.dump());
  EXPECT_TRUE(folder.Read(path).ok()) << folder.Read(path);
  other["hidden_size"] = other["text_config"]["hidden_size"] = 448;
  expect(other, "expected whole rows of K = 448 in groups");
}

TEST(SavedFolders, OneTypeOfQuantoThatIsNotReadRefusesNoOther) {
  const SavedFolder folder("quanto/saved");
  Json map = Json::parse(folder.Text("quanto_qmap.json"));
  map["lm_head"]["weights"] = "qfloat8_e4m3fnuz";
  folder.Write("quanto_qmap.json", map.dump());
  folder.Write("model.safetensors", absl::StrReplaceAll(folder.Text("model.safetensors"),
                                                        {{"\"F8_E4M3\"", "\"F8_E5M2\""}}));
  const auto checkpoint = folder.Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->linears().size(), 5);
  ASSERT_EQ(checkpoint->unserved().count("lm_head"), 1);
  const absl::Status& reason = checkpoint->unserved().find("lm_head")->second;
  EXPECT_EQ(reason.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(reason.message()),
              HasSubstr("lm_head.weights: got \"qfloat8_e4m3fnuz\", expected qint8"));
}

}  // namespace
}  // namespace awqd
