// AutoRound's packings, settings of its linears, and every refusal.
#include <string>
#include <vector>

#include "tests/kernels/formats/linear.h"
#include "tests/testing/reasons.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;
using Kind = ModulePattern::Kind;

Setting Object(std::map<std::string, Setting, std::less<>> members) {
  Setting out;
  out.members = std::move(members);
  return out;
}

Setting Bits(int64_t bits) { return Object({{"bits", Setting::Literal(bits)}}); }

Setting MakeConfig() {
  return Object({{"quant_method", Setting::String("auto-round")},
                 {"bits", Setting::Literal(int64_t{4})},
                 {"group_size", Setting::Literal(int64_t{128})},
                 {"sym", Setting::Literal(true)},
                 {"data_type", Setting::String("int")},
                 {"block_name_to_quantize", Setting::String("model.layers")}});
}

// 4 bits, K = 64 in groups of 32, N = 8: codes 0, stored zero points 7, scales 1.
Linear MakeLinear() {
  Linear out = {.format = &kAutoRoundFormat};
  out.Set("bits", 4);
  out.Set("group_size", 32);
  out.Add("qweight", "I32", {8, 8});
  out.Add("qzeros", "I32", {2, 1});
  out.Add("scales", "F16", {2, 8});
  for (int i = 0; i < 2; ++i) out.Put<uint32_t>("qzeros", i, 0x77777777);
  for (int i = 0; i < 16; ++i) out.Put<uint16_t>("scales", i, 0x3c00);
  return out;
}

TEST(AutoRoundFormat, ThePackingTellsWhatIsStored) {
  Linear linear = MakeLinear();
  for (const auto& [packing, zero] : {std::pair{"auto", 8},
                                      {"auto_round:auto_gptq", 8},
                                      {"auto_round:gptq", 8},
                                      {"auto_round", 7},
                                      {"auto_round:gptqmodel", 7}}) {
    linear.Set("packing_format", Setting::String(packing));
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(weight->Zero(1, 5), zero) << packing;
    EXPECT_EQ(weight->format, "auto-round");
  }
  linear.Set("packing_format", Setting::String("auto_round:auto_awq"));
  linear.Reshape("qweight", {64, 1});
  linear.Put<uint32_t>("qweight", 0, 0x75316420);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->format, "auto-round");
  for (int i = 0; i < 8; ++i) EXPECT_EQ(weight->Code(0, i), i);
}

TEST(AutoRoundFormat, FiveBitsAreADenseStream) {
  Linear linear = MakeLinear();
  linear.Set("bits", 5);
  linear.Reshape("qweight", {10, 8});
  linear.Reshape("qzeros", {2, 2});
  linear.Put<uint32_t>("qweight", 0, 0xc0000000);
  linear.Put<uint32_t>("qweight", 8, 0x00000007);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->Code(6, 0), 31);
}

TEST(AutoRoundFormat, Refusals) {
  const Refusal refusals[] = {
      {"no bits", [](Linear* l) { l->settings.members.erase("bits"); }, {"bits: got nothing"}},
      {"16 bits", With("bits", 16), {"bits: got 16, expected 2 to 8"}},
      {"packing",
       With("packing_format", Setting::String("fake")),
       {"packing_format: got \"fake\""}},
      {"llm_compressor",
       With("packing_format", Setting::String("auto_round:llm_compressor")),
       {"packing_format: got \"auto_round:llm_compressor\"", "holds FP4 and FP8 codes"}},
      {"awq of 8 bits",
       [](Linear* l) {
         l->Set("packing_format", Setting::String("auto_round:awq"));
         l->Set("bits", 8);
       },
       {"bits: got 8, expected 4 in packing_format"}},
      {"awq of another shape",
       With("packing_format", Setting::String("auto_round:awq")),
       {"tensor \"qweight\": got shape [8, 8]"}},
      {"zero point",
       [](Linear* l) {
         l->Put<uint32_t>("qzeros", 0, 0x77777776);
         l->Set("sym", Setting::Literal(true));
       },
       {"\"qzeros\": got zero point 7 at [0, 0], expected 8"}},
      {"order",
       [](Linear* l) {
         l->Add("g_idx", "I32", {64});
         l->Put<int32_t>("g_idx", 0, 1);
       },
       {"\"g_idx\": got 1 at index 0, expected 0"}},
      {"groups", With("group_size", 16), {"\"scales\": got 2 groups, expected 4"}},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeLinear(), refusal);
  }
}

