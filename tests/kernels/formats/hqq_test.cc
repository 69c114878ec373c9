// "hqq": its settings, its tensors, and every refusal.
#include <string>
#include <vector>

#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = ModulePattern::Kind;

void PutShape(Linear* l, int64_t n, int64_t k) {
  l->Add("shape", "I64", {2});
  l->Put<int64_t>("shape", 0, n);
  l->Put<int64_t>("shape", 1, k);
}

// N = 4, K = 8 of 4 bits in groups of 4, so 8 rows: row r has codes r, r + 1, ..., zero r + 0.5 and
// scale r + 1.
Linear MakeLinear() {
  Linear out = {.format = &kHqqFormat};
  out.Set("nbits", 4);
  out.Set("group_size", 4);
  out.Add("W_q", "U8", {4, 4});
  out.Add("scale", "F32", {8, 1});
  out.Add("zero", "F32", {8, 1});
  PutShape(&out, 4, 8);
  for (int i = 0; i < 16; ++i) {
    const int row = i / 4, at = i % 4;
    out.Put<uint8_t>("W_q", i, static_cast<uint8_t>((row + at) << 4 | (row + 4 + at)));
  }
  for (int i = 0; i < 8; ++i) {
    out.Put<float>("scale", i, i + 1);
    out.Put<float>("zero", i, i + 0.5f);
  }
  return out;
}

void ExpectEveryElement(const HostWeight& weight) {
  ASSERT_TRUE(Validate(weight).ok()) << Validate(weight);
  for (int k = 0; k < 8; ++k) {
    for (int n = 0; n < 4; ++n) {
      const int row = n * 2 + k / 4;
      EXPECT_EQ(WeightValue(weight, k, n), (k % 4 - 0.5f) * (row + 1));
    }
  }
}

TEST(HqqFormat, EveryElement) {
  const auto weight = MakeLinear().Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w4g4r:fp32+fp32");
  ExpectEveryElement(*weight);
}

TEST(HqqFormat, TheTensorsSayIt) {
  Linear linear = MakeLinear();
  linear.settings = {};
  for (const auto& [name, value] : {std::pair{"nbits", 4}, {"group_size", 4}, {"axis", 1}}) {
    linear.Add(name, "I32", {});
    linear.Put<int32_t>(name, 0, value);
  }
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ExpectEveryElement(*weight);
}

TEST(HqqFormat, WordsThatAreViewedAsFloats) {
  for (const char* dtype : {"F16", "BF16"}) {
    Linear linear = MakeLinear();
    linear.tensors["W_q"].dtype = dtype;
    linear.tensors["W_q"].shape = {4, 2};
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    ExpectEveryElement(*weight);
  }
}

TEST(HqqFormat, ThreeBits) {
  Linear linear = MakeLinear();
  linear.Set("nbits", 3);
  linear.Add("W_q", "I32", {1, 4});  // ten rows a word, of which two are padding
  for (int at = 0; at < 4; ++at) {
    uint32_t word = 63;
    for (int row = 0; row < 8; ++row)
      word |= static_cast<uint32_t>((row + at) % 8) << (27 - 3 * row);
    linear.Put<uint32_t>("W_q", at, word);
  }
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  for (int k = 0; k < 8; ++k) {
    for (int n = 0; n < 4; ++n) EXPECT_EQ(weight->Code(k, n), (n * 2 + k / 4 + k % 4) % 8);
  }
}

