// "mlx": its settings, its tensors, and every refusal.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;
using Kind = ModulePattern::Kind;
using Members = std::map<std::string, Setting, std::less<>>;

Setting Object(Members members) {
  Setting out;
  out.members = std::move(members);
  return out;
}

Setting Word(const std::string& text) { return Setting::String(text); }
Setting Number(int64_t number) { return Setting::Literal(number); }

// --- Tensors ---

int CodeOf(int bits, int n, int k) { return (5 * n + 3 * k + 1) % (1 << bits); }

// Writes codes one after the other from the low bits of the first byte on.
void PutCodes(Linear* linear, int bits, int rows, int columns) {
  std::vector<uint8_t>& bytes = linear->tensors["weight"].bytes;
  for (int i = 0; i < rows * columns * bits; ++i) {
    const int element = i / bits, code = CodeOf(bits, element / columns, element % columns);
    bytes[i / 8] = static_cast<uint8_t>(bytes[i / 8] | (code >> i % bits & 1) << i % 8);
  }
}

// N = 3, K = 64 in groups of 32; scales of 0.5 on, biases of -2 on.
Linear MakeAffine(int bits) {
  Linear out = {.format = &kMlxFormat};
  out.Set("bits", bits);
  out.Set("group_size", 32);
  out.Add("weight", "U32", {3, 2 * bits});
  PutCodes(&out, bits, 3, 64);
  out.Add("scales", "F32", {3, 2});
  out.Add("biases", "F32", {3, 2});
  for (int i = 0; i < 6; ++i) out.Put("scales", i, 0.5f + static_cast<float>(i));
  for (int i = 0; i < 6; ++i) out.Put("biases", i, static_cast<float>(i) - 2);
  return out;
}

// N = 2, K = 64; scales are 1.
Linear MakeFloats(const std::string& mode) {
  const bool mxfp8 = mode == "mxfp8", nvfp4 = mode == "nvfp4";
  Linear out = {.format = &kMlxFormat};
  out.Set("mode", Word(mode));
  out.Add("weight", "U32", {2, mxfp8 ? 16 : 8});
  PutCodes(&out, mxfp8 ? 8 : 4, 2, 64);
  out.Add("scales", "U8", {2, nvfp4 ? 4 : 2});
  for (uint8_t& scale : out.tensors["scales"].bytes) scale = nvfp4 ? 0x38 : 127;
  return out;
}

TEST(MlxFormat, AffineCodesCrossWords) {
  for (const int bits : {1, 2, 3, 4, 5, 6, 8}) {
    SCOPED_TRACE(bits);
    const auto weight = MakeAffine(bits).Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
    EXPECT_EQ(ToString(weight->scheme), absl::StrCat("w", bits, "g32o:fp32+fp32"));
    for (int k = 0; k < 64; ++k) {
      for (int n = 0; n < 3; ++n) {
        const auto cell = static_cast<float>(n * 2 + k / 32);
        const auto code = static_cast<float>(CodeOf(bits, n, k));
        ASSERT_EQ(WeightValue(*weight, k, n), code * (0.5f + cell) + (cell - 2)) << n << " " << k;
      }
    }
  }
}

TEST(MlxFormat, ScalesAndBiasesMayHaveOtherTypes) {
  Linear linear = MakeAffine(4);
  linear.Set("group_size", -1);
  linear.Add("scales", "F16", {3, 1});
  linear.Add("biases", "BF16", {3, 1});
  linear.Put<uint16_t>("scales", 2, 0x4000);  // 2
  linear.Put<uint16_t>("biases", 2, 0xbf80);  // -1
  linear.Add("bias", "F16", {3});
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w4co:bf16");
  EXPECT_EQ(WeightValue(*weight, 5, 2), static_cast<float>(CodeOf(4, 2, 5) * 2 - 1));
  EXPECT_EQ(weight->bias.size(), 3u);
}

