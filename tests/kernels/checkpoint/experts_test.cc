// Checkpoints whose tensors hold all experts of a projection, beside ones with tensors for each.
#include "kernels/checkpoint/experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "kernels/checkpoint/checkpoint.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/reasons.h"

namespace awqd::model {
namespace {

using ::awqd::testing::AllExperts;
using ::awqd::testing::AwqConfig;
using ::awqd::testing::AwqExpert;
using ::awqd::testing::FirstReason;
using ::awqd::testing::Merge;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TempDirectory;
using ::awqd::testing::TestTensors;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::string_view kInt8Config =
    "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":\"int-"
    "quantized\","
    "\"config_groups\":{\"group_0\":{\"targets\":[\"Linear\"],\"weights\":{\"num_bits\":8,"
    "\"strategy\":\"channel\"}}}}}";

// N = 3, K = 4, with a bias; no two experts are alike.
TestTensors Int8Expert(const std::string& path, int expert) {
  const char fill = static_cast<char>(expert + 1);
  return {{path + ".weight", {"I8", {3, 4}, std::string(12, fill)}},
          {path + ".weight_scale", {"F32", {3, 1}, std::string(12, fill)}},
          {path + ".bias", {"F32", {3}, std::string(12, static_cast<char>(fill + 1))}}};
}

class ExpertSlicesTest : public ::testing::Test {
 protected:
  absl::StatusOr<Checkpoint> Open(const std::string& name = "m") {
    root_ = *RepositoryRoot::Open(directory_.path());
    return Checkpoint::Open(root_, name);
  }
  void Write(const TestTensors& tensors, const std::string& name = "m",
             absl::string_view config = AwqConfig()) {
    directory_.Write(name + "/config.json", config);
    directory_.Write(name + "/model.safetensors", SafetensorsOf(tensors));
  }
  void ExpectRefused(const TestTensors& tensors, const std::string& says) {
    Write(tensors);
    const absl::Status reason = FirstReason(Open());
    EXPECT_EQ(reason.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(reason.message()), HasSubstr(says));
  }
  // Every weight of the checkpoint by path; fails the test if one does not decode.
  std::map<std::string, HostWeight> Decode(const std::string& name) {
    std::map<std::string, HostWeight> out;
    const auto checkpoint = Open(name);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    if (!checkpoint.ok()) return out;
    std::vector<uint8_t> scratch;
    for (const LinearLocation& linear : checkpoint->linears()) {
      auto weight = checkpoint->Read(linear, &scratch);
      EXPECT_TRUE(weight.ok()) << weight.status();
      if (weight.ok()) out.emplace(linear.path, *std::move(weight));
    }
    return out;
  }
  // Expects the same weights from both checkpoints, all different from each other.
  void ExpectSameWeights(const std::string& left, const std::string& right, size_t count) {
    const auto a = Decode(left), b = Decode(right);
    ASSERT_EQ(a.size(), count);
    ASSERT_EQ(b.size(), count);
    std::set<std::vector<uint8_t>> codes;
    for (const auto& [path, weight] : a) {
      ASSERT_EQ(b.count(path), 1u) << path;
      const HostWeight& other = b.at(path);
      EXPECT_EQ(weight.k, other.k) << path;
      EXPECT_EQ(weight.n, other.n) << path;
      EXPECT_EQ(weight.format, other.format) << path;
      EXPECT_EQ(weight.scheme, other.scheme) << path;
      EXPECT_EQ(weight.codes, other.codes) << path;
      EXPECT_EQ(weight.zeros, other.zeros) << path;
      EXPECT_EQ(weight.scales, other.scales) << path;
      EXPECT_EQ(weight.bias, other.bias) << path;
      codes.insert(weight.codes);
    }
    EXPECT_EQ(codes.size(), count);
  }

