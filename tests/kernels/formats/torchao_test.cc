// "torchao": the classes of weights, by metadata and by settings, their tensors, and every refusal.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

Setting Word(const std::string& text) { return Setting::String(text); }

// N = 2, K = 4 in groups of 2: codes -8 .. -1, scales 1, 2 and 3, 4.
Linear MakeIntx() {
  Linear out = {.format = &kTorchAoFormat};
  out.Set("tensor_type", Word("IntxUnpackedToInt8Tensor"));
  out.Set("target_dtype", Word("int4"));
  out.Add("_weight_qdata", "I8", {2, 4});
  out.Add("_weight_scale", "F32", {2, 2});
  out.Add("_weight_zero_point", "I8", {2, 2});
  for (int i = 0; i < 8; ++i) out.Put<int8_t>("_weight_qdata", i, static_cast<int8_t>(i - 8));
  for (int i = 0; i < 4; ++i) out.Put<float>("_weight_scale", i, static_cast<float>(i + 1));
  return out;
}

void ExpectScheme(const Linear& linear, const std::string& scheme) {
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), scheme);
}

TEST(TorchAoFormat, IntegersWithZerosOfEveryKind) {
  Linear linear = MakeIntx();
  ExpectScheme(linear, "w4g2s+fp32");
  EXPECT_EQ(WeightValue(*linear.Decode(), 3, 1), -4.0f);  // code -1, scale 4
  linear.Put<int8_t>("_weight_zero_point", 3, -8);
  ExpectScheme(linear, "w4g2z+fp32");
  EXPECT_EQ(WeightValue(*linear.Decode(), 3, 1), 28.0f);
  linear.Put<int8_t>("_weight_zero_point", 3, 9);  // beyond the codes
  ExpectScheme(linear, "w4g2r:fp32+fp32");
  EXPECT_EQ(WeightValue(*linear.Decode(), 3, 1), -40.0f);
  linear.Add("_weight_zero_point", "F32", {2, 2});
  linear.Put<float>("_weight_zero_point", 3, 0.5f);
  ExpectScheme(linear, "w4g2r:fp32+fp32");
  EXPECT_EQ(WeightValue(*linear.Decode(), 3, 1), -6.0f);
  EXPECT_EQ(WeightValue(*linear.Decode(), 0, 1), -12.0f);  // code -4, scale 3
}

TEST(TorchAoFormat, BlocksFollowFromTheScales) {
  using Shape = std::vector<int64_t>;
  for (const auto& [shape, scheme] :
       std::vector<std::pair<Shape, std::string>>{{{}, "w4ts+fp32"},
                                                  {{1, 1}, "w4ts+fp32"},
                                                  {{2, 1}, "w4cs+fp32"},
                                                  {{2}, "w4cs+fp32"},
                                                  {{2, 4}, "w4g1s+fp32"},
                                                  {{1, 2}, "w4b2x0s+fp32"}}) {
    Linear linear = MakeIntx();
    linear.tensors.erase("_weight_zero_point");
    linear.Reshape("_weight_scale", shape);
    ExpectScheme(linear, scheme);
  }
}

// N = 2, K = 4 in groups of 2: W[k, n] = code * scale[k / 2, n] + zero_point[k / 2, n].
Linear MakeInt4() {
  Linear out = {.format = &kTorchAoFormat};
  out.Set("tensor_type", Word("Int4Tensor"));
  out.Add("_weight_qdata", "I8", {2, 2});
  out.Add("_weight_scale", "BF16", {2, 2});
  out.Add("_weight_zero_point", "BF16", {2, 2});
  for (int i = 0; i < 4; ++i) out.Put<uint16_t>("_weight_scale", i, 0x3f00);  // 0.5
  out.Put<uint8_t>("_weight_qdata", 3, 0x8f);                                 // -1, -8
  return out;
}

TEST(TorchAoFormat, Int4AddsItsZeroPoint) {
  Linear linear = MakeInt4();
  ExpectScheme(linear, "w4g2s+bf16");
  EXPECT_EQ(WeightValue(*linear.Decode(), 2, 1), -0.5f);
  EXPECT_EQ(WeightValue(*linear.Decode(), 3, 1), -4.0f);
  linear.Put<uint16_t>("_weight_zero_point", 3, 0x4040);  // 3
  ExpectScheme(linear, "w4g2o:fp32+bf16");
  EXPECT_EQ(WeightValue(*linear.Decode(), 2, 1), 2.5f);
  EXPECT_EQ(WeightValue(*linear.Decode(), 3, 1), -1.0f);
  EXPECT_EQ(WeightValue(*linear.Decode(), 3, 0), 0.0f);
  linear.Add("_weight_qdata", "I8", {1, 2});  // the last byte of a row has one code
  linear.Reshape("_weight_scale", {2, 1});
  linear.Reshape("_weight_zero_point", {2, 1});
  ExpectScheme(linear, "w4g2s+bf16");
}