TEST(MlxFormat, FloatsHaveOneByteScales) {
  constexpr float kValues[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  const float code = kValues[CodeOf(4, 1, 40) % 8] * (CodeOf(4, 1, 40) < 8 ? 1.0f : -1.0f);
  Linear mxfp4 = MakeFloats("mxfp4"), nvfp4 = MakeFloats("nvfp4"), mxfp8 = MakeFloats("mxfp8");
  mxfp4.Put<uint8_t>("scales", 3, 130);
  nvfp4.Put<uint8_t>("scales", 6, 0x44);  // 3
  mxfp8.Put<uint32_t>("weight", 26, 0x38);
  EXPECT_EQ(ToString(mxfp4.Decode()->scheme), "e2m1g32+e8m0");
  EXPECT_EQ(ToString(nvfp4.Decode()->scheme), "e2m1g16+e4m3");
  EXPECT_EQ(ToString(mxfp8.Decode()->scheme), "e4m3g32+e8m0");
  EXPECT_EQ(WeightValue(*mxfp4.Decode(), 40, 1), code * 8);
  EXPECT_EQ(WeightValue(*nvfp4.Decode(), 40, 1), code * 3);
  EXPECT_EQ(WeightValue(*mxfp8.Decode(), 40, 1), 1.0f);
  nvfp4.Add("global_scale", "F32", {});
  nvfp4.Put<float>("global_scale", 0, 1344);
  EXPECT_EQ(ToString(nvfp4.Decode()->scheme), "e2m1g16+e4m3*t");
  EXPECT_EQ(WeightValue(*nvfp4.Decode(), 40, 1), code * 1.5f);
}

TEST(MlxFormat, RequestsHaveOtherWords) {
  Linear linear = MakeAffine(3);
  linear.tensors["weight"].dtype = "I32";
  EXPECT_TRUE(linear.Decode().ok());
}

TEST(MlxFormat, SettingsTellWhichTensorsAreThere) {
  const auto none = [](absl::string_view) { return false; };
  EXPECT_EQ(kMlxFormat.lacks({}, none), "biases");
  EXPECT_EQ(kMlxFormat.lacks(Object({{"mode", Word("mxfp4")}}), none), "");
  EXPECT_EQ(kMlxFormat.lacks(
                Object({{"mode", Word("nvfp4")}, {"global_scale", Setting::Literal(true)}}), none),
            "global_scale");
}

TEST(MlxFormat, Refusals) {
  const auto expect = [](const Linear& linear, const std::vector<Refusal>& refusals) {
    for (const Refusal& refusal : refusals) {
      SCOPED_TRACE(refusal.name);
      ExpectRefused(linear, refusal);
    }
  };
  expect(
      MakeAffine(3),
      {{"no weight", Without("weight"), {"\"weight\": got nothing, expected U32"}},
       {"no scales", Without("scales"), {"\"scales\": got nothing"}},
       {"no biases", Without("biases"), {"\"biases\": got nothing"}},
       {"dtype", WithDtype("weight", "F32"), {"\"weight\": got dtype F32, expected U32 or I32"}},
       {"rank", WithShape("weight", {18}), {"expected rank 2"}},
       {"short", Short("weight"), {"\"weight\": got 71 bytes, expected 72"}},
       {"words", WithShape("weight", {3, 7}), {"got rows of 7 words, expected whole codes of 3"}},
       {"more words",
        WithShape("weight", {3, 9}),
        {"\"scales\": got shape [3, 2], expected [3, 3]"}},
       {"bits", With("bits", Number(6)), {"expected [3, 1]", "6 words have K = 32 with 6 bits"}},
       {"bits of none", With("bits", Number(7)), {"bits: got 7, expected 1 to 6 or 8"}},
       {"no bits", With("bits", Number(0)), {"bits: got 0"}},
       {"group", With("group_size", Number(48)), {"group_size: got 48, expected -1 or a divisor"}},
       {"no group", With("group_size", Number(0)), {"group_size: got 0"}},
       {"other group",
        With("group_size", Number(64)),
        {"\"scales\": got shape [3, 2], expected [3, 1]"}},
       {"mode", With("mode", Word("mxfp3")), {"mode: got \"mxfp3\", expected affine"}},
       {"scale dtype", WithDtype("scales", "U8"), {"\"scales\": got dtype U8"}},
       {"biases", WithShape("biases", {3, 1}), {"\"biases\": got shape [3, 1], expected [3, 2]"}},
       {"NaN",
        [](Linear* l) { l->Put<uint32_t>("biases", 5, 0x7fc00000); },
        {"\"biases\": got NaN"}},
       {"global", [](Linear* l) { l->Add("global_scale", "F32", {}); }, {"none with mode affine"}},
       {"bias", [](Linear* l) { l->Add("bias", "F16", {2}); }, {"\"bias\": got shape [2]"}}});
  expect(MakeFloats("nvfp4"),
         {{"biases",
           [](Linear* l) {
             l->Add("biases", "F16", {2, 4});
           },
           {"none with mode nvfp4"}},
          {"words", WithShape("weight", {2, 7}), {"got 16, expected -1 or a divisor of K = 56"}},
          {"bits", With("bits", Number(8)), {"bits: got 8, expected 4 with mode nvfp4"}},
          {"group", With("group_size", Number(32)), {"group_size: got 32, expected 16 with mode"}},
          {"NaN", [](Linear* l) { l->Put<uint8_t>("scales", 7, 0x7f); }, {"NaN at element 7"}},
          {"global", [](Linear* l) { l->Add("global_scale", "F32", {2}); }, {"expected [1]"}}});
}

// --- Settings ---

Setting Config(Members layers) {
  Setting out = Object(std::move(layers));
  out.members.insert({{"bits", Number(4)}, {"group_size", Number(64)}});
  return out;
}

TEST(MlxFormat, PathsHaveSettingsOfTheirOwn) {
  const auto found = FindFormat(Config({{"a.gate", Object({{"bits", Number(8)}})},
                                        {"a.up", Object({{"mode", Word("mxfp4")}})},
                                        {"a.down", Object({{"mode", Word("mxfp4")}})},
                                        {"a.all", Setting::Literal(true)},
                                        {"lm_head", Setting::Literal(false)},
                                        {"mode", Word("mxfp4")},
                                        {"group_size", Number(32)}}));
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kMlxFormat);
  EXPECT_EQ(found->quant_method, "mlx");
  using Patterns = std::vector<ModulePattern>;
  EXPECT_EQ(found->config.left_out, (Patterns{{Kind::kPath, "lm_head"}}));
  const auto& rules = found->config.rules;
  ASSERT_EQ(rules.size(), 3u);
  EXPECT_EQ(rules[0].targets, (Patterns{{Kind::kPath, "a.gate"}}));
  EXPECT_EQ(rules[1].targets, (Patterns{{Kind::kPath, "a.down"}, {Kind::kPath, "a.up"}}));
  EXPECT_EQ(rules[2].targets, Patterns{{}});
  const Setting affine = Object({{"mode", Word("affine")},
                                 {"bits", Number(8)},
                                 {"group_size", Number(64)},
                                 {"global_scale", Setting::Literal(false)}});
  EXPECT_EQ(rules[0].settings, affine);
  EXPECT_EQ(rules[1].settings, rules[2].settings);
}