TEST(HqqFormat, Refusals) {
  const auto number = [](const char* name, int32_t value) {
    return [=](Linear* l) {
      l->Add(name, "I32", {});
      l->Put<int32_t>(name, 0, value);
    };
  };
  const std::vector<Refusal> refusals = {
      {"no words", Without("W_q"), {"\"W_q\": got nothing"}},
      {"no scale", Without("scale"), {"\"scale\": got nothing"}},
      {"no zero", Without("zero"), {"\"zero\": got nothing"}},
      {"no shape", Without("shape"), {"\"shape\": got nothing"}},
      {"no bits", [](Linear* l) { l->settings.members.erase("nbits"); }, {"nbits: got nothing"}},
      {"seven bits", With("nbits", 7), {"nbits: got 7, expected 1, 2, 3, 4, 5, 6 or 8"}},
      {"1.58 bits", With("nbits", Setting::Typed("1.58")), {"nbits: got 1.58"}},
      {"other bits", number("nbits", 2), {"\"nbits\": got 2, expected 4, as the settings say"}},
      {"axis", With("axis", 0), {"axis: got 0, expected 1: groups of axis 0 run across"}},
      {"axis of the tensor", number("axis", 0), {"\"axis\": got 0, expected 1"}},
      {"group", With("group_size", 3), {"group_size: got 3, expected -1 or a divisor of K = 8"}},
      {"negative group",
       [=](Linear* l) {
         l->settings.members.erase("group_size");
         number("group_size", -5)(l);
       },
       {"group_size: got -5, expected -1 or a divisor"}},
      {"huge group", number("group_size", 1 << 30), {"\"group_size\": got 1073741824"}},
      {"negative", [](Linear* l) { PutShape(l, -4, 8); }, {"\"shape\": got [-4, 8]"}},
      {"huge",
       [](Linear* l) { PutShape(l, int64_t{1} << 40, 8); },
       {"\"shape\": got [1099511627776"}},
      {"lies",
       [](Linear* l) { PutShape(l, 8, 8); },
       {"\"scale\": got shape [8, 1], expected [16, 1]"}},
      {"scale", WithShape("scale", {8}), {"\"scale\": got shape [8], expected rank 2"}},
      {"zero", WithShape("zero", {4, 1}), {"\"zero\": got shape [4, 1], expected [8, 1]"}},
      {"zero's dtype", WithDtype("zero", "U8"), {"\"zero\": got dtype U8"}},
      {"NaN", [](Linear* l) { l->Put<uint32_t>("zero", 2, 0x7fc00000); }, {"\"zero\": got NaN"}},
      {"words", WithShape("W_q", {8, 4}), {"\"W_q\": got shape [8, 4], expected [4, 4]"}},
      {"words' dtype", WithDtype("W_q", "I8"), {"\"W_q\": got dtype I8"}},
      {"wide words",
       [](Linear* l) {
         l->Add("W_q", "I32", {4, 4});
       },
       {"\"W_q\": got dtype I32, expected U8 for 4 bits"}},
      {"short", Short("W_q"), {"\"W_q\": got 15 bytes"}},
      {"large codes",
       [](Linear* l) {
         l->Set("nbits", 5);
         l->Add("W_q", "U8", {8, 4});
         l->Put<uint8_t>("W_q", 9, 32);
       },
       {"\"W_q\": got code 32, expected 0 to 31"}},
      {"rows that fill no byte",
       [](Linear* l) {
         PutShape(l, 3, 4);
         for (const char* name : {"scale", "zero"}) l->Reshape(name, {3, 1});
       },
       {"\"scale\": got 3 rows, expected a multiple of 2 for 4 bits"}},
      {"bias", [](Linear* l) { l->Add("bias", "F16", {3}); }, {"\"bias\": got shape [3]"}},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeLinear(), refusal);
  }
}

// --- Settings of a checkpoint ---

Setting Object(std::map<std::string, Setting, std::less<>> members) {
  Setting out;
  out.members = std::move(members);
  return out;
}

Setting Params(int64_t bits, int64_t axis = 1) {
  return Object({{"weight_quant_params", Object({{"nbits", Setting::Literal(bits)},
                                                 {"group_size", Setting::Literal(int64_t{64})},
                                                 {"axis", Setting::Literal(axis)},
                                                 {"optimize", Setting::Literal(true)}})},
                 {"scale_quant_params", {Setting::Kind::kNull}},
                 {"zero_quant_params", {Setting::Kind::kNull}}});
}

Setting Config(Setting params) {
  Setting out = Object({{"quant_method", Setting::String("hqq")}, {"quant_config", params}});
  out.members["skip_modules"].kind = Setting::Kind::kList;
  out.members["skip_modules"].list = {Setting::String("lm_head")};
  return out;
}

TEST(HqqFormat, ReadsSettings) {
  auto found = FindFormat(Config(Params(4)));
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kHqqFormat);
  EXPECT_THAT(found->config.left_out, ElementsAre(ModulePattern{Kind::kContains, "lm_head"}));
  EXPECT_EQ(found->config.rules.at(0).settings.members.size(), 3u);
  found = FindFormat(Config(Object({{"mlp.up_proj", Params(2)},
                                    {"self_attn.q_proj", Params(3)},
                                    {"self_attn.v_proj", {Setting::Kind::kNull}}})));
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->config.rules.size(), 2u);
  EXPECT_THAT(found->config.rules[1].targets,
              ElementsAre(ModulePattern{Kind::kRegex, "(.*\\.)?self_attn\\.q_proj$"}));
}

TEST(HqqFormat, RefusesSettings) {
  const auto expect = [](const Setting& config, absl::StatusCode code, const std::string& says) {
    const absl::Status status = FindFormat(config).status();
    EXPECT_EQ(status.code(), code) << says;
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kOther = absl::StatusCode::kUnimplemented;
  expect(Config(Params(4, 0)), kOther, "axis: got 0, expected 1: groups of axis 0 run across");
  expect(Config(Params(7)), kOther, "nbits: got 7");
  expect(Config({Setting::Kind::kNull}), kInvalid, "quant_config: got nothing");
  expect(Config(Object({{"mlp.up_proj", Object({})}})), kInvalid,
         "quant_config.mlp.up_proj.weight_quant_params: got nothing");
  Setting twice = Params(4);
  twice.members["zero_quant_params"] = Object({});
  expect(Config(twice), kOther, "zero_quant_params: got an object, expected null");
}

}  // namespace
}  // namespace awqd