// N = 1, K = 32; the scale is 2.
Linear MakeMx(const std::string& elements, int64_t bytes) {
  Linear out = {.format = &kTorchAoFormat};
  out.Set("tensor_type", Word("MXTensor"));
  out.Set("elem_dtype", Word(elements));
  out.Add("_weight_qdata", "U8", {1, bytes});
  out.Add("_weight_scale", "U8", {1, 1});
  out.Put<uint8_t>("_weight_scale", 0, 128);
  out.Put<uint8_t>("_weight_qdata", 1, 0x38);
  return out;
}

TEST(TorchAoFormat, MxHasPairsOrBytes) {
  const Linear bytes = MakeMx("float8_e4m3fn", 32);
  ExpectScheme(bytes, "e4m3c+e8m0");
  EXPECT_EQ(WeightValue(*bytes.Decode(), 1, 0), 2.0f);
  const Linear pairs = MakeMx("float4_e2m1fn_x2", 16);
  ExpectScheme(pairs, "e2m1c+e8m0");
  EXPECT_EQ(WeightValue(*pairs.Decode(), 2, 0), -0.0f);
  EXPECT_EQ(WeightValue(*pairs.Decode(), 3, 0), 3.0f);
}

TEST(TorchAoFormat, TilesOfScales) {
  Linear linear = MakeMx("float8_e4m3fn", 32);
  linear.Set("is_swizzled_scales", Setting::Literal(true));
  linear.Add("_weight_qdata", "U8", {130, 160});
  for (int64_t i = 0; i < 130 * 160; ++i) linear.Put<uint8_t>("_weight_qdata", i, 0x38);
  linear.Reshape("_weight_scale", {64, 32});
  // Row 129, columns 128 to 159: the last tile, of scales of rows 128 on and columns 4 on.
  linear.Put<uint8_t>("_weight_scale", 3 * 512 + 16, 130);
  linear.Put<uint8_t>("_weight_scale", 33 % 32 * 16 + 33 / 32 * 4 + 2, 126);  // row 33, column 2
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(WeightValue(*weight, 159, 129), 8.0f);
  EXPECT_EQ(WeightValue(*weight, 64, 33), 0.5f);
  linear.Reshape("_weight_scale", {130, 5});
  EXPECT_THAT(std::string(linear.Decode().status().message()),
              HasSubstr("\"_weight_scale\": got shape [130, 5], expected [64, 32] (tiles of"));
}

// --- Metadata ---

absl::StatusOr<HostWeight> DecodeWith(const Linear& linear, const std::string& metadata) {
  LinearTensors views = linear.Views();
  views.at("_weight_qdata").metadata = metadata;
  return linear.format->Decode(linear.settings, views);
}

TEST(TorchAoFormat, MetadataTellTheClass) {
  Linear linear = MakeIntx();
  linear.settings = {};
  const auto data = [](const std::string& more) {
    return absl::StrCat("{\"_type\": \"IntxUnpackedToInt8Tensor\", \"_data\": {\"target_dtype\": ",
                        "{\"_type\": \"torch.dtype\", \"_data\": \"int4\"}", more, "}}");
  };
  auto weight = DecodeWith(linear, data(", \"block_size\": [1, 2]"));
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w4g2s+fp32");
  const auto expect = [&](const std::string& metadata, const std::string& says) {
    const absl::Status status = DecodeWith(linear, metadata).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
  };
  expect(data(", \"block_size\": [1, 4]"),
         "\"_weight_scale\": got shape [2, 2], expected that of blocks [1, 4] of [2, 4]");
  expect(data(", \"block_size\": [1, -2]"), "block_size of others, expected whole numbers");
  const std::string named = ", \"_tensor_data_names\": [\"scale\", \"act_pre_scale\"]}";
  expect(data("").substr(0, data("").size() - 1) + named,
         "\"_weight_act_pre_scale\": got nothing, expected it, as the metadata name it");
  expect("{", "metadata of the weight: got other text, expected a JSON object with \"_type\"");
  expect("[1]", "metadata of the weight: got other text");
  expect(std::string(5000, ' '), "metadata of the weight: got 5000 bytes, expected at most 4096");
  expect("{\"_type\": \"Tensor\"}", "tensor_type: got \"tensor\", expected Int8Tensor");
  expect("{\"_type\": \"Int4TilePackedTo4dTensor\", \"_data\": {}}",
         "tensor_type: got Int4TilePackedTo4dTensor (tiles of tinygemm's kernels), expected "
         "Int8Tensor, ");
  expect("", "tensor_type: got nothing, nor in the metadata of the file, expected Int8Tensor");
}

