// Stacks: the paths of experts, the rules for a stack, and the reasons against one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "kernels/kernels.h"
#include "server/model/placed_weight.h"
#include "tests/testing/random_weight.h"

namespace awqd::model {
namespace {

using ::awqd::testing::RandomWeight;
using ::awqd::testing::WeightSpec;

using Experts = std::map<int64_t, std::shared_ptr<const PlacedWeight>>;

TEST(ExpertPathTest, TheComponentBehindExpertsIsTheNumber) {
  const auto is = [](absl::string_view path, std::string stack, int64_t expert) {
    return ParseExpertPath(path) == ExpertPath{std::move(stack), expert};
  };
  EXPECT_TRUE(is("a.experts.12.up_proj", "a.experts.*.up_proj", 12));
  EXPECT_TRUE(is("a.experts.0.up_proj", "a.experts.*.up_proj", 0));
  EXPECT_TRUE(is("a.experts.9999.up_proj", "a.experts.*.up_proj", 9999));
  EXPECT_TRUE(is("experts.3.w1", "experts.*.w1", 3));
  EXPECT_TRUE(is("a.experts.7", "a.experts.*", 7));
  EXPECT_TRUE(is("a.experts.1.mlp.up.lora", "a.experts.*.mlp.up.lora", 1));
  EXPECT_TRUE(is("a.experts.1.experts.2.up", "a.experts.1.experts.*.up", 2));
  EXPECT_TRUE(is("a.experts.1.experts.up", "a.experts.*.experts.up", 1));
}

TEST(ExpertPathTest, OtherPathsHaveNoExpert) {
  for (absl::string_view path :
       {"", ".", "experts", "experts.", "3", "a.experts.up_proj", "a.experts..up",
        "a.experts.01.up", "a.experts.+1.up", "a.experts.-1.up", "a.experts. 1.up",
        "a.experts.1a.up", "a.experts.10000.up", "a.experts.99999999999999999999.up",
        "a.shared_experts.1.up", "a.expert.1.up", "a.Experts.1.up", "a.experts.*.up",
        "a.layers.1.up"}) {
    EXPECT_EQ(ParseExpertPath(path), std::nullopt) << path;
  }
}

TEST(ExpertPathTest, PathsOfAllExperts) {
  for (absl::string_view path : {"a.experts.up_proj", "experts.w1", "a.experts.1.experts.up"}) {
    EXPECT_TRUE(IsPathOfAllExperts(path)) << path;
    const auto expert = ParseExpertPath(PathOfExpert(path, 12));
    ASSERT_TRUE(expert.has_value()) << path;
    EXPECT_EQ(expert->expert, 12) << path;
  }
  EXPECT_EQ(PathOfExpert("a.experts.up_proj", 12), "a.experts.12.up_proj");
  for (absl::string_view path : {"", "experts", "a.experts.", "a.experts.3", "a.experts.3.up",
                                 "a.shared_experts.up", "a.experts.mlp.up"}) {
    EXPECT_FALSE(IsPathOfAllExperts(path)) << path;
  }
}

class WeightStackTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int i = 0; i < 2; ++i) {
      auto device = OpenDevice(absl::StrCat("cpu:", i), {.cpu_threads = 1});
      ASSERT_TRUE(device.ok()) << device.status();
      own_.push_back(*std::move(device));
      devices_.push_back(own_.back().get());
    }
  }
  std::shared_ptr<const PlacedWeight> Place(const WeightSpec& spec, size_t devices = 1,
                                            bool cut = false) {
    const auto placed = PlaceWeight(RandomWeight(spec), absl::MakeSpan(devices_).first(devices),
                                    cut ? Placing::kColumns : Placing::kWhole);
    EXPECT_TRUE(placed.ok()) << placed.status();
    return placed.value_or(nullptr);
  }
  // Equal experts with these numbers.
  Experts Alike(std::initializer_list<int64_t> numbers) {
    Experts out;
    for (int64_t number : numbers) {
      out[number] = Place({.k = 64, .n = 64, .seed = static_cast<uint64_t>(number)});
    }
    return out;
  }
  static void ExpectRefused(const Experts& experts, absl::string_view says) {
    const auto stack = MakeStack("a.experts.*.up", experts);
    EXPECT_EQ(stack.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(stack.status().message(), absl::StrCat("stack \"a.experts.*.up\": ", says));
  }

  std::vector<std::unique_ptr<Device>> own_;
  std::vector<Device*> devices_;
};