  TempDirectory directory_;
  RepositoryRoot root_;
};

TEST_F(ExpertSlicesTest, EachSliceDecodesAsTheExpertAloneDoes) {
  TestTensors flat;
  std::vector<TestTensors> experts;
  for (int i = 0; i < 12; ++i) {
    flat = Merge(flat, AwqExpert(absl::StrCat("l.experts.", i, ".up"), i));
    experts.push_back(AwqExpert("l.experts.up", i));
  }
  Write(flat, "flat");
  Write(AllExperts(experts), "stacked");
  ExpectSameWeights("flat", "stacked", 12);
  EXPECT_EQ(Open("stacked")->total_bytes(), Open("flat")->total_bytes());
}

TEST_F(ExpertSlicesTest, OptionalTensorsAndOtherTypesAreSlicedToo) {
  Write(Merge(Int8Expert("l.experts.0.w1", 0), Int8Expert("l.experts.1.w1", 1)), "flat",
        kInt8Config);
  Write(AllExperts({Int8Expert("l.experts.w1", 0), Int8Expert("l.experts.w1", 1)}), "stacked",
        kInt8Config);
  ExpectSameWeights("flat", "stacked", 2);
  EXPECT_EQ(Decode("stacked").at("l.experts.1.w1").bias.size(), 3u);
}

TEST_F(ExpertSlicesTest, BothKindsInOneCheckpointInTheOrderOnDisk) {
  TestTensors tensors = AllExperts({AwqExpert("a.experts.up", 0), AwqExpert("a.experts.up", 1)});
  tensors = Merge(tensors, AwqExpert("a.experts.0.down", 2));
  tensors = Merge(tensors, AwqExpert("a.experts.1.down", 3));
  tensors = Merge(tensors, AwqExpert("a.attention", 4));
  tensors["a.experts.norm"] = {"F16", {2}, "abcd"};
  tensors["a.experts.up.inner.other"] = {"F16", {2, 1, 1}, "abcd"};
  Write(tensors);
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::vector<std::string> paths, slice_of;
  for (const LinearLocation& linear : checkpoint->linears()) {
    paths.push_back(linear.path);
    slice_of.push_back(linear.slice_of);
  }
  // SafetensorsOf writes tensors in the order of their names.
  EXPECT_THAT(paths, ElementsAre("a.attention", "a.experts.0.down", "a.experts.1.down",
                                 "a.experts.0.up", "a.experts.1.up"));
  EXPECT_THAT(slice_of, ElementsAre("", "", "", "a.experts.up", "a.experts.up"));
  EXPECT_EQ(checkpoint->ignored_tensors(), 2);
  int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += static_cast<int64_t>(tensor.bytes.size());
  EXPECT_EQ(checkpoint->total_bytes(), bytes - 8);
}

// The properties of slices live in the checkpoint, which may move.
TEST_F(ExpertSlicesTest, LocationsOutliveAMove) {
  Write(AllExperts({AwqExpert("l.experts.up", 0), AwqExpert("l.experts.up", 1)}));
  auto opened = Open();
  ASSERT_TRUE(opened.ok()) << opened.status();
  const Checkpoint moved = *std::move(opened);
  std::vector<uint8_t> scratch;
  ASSERT_EQ(moved.linears().size(), 2u);
  for (const LinearLocation& linear : moved.linears()) {
    const auto weight = moved.Read(linear, &scratch);
    EXPECT_TRUE(weight.ok()) << weight.status();
  }
}

TEST_F(ExpertSlicesTest, AnExpertInBothWays) {
  TestTensors tensors = AllExperts({AwqExpert("l.experts.up", 0), AwqExpert("l.experts.up", 1)});
  const TestTensors third = Merge(tensors, AwqExpert("l.experts.2.up", 2));
  Write(third);
  EXPECT_EQ(Decode("m").size(), 3u);
  ExpectRefused(Merge(tensors, AwqExpert("l.experts.1.up", 1)),
                "m: weight \"l.experts.1.up\": has tensors of its own and is also a slice "
                "of \"l.experts.up\"");
  EXPECT_EQ(Decode("m").size(), 1u) << "the other expert is served";
}

TEST_F(ExpertSlicesTest, EveryTensorHasAllExperts) {
  const TestTensors tensors =
      AllExperts({AwqExpert("l.experts.up", 0), AwqExpert("l.experts.up", 1)});
  const auto with = [&](const std::string& suffix, awqd::testing::TestTensor tensor) {
    TestTensors out = tensors;
    out["l.experts.up." + suffix] = std::move(tensor);
    return out;
  };
  const std::string weight = "m: weight \"l.experts.up\": tensor ";
  ExpectRefused(with("scales", {"F16", {3, 2, 16}, std::string(192, '\x2c')}),
                weight +
                    "\"scales\": shape: got [3, 2, 16] of F16, expected 2 experts in the first "
                    "dimension, as tensor \"qweight\" has");
  ExpectRefused(with("scales", {"F16", {}, std::string(2, '\x2c')}),
                weight + "\"scales\": shape: got [] of F16, expected 2 experts");
  ExpectRefused(with("qzeros", {"F4", {2, 5, 1}, std::string(5, '\0')}),
                weight +
                    "\"qzeros\": shape: got [2, 5, 1] of F4, expected whole bytes for each "
                    "expert");
  TestTensors missing = tensors;
  missing.erase("l.experts.up.scales");
  ExpectRefused(missing, weight + "\"scales\" is missing");
}

TEST_F(ExpertSlicesTest, HowManyThereMayBe) {
  const auto empty = [](int64_t experts) {
    return TestTensors{{"l.experts.up.qweight", {"I32", {experts, 0, 0}, ""}},
                       {"l.experts.up.qzeros", {"I32", {experts, 0, 0}, ""}},
                       {"l.experts.up.scales", {"F16", {experts, 0, 0}, ""}}};
  };
  const std::string weight = "m: weight \"l.experts.up\": tensor \"qweight\": shape: got [";
  ExpectRefused(empty(0), weight + "0, 0, 0] of I32, expected 1 to 10000 experts");
  ExpectRefused(empty(10001), weight + "10001, 0, 0] of I32, expected 1 to 10000 experts");
  Write(empty(10000));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->linears().size(), 10000u);
}

// Without data, a few bytes of header would be thousands of linears.
TEST_F(ExpertSlicesTest, AllSlicesTogetherAreBounded) {
  TestTensors tensors;
  for (int i = 0; i < 40; ++i) {
    const std::string path = absl::StrCat("l.", i, ".experts.up");
    tensors[path + ".qweight"] = {"I32", {10000, 0, 0}, ""};
    tensors[path + ".qzeros"] = {"I32", {10000, 0, 0}, ""};
    tensors[path + ".scales"] = {"F16", {10000, 0, 0}, ""};
  }
  ExpectRefused(tensors, "10000 experts: got more than 1000000 tensors of experts");
}

TEST_F(ExpertSlicesTest, UnderAnyParent) {
  for (const std::string path : {"l.switch_mlp.up", "up", "l.experts.mlp.up", "l.experts_up"}) {
    SCOPED_TRACE(path);
    TestTensors flat;
    std::vector<TestTensors> experts;
    for (int i = 0; i < 3; ++i) {
      flat = Merge(flat, AwqExpert(absl::StrCat(path, ".experts.", i), i));
      experts.push_back(AwqExpert(path, i));
    }
    Write(flat, "flat");
    Write(AllExperts(experts), "stacked");
    ExpectSameWeights("flat", "stacked", 3);
  }
}

TEST_F(ExpertSlicesTest, AnExpertAloneIsNotSliced) {
  const TestTensors twice = AllExperts({AwqExpert("l.experts.3", 0), AwqExpert("l.experts.3", 1)});
  Write(Merge(twice, AwqExpert("l.experts.up", 0)));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_EQ(checkpoint->linears().size(), 1u);
  EXPECT_EQ(checkpoint->linears()[0].path, "l.experts.up");
  ASSERT_EQ(checkpoint->unserved().count("l.experts.3"), 1u);
  const absl::Status& reason = checkpoint->unserved().at("l.experts.3");
  EXPECT_EQ(reason.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(reason.message()),
              HasSubstr("tensor \"qweight\": got 3 dimensions, expected 2"));
  Write(AwqExpert("l.experts.up", 0));  // two dimensions: one linear, as usual
  EXPECT_THAT(Decode("m"), ElementsAre(::testing::Key("l.experts.up")));
}

constexpr absl::string_view kNvfp4Config =
    R"({"quantization_config":{"quant_method":"modelopt","quant_algo":"NVFP4","group_size":16}})";

std::string Float(float value) {
  std::string out(sizeof(value), '\0');
  std::memcpy(out.data(), &value, sizeof(value));
  return out;
}

// N = 6, K = 32.
TestTensors Nvfp4Expert(const std::string& path, int expert) {
  const char fill = static_cast<char>(expert + 1);
  return {{path + ".weight", {"U8", {6, 16}, std::string(96, fill)}},
          {path + ".weight_scale", {"F8_E4M3", {6, 2}, std::string(12, 0x38)}},
          {path + ".weight_scale_2", {"F32", {}, Float(0.5f)}},
          {path + ".input_scale", {"F32", {}, Float(2)}}};
}

// The names that ModelOpt gives to all experts of a projection: suffixes behind '_'.
TestTensors Underscored(const TestTensors& tensors, const std::string& path) {
  TestTensors out;
  for (const auto& [name, tensor] : tensors) {
    const std::string suffix = name.substr(path.size() + 1);
    out[suffix == "weight" ? path : path + "_" + suffix] = tensor;
  }
  return out;
}

TEST_F(ExpertSlicesTest, SuffixesBehindAnUnderscore) {
  const std::string path = "l.experts.gate_up_proj";
  Write(
      Merge(Nvfp4Expert("l.experts.0.gate_up_proj", 0), Nvfp4Expert("l.experts.1.gate_up_proj", 1)),
      "flat", kNvfp4Config);
  const TestTensors stacked = AllExperts({Nvfp4Expert(path, 0), Nvfp4Expert(path, 1)});
  Write(Underscored(stacked, path), "stacked", kNvfp4Config);
  ExpectSameWeights("flat", "stacked", 2);
  EXPECT_EQ(Decode("stacked").at("l.experts.1.gate_up_proj").outer, std::vector<float>{0.5f});
  // One outer scale for all experts.
  TestTensors shared = stacked;
  shared[path + ".weight_scale_2"] = {"F32", {1}, Float(0.5f)};
  Write(Underscored(shared, path), "shared", kNvfp4Config);
  ExpectSameWeights("flat", "shared", 2);
}

// transformers' names of FP8 in blocks.
TEST_F(ExpertSlicesTest, BlockScalesBehindAnUnderscore) {
  constexpr absl::string_view kConfig =
      R"({"quantization_config":{"quant_method":"fp8","weight_block_size":[2,2]}})";
  const auto expert = [](const std::string& path, char fill) {
    return TestTensors{{path + ".weight", {"F8_E4M3", {3, 4}, std::string(12, fill)}},
                       {path + ".weight_scale_inv", {"F32", {2, 2}, std::string(16, fill)}}};
  };
  Write(Merge(expert("l.experts.0.up", 1), expert("l.experts.1.up", 2)), "flat", kConfig);
  const TestTensors stacked = AllExperts({expert("l.experts.up", 1), expert("l.experts.up", 2)});
  Write({{"l.experts.up", stacked.at("l.experts.up.weight")},
         {"l.experts.up_scale_inv", stacked.at("l.experts.up.weight_scale_inv")}},
        "stacked", kConfig);
  ExpectSameWeights("flat", "stacked", 2);
  Write(stacked, "dotted", kConfig);
  ExpectSameWeights("flat", "dotted", 2);
}

// Settings by the path of all experts, beside others of a module whose name ends alike.
TEST_F(ExpertSlicesTest, SettingsByThePathOfAllExperts) {
  TestTensors tensors = Merge(Nvfp4Expert("model.l.mlp.experts.0.up_proj", 0),
                              Nvfp4Expert("model.l.mlp.experts.1.up_proj", 1));
  const std::string shared = "model.l.mlp.shared_experts.up_proj";
  tensors[shared + ".weight"] = {"F8_E4M3", {2, 32}, std::string(64, 0x38)};
  tensors[shared + ".weight_scale"] = {"U8", {2, 1}, "\x80\x81"};
  tensors.erase("model.l.mlp.experts.1.up_proj.input_scale");  // calibration never saw it
  Write(tensors, "m", R"({"quantization_config": {"quant_method": "modelopt",
      "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "model.l.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.l.mlp.shared_experts.up_proj": {"quant_algo": "MXFP8", "group_size": 32}}}})");
  std::map<std::string, std::string> schemes;
  for (const auto& [path, weight] : Decode("m")) schemes[path] = ToString(weight.scheme);
  EXPECT_THAT(schemes,
              ElementsAre(::testing::Pair("model.l.mlp.experts.0.up_proj", "e2m1g16+e4m3*t"),
                          ::testing::Pair("model.l.mlp.experts.1.up_proj", "e2m1g16+e4m3*t"),
                          ::testing::Pair(shared, "e4m3c+e8m0")));
  EXPECT_TRUE(Open()->unserved().empty());
}

// Llama 4 and gpt-oss have [E, K, N]. Nothing but the scales tells.
TEST_F(ExpertSlicesTest, CodesByInFeatureAreNotTakenForOthers) {
  const std::string path = "l.experts.gate_up_proj";
  TestTensors tensors = Underscored(AllExperts({Nvfp4Expert(path, 0), Nvfp4Expert(path, 1)}), path);
  tensors[path].shape = {2, 16, 6};
  tensors[path + "_weight_scale"].shape = {2, 2, 6};
  tensors = Merge(tensors, Nvfp4Expert("l.q_proj", 3));
  Write(tensors, "m", kNvfp4Config);
  EXPECT_THAT(Decode("m"), ElementsAre(::testing::Key("l.q_proj")));
}

TEST(ExpertPath, BeforeOrBehindTheProjection) {
  EXPECT_EQ(ParseExpertPath("l.experts.3.up"), (ExpertPath{"l.experts.*.up", 3}));
  EXPECT_EQ(ParseExpertPath("l.experts.up.3"), (ExpertPath{"l.experts.up.*", 3}));
  EXPECT_EQ(ParseExpertPath("l.experts.3"), (ExpertPath{"l.experts.*", 3}));
  EXPECT_EQ(ParseExpertPath("l.experts.3.4"), (ExpertPath{"l.experts.*.4", 3}));
  EXPECT_EQ(ParseExpertPath("l.switch_mlp.up.experts.3"),
            (ExpertPath{"l.switch_mlp.up.experts.*", 3}));
  EXPECT_EQ(ParseExpertPath("l.experts.up.3.bias"), std::nullopt);
  EXPECT_EQ(ParseExpertPath("l.experts.up.03"), std::nullopt);
  EXPECT_EQ(ParseExpertPath("l.up.3"), std::nullopt);
}

TEST_F(ExpertSlicesTest, ErrorsOfDecodingNameTheSliceAndItsTensors) {
  Write(AllExperts({AwqExpert("l.experts.up", 0), AwqExpert("l.experts.up", 1)}), "m",
        AwqConfig(48));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::vector<uint8_t> scratch;
  const auto weight = checkpoint->Read(checkpoint->linears()[1], &scratch);
  EXPECT_EQ(weight.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(weight.status().message()),
              HasSubstr("m/model.safetensors: weight \"l.experts.1.up\" (a slice of "
                        "\"l.experts.up\"): group_size: got 48"));
  directory_.Write("m/model.safetensors", "short");
  EXPECT_THAT(std::string(checkpoint->Read(checkpoint->linears()[1], &scratch).status().message()),
              HasSubstr("(tensor \"l.experts.up.qweight\")"));
}

}  // namespace
}  // namespace awqd::model