TEST(MlxFormat, AnUnreadModeTakesItsLinearsWithIt) {
  const Setting other = Object({{"mode", Word("mxfp3")}});
  const auto found = FindFormat(Config({{"a.up", other}, {"a.down", Object({})}}));
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->config.rules.size(), 3u);
  for (const LinearRule& rule : found->config.rules) {
    if (rule.targets.front().text != "a.up") {
      EXPECT_TRUE(rule.unread.ok()) << rule.unread;
      continue;
    }
    EXPECT_EQ(rule.unread.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(rule.unread.message()), HasSubstr("a.up.mode: got \"mxfp3\""));
  }
}

TEST(MlxFormat, RefusesSettings) {
  const auto expect = [](const Setting& config, absl::StatusCode code, const std::string& says) {
    const absl::Status status = FindFormat(config).status();
    EXPECT_EQ(status.code(), code) << says;
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  expect(Config({{"mode", Word("mxfp3")}}), absl::StatusCode::kUnimplemented,
         "mode: got \"mxfp3\", expected affine, mxfp4, nvfp4 or mxfp8");
  expect(Config({{"mode", Number(3)}}), kInvalid, "mode: got 3");
  expect(Object({{"bits", Number(7)}, {"group_size", Number(64)}}),
         absl::StatusCode::kUnimplemented, "bits: got 7");
  expect(Object({{"bits", Number(4)}}), kInvalid, "quant_method: got nothing");
}

}  // namespace
}  // namespace awqd