TEST_F(WeightStackTest, ExpertsInTheOrderOfTheirNumbers) {
  const Experts experts = Alike({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  const auto made = MakeStack("a.experts.*.up", experts);
  ASSERT_TRUE(made.ok()) << made.status();
  const WeightStack& stack = **made;
  EXPECT_EQ(stack.path, "a.experts.*.up");
  ASSERT_EQ(stack.experts.size(), 12u);
  for (const auto& [number, weight] : experts) EXPECT_EQ(stack.experts[number], weight);
  EXPECT_EQ(stack.shape().k, 64);
  EXPECT_EQ(stack.shape().n, 64);
  EXPECT_EQ(stack.bytes(), devices_[0]->UsedBytes());
  EXPECT_EQ(stack.devices(), "cpu:0");
  EXPECT_FALSE(stack.has_bias());
  EXPECT_FALSE(stack.partitioned());
}

TEST_F(WeightStackTest, CutExpertsMakeACutStack) {
  Experts experts;
  for (int64_t i : {0, 1}) experts[i] = Place({.k = 64, .n = 256, .bias = true}, 2, true);
  const auto stack = MakeStack("a.experts.*.up", experts);
  ASSERT_TRUE(stack.ok()) << stack.status();
  EXPECT_TRUE((*stack)->partitioned());
  EXPECT_TRUE((*stack)->has_bias());
  EXPECT_EQ((*stack)->shape().n, 256);
  EXPECT_EQ((*stack)->devices(), "cpu:0,cpu:1");
  EXPECT_EQ((*stack)->bytes(), devices_[0]->UsedBytes() + devices_[1]->UsedBytes());
}

TEST_F(WeightStackTest, ExpertsOnDifferentDevicesMakeASpreadStack) {
  Experts experts;
  for (int64_t e = 0; e < 5; ++e) {
    Device* const home[] = {devices_[e == 1 || e == 4 ? 1 : 0]};
    experts[e] = *PlaceWeight(RandomWeight({.k = 64, .n = 64}), home, Placing::kWhole);
  }
  const auto made = MakeStack("a.experts.*.up", experts, /*spread=*/true);
  ASSERT_TRUE(made.ok()) << made.status();
  const WeightStack& stack = **made;
  EXPECT_TRUE(stack.expert_parallel());
  EXPECT_FALSE(stack.partitioned());
  EXPECT_EQ(stack.devices(), "cpu:0,cpu:1");
  EXPECT_EQ(stack.bytes(), devices_[0]->UsedBytes() + devices_[1]->UsedBytes());
  ASSERT_EQ(stack.shards.size(), 2u);
  EXPECT_EQ(stack.shards[0]->experts.size(), 3u);
  EXPECT_EQ(stack.shards[1]->experts.size(), 2u);
  for (int64_t e = 0; e < 5; ++e) {
    const ExpertPlace& home = stack.places[e];
    EXPECT_EQ(stack.shards[home.shard]->experts[home.number], experts[e]) << e;
  }
  // One device cannot spread experts; several devices must be asked for.
  experts.erase(4);
  experts.erase(1);
  EXPECT_FALSE(
      (*MakeStack("a.experts.*.up", {{0, experts[0]}, {1, experts[2]}}, true))->expert_parallel());
  ExpectRefused({{0, experts[0]}, {1, (*made)->experts[1]}},
                "expert 1: devices: got cpu:1 [0, 64), expected cpu:0 [0, 64), as expert 0 has");
  // Nor may several devices hold parts of a spread stack's expert.
  const auto cut =
      MakeStack("a.experts.*.up",
                {{0, Place({.k = 64, .n = 256}, 2, true)}, {1, Place({.k = 64, .n = 256})}}, true);
  EXPECT_EQ(cut.status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(WeightStackTest, AMissingExpertIsNamed) {
  ExpectRefused({}, "got no expert, expected at least one");
  ExpectRefused(Alike({0, 1, 2, 4, 5, 6, 7}), "expert 3 is missing, got 7 experts up to number 7");
  ExpectRefused(Alike({1, 2}), "expert 0 is missing, got 2 experts up to number 2");
  ExpectRefused(Alike({9999}), "expert 0 is missing, got 1 expert up to number 9999");
  ExpectRefused(Alike({0, 1, 5, 9}), "expert 2 is missing, got 4 experts up to number 9");
}

TEST_F(WeightStackTest, ExpertsThatDifferAreNamed) {
  Experts experts = Alike({0, 1, 2});
  const auto with = [&](std::shared_ptr<const PlacedWeight> weight) {
    experts[2] = std::move(weight);
    return experts;
  };
  ExpectRefused(with(Place({.k = 128, .n = 64})),
                "expert 2: K: got 128, expected 64, as expert 0 has");
  ExpectRefused(with(Place({.k = 64, .n = 32})),
                "expert 2: N: got 32, expected 64, as expert 0 has");
  ExpectRefused(with(Place({.k = 64, .n = 64, .scheme = Asymmetric(4, 32)})),
                "expert 2: scheme: got w4g32z, expected w4cz, as expert 0 has");
  ExpectRefused(with(Place({.k = 64, .n = 64, .bias = true})),
                "expert 2: bias: got one, expected none, as expert 0 has");
  ExpectRefused(with(Place({.k = 64, .n = 64}, 2)),
                "expert 2: devices: got cpu:0 [0, 64), cpu:1 [0, 64), expected cpu:0 [0, 64), as "
                "expert 0 has");
  ExpectRefused({{0, Place({.k = 64, .n = 64}, 2)}, {1, Place({.k = 64, .n = 64}, 2, true)}},
                "expert 1: devices: got cpu:0 [0, 32), cpu:1 [32, 64), expected cpu:0 [0, 64), "
                "cpu:1 [0, 64), as expert 0 has");
}

TEST_F(WeightStackTest, ScalesMaySpanOtherOctaves) {
  WeightSpec spec = {.k = 64, .n = 64, .scheme = Symmetric(4, 32, DType::kFp32)};
  const auto ordinary = Place(spec);
  spec.scales = awqd::testing::Scales::kExtreme;
  const auto extreme = Place(spec);
  ASSERT_NE(ordinary->shape.scale_octaves, extreme->shape.scale_octaves);
  const auto stack = MakeStack("a.experts.*.up", {{0, ordinary}, {1, extreme}});
  EXPECT_TRUE(stack.ok()) << stack.status();
}

TEST_F(WeightStackTest, OfOne) {
  const auto weight = Place({.k = 64, .n = 32, .bias = true});
  const auto stack = StackOfOne(weight);
  ASSERT_EQ(stack->experts.size(), 1u);
  EXPECT_EQ(stack->experts.front(), weight);
  EXPECT_EQ(stack->path, "");
  EXPECT_EQ(stack->shape().n, 32);
  EXPECT_TRUE(stack->has_bias());
  EXPECT_EQ(stack->bytes(), weight->bytes());
}

}  // namespace
}  // namespace awqd::model
