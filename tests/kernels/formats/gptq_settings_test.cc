// GPTQ's settings as rules of linears, and settings that are left to other formats.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/formats/format.h"
#include "tests/testing/reasons.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;
using Kind = ModulePattern::Kind;

const Setting kYes = Setting::Literal(true), kNo = Setting::Literal(false);

Setting MakeConfig() {
  Setting out;
  out.members = {{"quant_method", Setting::String("gptq")},
                 {"bits", Setting::Literal(int64_t{4})},
                 {"group_size", Setting::Literal(int64_t{128})},
                 {"desc_act", kNo},
                 {"sym", kYes}};
  return out;
}

Setting Object(std::map<std::string, Setting, std::less<>> members) {
  Setting out;
  out.members = std::move(members);
  return out;
}

TEST(GptqSettings, OneRuleWithoutOverrides) {
  Setting config = MakeConfig();
  config.members["damp_percent"] = Setting{Setting::Kind::kLiteral, "0.01"};
  config.members["lm_head"] = kYes;
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format->name, "gptq");
  ASSERT_EQ(found->config.rules.size(), 1u);
  EXPECT_EQ(found->config.rules[0].targets[0].kind, Kind::kEvery);
  const Setting expected = Object({{"bits", Setting::Literal(int64_t{4})},
                                   {"group_size", Setting::Literal(int64_t{128})},
                                   {"desc_act", kNo},
                                   {"sym", kYes},
                                   {"checkpoint_format", Setting::String("gptq")}});
  EXPECT_EQ(found->config.rules[0].settings, expected);
}

TEST(GptqSettings, FormatIsAnotherNameOfCheckpointFormat) {
  Setting config = MakeConfig();
  config.members["format"] = Setting::String("GPTQ_v2");
  auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*ReadWord(found->config.rules[0].settings, "checkpoint_format"), "gptq_v2");
  config.members["checkpoint_format"] = Setting::String("gptq");
  EXPECT_EQ(FindFormat(config).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(FindFormat(config).status().message()),
              HasSubstr("format: got \"gptq_v2\", expected checkpoint_format's \"gptq\""));
}

TEST(GptqSettings, DynamicInTheOrderOfTheFile) {
  Setting config = MakeConfig();
  Setting& dynamic = config.members["dynamic"];
  dynamic = Object({{"+:.*up", Object({{"bits", Setting::Literal(int64_t{8})}})},
                    {"-:.*gate$", Object({})},
                    {"m\\.1\\.up", Object({{"group_size", Setting::Literal(int64_t{32})},
                                           {"sym", kNo},
                                           {"desc_act", kYes},
                                           {"damp_percent", Setting::Literal(int64_t{1})}})}});
  dynamic.keys = {"m\\.1\\.up", "+:.*up", "-:.*gate$"};
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  const QuantConfig& got = found->config;
  EXPECT_THAT(got.left_out, ::testing::ElementsAre(ModulePattern{Kind::kRegex, ".*gate$"}));
  ASSERT_EQ(got.rules.size(), 3u);
  EXPECT_EQ(got.rules[0].targets[0], (ModulePattern{Kind::kRegex, "m\\.1\\.up"}));
  EXPECT_EQ(*ReadGroupSize(got.rules[0].settings), 32);
  EXPECT_EQ(*ReadInteger(got.rules[0].settings, "bits", 1, 8), 4);
  EXPECT_EQ(*ReadBool(got.rules[0].settings, "sym"), false);
  EXPECT_EQ(*ReadBool(got.rules[0].settings, "desc_act"), true);
  EXPECT_EQ(FindSetting(got.rules[0].settings, "damp_percent"), nullptr);
  EXPECT_EQ(got.rules[1].targets[0], (ModulePattern{Kind::kRegex, ".*up"}));
  EXPECT_EQ(*ReadInteger(got.rules[1].settings, "bits", 1, 8), 8);
  EXPECT_EQ(got.rules[2].targets[0].kind, Kind::kEvery);
}

struct Refused {
  std::string name;
  Setting value;
  absl::StatusCode code;
  std::string says;
};

TEST(GptqSettings, Refusals) {
  const auto invalid = absl::StatusCode::kInvalidArgument;
  const auto unread = absl::StatusCode::kUnimplemented;
  const Setting none = {Setting::Kind::kNull};
  for (const Refused& refused : {
           Refused{"checkpoint_format", Setting::String("bitblas"), unread, "got \"bitblas\""},
           {"bits", Setting::Literal(int64_t{6}), unread, "bits: got 6, expected 2, 3, 4 or 8"},
           {"pack_dtype", Setting::String("int16"), unread, "pack_dtype: got \"int16\""},
           {"bits", none, invalid, "bits: got nothing"},
           {"bits", Setting::String("four"), invalid, "bits: got \"four\""},
           {"group_size", none, invalid, "group_size: got nothing"},
           {"group_size", Setting::Literal(int64_t{0}), invalid, "group_size: got 0"},
           {"sym", Setting::String("yes"), invalid, "sym: got \"yes\", expected true or false"},
           {"dynamic", kYes, invalid, "dynamic: got true, expected null or an object"},
           {"dynamic", Object({{"a\n", kNo}}), invalid, "dynamic.\"a\\n\": got false"},
           {"dynamic", Object({{"+:a", Object({{"bits", Setting::Literal(int64_t{5})}})}}), unread,
            "dynamic.\"+:a\".bits: got 5"},
           {"modules_to_not_convert", kYes, invalid, "modules_to_not_convert: got true"},
       }) {
    SCOPED_TRACE(refused.name + " " + refused.says);
    Setting config = MakeConfig();
    config.members[refused.name] = refused.value;
    const absl::Status status = testing::FirstReason(FindFormat(config));
    EXPECT_EQ(status.code(), refused.code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(refused.says));
  }
}

}  // namespace
}  // namespace awqd