TEST(TorchAoFormat, ActivationsOfTokens) {
  Linear linear = MakeIntx();
  const std::string text =
      "{\"_type\": \"Int8Tensor\", \"_data\": {\"act_quant_kwargs\": {\"_type\": \"\", \"_data\": "
      "{\"granularity\": {\"_type\": \"PerRow\"}, \"mapping_type\": {\"_data\": \"SYMMETRIC\"}}}}}";
  auto weight = DecodeWith(linear, text);
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->activations.how, ActivationQuantization::kPerToken);
  std::string other = text;
  other.replace(other.find("SYMMETRIC"), 9, "ASYMMETRIC");
  weight = DecodeWith(linear, other);
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->activations.how, ActivationQuantization::kNone);
}

// --- Refusals ---

class IntxRefusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(IntxRefusal, NamesThePart) { ExpectRefused(MakeIntx(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    All, IntxRefusal,
    ::testing::ValuesIn(std::vector<Refusal>{
        {"CodesMissing", Without("_weight_qdata"), {"\"_weight_qdata\": got nothing"}},
        {"ScaleMissing", Without("_weight_scale"), {"\"_weight_scale\": got nothing"}},
        {"CodeDtype", WithDtype("_weight_qdata", "U8"), {"got dtype U8, expected I8"}},
        {"CodeRank", WithShape("_weight_qdata", {8}), {"got shape [8], expected rank 2"}},
        {"CodesShort", Short("_weight_qdata"), {"\"_weight_qdata\": got 7 bytes, expected 8"}},
        {"CodeOutside",
         [](Linear* l) { l->Put<int8_t>("_weight_qdata", 5, 8); },
         {"\"_weight_qdata\": got 8 at element 5, expected -8 to 7 (int4)"}},
        {"ScaleShape",
         WithShape("_weight_scale", {2, 3}),
         {"\"_weight_scale\": got shape [2, 3], expected a scale for each of equal blocks of [2, "
          "4]"}},
        {"ScaleRank", WithShape("_weight_scale", {1, 1, 1}), {"got shape [1, 1, 1]"}},
        {"ScaleIsNan",
         [](Linear* l) { l->Put<uint32_t>("_weight_scale", 1, 0x7fc00000); },
         {"\"_weight_scale\": got NaN at element 1"}},
        {"ZeroShape",
         WithShape("_weight_zero_point", {2, 1}),
         {"\"_weight_zero_point\": got shape [2, 1], expected [2, 2], as \"_weight_scale\" has"}},
        {"ZeroIsNoSum",
         [](Linear* l) {
           l->Add("_weight_zero_point", "F32", {2, 2});
           l->Put<float>("_weight_zero_point", 2, 0x1p-30f);
         },
         {"at element 2, expected a number that FP32 holds with 8 added"}},
        {"OuterOfOthers",
         [](Linear* l) { l->Add("_weight_per_tensor_scale", "F32", {}); },
         {"\"_weight_per_tensor_scale\": got it, expected none with IntxUnpackedToInt8Tensor"}},
        {"TilesOfOthers",
         [](Linear* l) { l->Add("_weight_scale_and_zero", "F16", {1}); },
         {"\"_weight_scale_and_zero\": got it, expected none with"}},
        {"FactorShape",
         [](Linear* l) { l->Add("_weight_act_pre_scale", "F32", {2}); },
         {"\"_weight_act_pre_scale\": got shape [2], expected [4] (K)"}},
        {"BiasShape",
         [](Linear* l) { l->Add("bias", "F32", {3}); },
         {"\"bias\": got shape [3], expected [2] (N)"}},
        {"NoTargetDtype",
         [](Linear* l) { l->settings.members.erase("target_dtype"); },
         {"target_dtype: got nothing, expected int1 to int8"}},
        {"TargetDtype", With("target_dtype", Word("uint4")), {"target_dtype: got \"uint4\""}},
        {"OtherClass",
         With("tensor_type", Word("AffineQuantizedTensor")),
         {"tensor_type: got \"affinequantizedtensor\", expected Int8Tensor, "}},
        {"Preshuffled",
         With("tensor_type", Word("Int4PreshuffledTensor")),
         {"tensor_type: got Int4PreshuffledTensor (shuffled for MSLK's kernels)"}},
        {"PlainInt32",
         With("tensor_type", Word("Int4PlainInt32Tensor")),
         {"tensor_type: got Int4PlainInt32Tensor (words of XPUs and NPUs)"}},
        {"Activations", With("activations", Word("group")), {"activations: got \"group\""}},
        {"Float8OfIntegers",
         With("tensor_type", Word("Float8Tensor")),
         {"\"_weight_zero_point\": got it, expected none with Float8Tensor"}}}),
    [](const auto& info) { return info.param.name; });

class Int4Refusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(Int4Refusal, NamesThePart) { ExpectRefused(MakeInt4(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    All, Int4Refusal,
    ::testing::ValuesIn(std::vector<Refusal>{
        {"ZeroMissing", Without("_weight_zero_point"), {"\"_weight_zero_point\": got nothing"}},
        {"CodeDtype", WithDtype("_weight_qdata", "F16"), {"\"_weight_qdata\": got dtype F16"}},
        {"ScaleShape",
         WithShape("_weight_scale", {2, 3}),
         {"got shape [2, 3], expected [2, 2] ([K/group_size, N])"}},
        {"Groups",
         WithShape("_weight_scale", {3, 2}),
         {"\"_weight_scale\": got 3 groups, expected a divisor of K = 4"}},
        {"ZeroShape",
         WithShape("_weight_zero_point", {1, 2}),
         {"\"_weight_zero_point\": got shape [1, 2], expected [2, 2]"}},
        {"ZeroIsNan",
         [](Linear* l) { l->Put<uint16_t>("_weight_zero_point", 1, 0x7fc0); },
         {"\"_weight_zero_point\": got NaN at element 1"}}}),
    [](const auto& info) { return info.param.name; });

class MxRefusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(MxRefusal, NamesThePart) { ExpectRefused(MakeMx("float8_e4m3fn", 32), GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    All, MxRefusal,
    ::testing::ValuesIn(std::vector<Refusal>{
        {"Fp6", With("elem_dtype", Word("fp6_e3m2")), {"elem_dtype: got \"fp6_e3m2\""}},
        {"RaggedK", WithShape("_weight_qdata", {1, 33}), {"got K = 33, expected a multiple of 32"}},
        {"ScaleIsNan",
         [](Linear* l) { l->Put<uint8_t>("_weight_scale", 0, 255); },
         {"\"_weight_scale\": got NaN at element 0"}},
        {"ScaleShape",
         WithShape("_weight_scale", {1, 2}),
         {"\"_weight_scale\": got shape [1, 2], expected [1, 1]"}},
        {"ScaleDtype", WithDtype("_weight_scale", "F8_E4M3"), {"got dtype F8_E4M3"}},
        {"Int8OfFloats",
         With("tensor_type", Word("Int8Tensor")),
         {"\"_weight_qdata\": got dtype U8, expected I8"}}}),
    [](const auto& info) { return info.param.name; });

TEST(TorchAoFormat, RefusesE5m2) {
  Linear linear = {.format = &kTorchAoFormat};
  linear.Set("tensor_type", Word("Float8Tensor"));
  linear.Add("_weight_qdata", "F8_E5M2", {1, 2});
  linear.Add("_weight_scale", "F32", {1, 1});
  EXPECT_THAT(std::string(linear.Decode().status().message()),
              HasSubstr("\"_weight_qdata\": got dtype F8_E5M2, expected F8_E4M3 or U8"));
}

TEST(TorchAoFormat, SettingsLeaveTheClassToEachLinear) {
  Setting config;
  config.members["quant_method"] = Word("torchao");
  config.members["quant_type"].members["default"].members["_type"] = Word("Int4WeightOnlyConfig");
  config.members["modules_to_not_convert"].kind = Setting::Kind::kList;
  config.members["modules_to_not_convert"].list = {Word("lm_head")};
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kTorchAoFormat);
  ASSERT_EQ(found->config.rules.size(), 1);
  EXPECT_TRUE(found->config.rules[0].settings.members.empty());
  EXPECT_EQ(found->config.left_out.size(), 1);
}

}  // namespace
}  // namespace awqd
