// Suggestions for a missing path: as good as a search through all paths, but cheap.
#include <time.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/model/model.h"
#include "server/repository/model_store.h"
#include "tests/server/repository/model_store_fixture.h"

namespace awqd::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A mixture of 96 layers with 160 experts each: 46,464 paths in ascending order.
std::vector<std::string> Mixture() {
  std::vector<std::string> paths;
  for (int layer = 0; layer < 96; ++layer) {
    const std::string begin = absl::StrCat("model.layers.", layer, ".");
    for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
      paths.push_back(absl::StrCat(begin, "self_attn.", name));
    }
    for (int expert = 0; expert < 160; ++expert) {
      for (const char* name : {"down_proj", "gate_proj", "up_proj"}) {
        paths.push_back(absl::StrCat(begin, "mlp.experts.", expert, ".", name));
      }
    }
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

PathIndex IndexOf(const std::vector<std::string>& paths) {
  return PathIndex({paths.begin(), paths.end()});
}

double ThreadCpuMs() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

TEST(PathIndexTest, OfFewPathsAllAreCompared) {
  EXPECT_THAT(PathIndex().MostLike("a"), IsEmpty());
  const std::vector<std::string> paths = {"a.down", "a.up", "b.down", "b.up"};
  EXPECT_THAT(IndexOf(paths).MostLike("b.upp"), ElementsAre("b.up", "b.down", "a.up", "a.down"));
}

TEST(PathIndexTest, FindsWhatWasMeantAmongMany) {
  const std::vector<std::string> paths = Mixture();
  const PathIndex index = IndexOf(paths);
  const std::pair<const char*, const char*> kMistakes[] = {
      {"model.layers.41.mlp.experts.7.up_prj", "model.layers.41.mlp.experts.7.up_proj"},
      {"model.layers.41.mlp.experts.7.up_proj.weight", "model.layers.41.mlp.experts.7.up_proj"},
      {"layers.41.mlp.experts.7.up_proj", "model.layers.41.mlp.experts.7.up_proj"},
      {"transformer.layers.41.mlp.experts.7.up_proj", "model.layers.41.mlp.experts.7.up_proj"},
      {"model.layers.41.self_attn.qproj", "model.layers.41.self_attn.q_proj"},
      {"model.layer.41.self_attn.q_proj", "model.layers.41.self_attn.q_proj"},
  };
  for (const auto& [mistake, meant] : kMistakes) {
    const auto found = index.MostLike(mistake);
    ASSERT_EQ(found.size(), PathIndex::kMost) << mistake;
    EXPECT_EQ(found.front(), meant) << mistake;
  }
  EXPECT_EQ(index.MostLike("?").front(), paths.front()) << "which is like none";
  EXPECT_EQ(index.MostLike("").front(), paths.front());
}

// CPU time instead of elapsed time; the limit of a millisecond is far above the usual 10 to 30 us.
TEST(PathIndexTest, AMissingWeightOfALargeModelIsCheap) {
  awqd::testing::TempDirectory directory;
  auto device = OpenDevice("cpu", {.cpu_threads = 2});
  ASSERT_TRUE(device.ok()) << device.status();
  repository::ModelStore store(directory.path(), device->get());
  constexpr int kWeights = 60000, kCalls = 100;
  awqd::testing::TestTensors tensors;
  for (int i = 0; i < kWeights; ++i) {
    tensors.merge(awqd::testing::AwqLinear(absl::StrCat("model.layers.", i, ".up"), 32, 8, 32));
  }
  directory.Write("m/config.json", awqd::testing::AwqConfig());
  directory.Write("m/model.safetensors", awqd::testing::SafetensorsOf(tensors));
  ASSERT_TRUE(store.Load("m").ok());
  const double before = ThreadCpuMs();
  for (int i = 0; i < kCalls; ++i) {
    const absl::Status missing =
        store.FindWeight("m", absl::StrCat("model.layers.", i, ".upp")).status();
    ASSERT_THAT(std::string(missing.message()),
                HasSubstr(absl::StrCat("among 60000; there are \"model.layers.", i, ".up\"")));
  }
  EXPECT_LT((ThreadCpuMs() - before) / kCalls, 1.0);
}

}  // namespace
}  // namespace awqd::model