TEST(AutoRoundSettings, PathsBeforeExpressionsAndTheFirstOfThose) {
  Setting config = MakeConfig();
  Setting& extra = config.members["extra_config"];
  extra = Object({{".*b.*", Bits(3)},
                  {".*a\\.b", Bits(2)},
                  {"lm_head", Bits(8)},
                  {"m.gate", Object({{"bits", Setting::Literal(int64_t{16})},
                                     {"data_type", Setting::String("float")}})},
                  {"x|y", Bits(16)},
                  {"none.*", Object({})}});
  extra.keys = {"none.*", ".*a\\.b", "m.gate", ".*b.*", "x|y", "lm_head"};
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format->name, "auto-round");
  const QuantConfig& got = found->config;
  EXPECT_THAT(got.left_out, ::testing::ElementsAre(ModulePattern{Kind::kPath, "m.gate"}));
  const std::vector<std::pair<ModulePattern, int>> expected = {{{Kind::kPath, "lm_head"}, 8},
                                                               {{Kind::kRegex, ".*(?:.*a\\.b)"}, 2},
                                                               {{Kind::kRegex, ".*(?:.*b.*)"}, 3},
                                                               {{Kind::kRegex, ".*(?:x|y)"}, 16},
                                                               {{Kind::kEvery, ""}, 4}};
  ASSERT_EQ(got.rules.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(got.rules[i].targets[0], expected[i].first);
    EXPECT_EQ(*ReadInteger(got.rules[i].settings, "bits", 1, 16), expected[i].second);
  }
  EXPECT_EQ(*ReadGroupSize(got.rules[0].settings), 128);
  EXPECT_EQ(*ReadWord(got.rules[0].settings, "packing_format"), "auto_round:auto_gptq");
}

TEST(AutoRoundSettings, PathsOfTheSameSettingsShareARule) {
  Setting config = MakeConfig();
  config.members["extra_config"] =
      Object({{"a", Bits(8)}, {"b", Bits(2)}, {"c", Bits(8)}, {"d", Bits(4)}, {"e", Bits(16)}});
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->config.rules.size(), 4u);
  EXPECT_EQ(found->config.rules[0].targets.size(), 1u);
  EXPECT_EQ(*ReadInteger(found->config.rules[2].settings, "bits", 1, 8), 8);
  EXPECT_THAT(
      found->config.rules[2].targets,
      ::testing::ElementsAre(ModulePattern{Kind::kPath, "a"}, ModulePattern{Kind::kPath, "c"}));
}

TEST(AutoRoundSettings, Refusals) {
  struct Refused {
    std::string name;
    Setting value;
    absl::StatusCode code;
    std::string says;
  };
  const auto invalid = absl::StatusCode::kInvalidArgument;
  const auto unread = absl::StatusCode::kUnimplemented;
  for (const Refused& refused : {
           Refused{"data_type", Setting::String("mx_fp"), unread, "data_type: got \"mx_fp\""},
           {"act_bits", Setting::Literal(int64_t{8}), unread, "act_bits: got 8, expected 16"},
           {"packing_format", Setting::String("auto_round:llm_compressor"), unread, "FP4"},
           {"bits", Setting::Literal(int64_t{16}), unread, "bits: got 16"},
           {"bits", Setting{Setting::Kind::kNull}, invalid, "bits: got nothing"},
           {"group_size", Setting{Setting::Kind::kNull}, invalid, "group_size: got nothing"},
           {"extra_config", Setting::String("x"), invalid, "extra_config: got \"x\""},
           {"extra_config", Object({{"a", Setting::Literal(true)}}), invalid,
            "extra_config.\"a\": got true, expected an object"},
           {"extra_config", Object({{"a", Bits(1)}}), unread, "extra_config.\"a\".bits: got 1"},
           {"extra_config", Object({{"a", Object({{"data_type", Setting::String("nv_fp")}})}}),
            unread, "extra_config.\"a\".data_type: got \"nv_fp\""},
       }) {
    SCOPED_TRACE(refused.says);
    Setting config = MakeConfig();
    config.members[refused.name] = refused.value;
    const absl::Status status = testing::FirstReason(FindFormat(config));
    EXPECT_EQ(status.code(), refused.code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(refused.says));
  }
}

}  // namespace
}  // namespace awqd
