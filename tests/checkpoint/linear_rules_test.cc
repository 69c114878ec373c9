// Which linears a checkpoint's settings choose.
#include "checkpoint/linear_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace awqd::model {
namespace {

using ::testing::HasSubstr;
using Kind = ModulePattern::Kind;

LinearRule Rule(std::vector<ModulePattern> targets, const std::string& mark) {
  LinearRule out = {.targets = std::move(targets)};
  out.settings.members["mark"] = Setting::String(mark);
  return out;
}

std::string MarkOf(const LinearRules& rules, absl::string_view path) {
  const LinearRule* rule = rules.RuleOf(path);
  return rule == nullptr ? "" : rule->settings.members.at("mark").text;
}

TEST(LinearRules, TheFirstThatMatchesUnlessLeftOut) {
  QuantConfig config;
  config.rules = {Rule({{Kind::kExact, "a.b"}, {Kind::kContains, "gate"}}, "one"),
                  Rule({{Kind::kRegex, ".*self_attn\\.(q|k|v)_proj$"}}, "two"),
                  Rule({{Kind::kRegex, "x"}}, "three")};
  config.left_out = {{Kind::kExact, "lm_head"}, {Kind::kContains, "visual"}};
  auto made = LinearRules::Make(config);
  ASSERT_TRUE(made.ok()) << made.status();
  const LinearRules rules = *std::move(made);
  EXPECT_EQ(MarkOf(rules, "a.b"), "one");
  EXPECT_EQ(MarkOf(rules, "a.b.c"), "");
  EXPECT_EQ(MarkOf(rules, "x.mlp.gate_proj"), "one");
  EXPECT_EQ(MarkOf(rules, "m.0.self_attn.q_proj"), "two");
  EXPECT_EQ(MarkOf(rules, "m.0.self_attn.q_projection"), "");
  EXPECT_EQ(MarkOf(rules, "x.anything"), "three") << "the end need not match";
  EXPECT_EQ(MarkOf(rules, "a.x"), "") << "the beginning must";
  EXPECT_EQ(MarkOf(rules, "visual.gate"), "");
  EXPECT_EQ(MarkOf(rules, "lm_head"), "");
}

TEST(LinearRules, EveryLinear) {
  QuantConfig config;
  config.rules = {Rule({{}}, "all")};
  EXPECT_EQ(MarkOf(*LinearRules::Make(config), "anything"), "all");
  EXPECT_EQ(LinearRules::Make({})->RuleOf("anything"), nullptr);
}

TEST(LinearRules, RefusesBadExpressions) {
  for (const auto& [text, says] : {std::pair<std::string, std::string>{"(", "missing"},
                                   {"a(?!b)", "expected a regular expression of RE2"},
                                   {std::string(1025, 'a'), "got 1025 bytes"},
                                   {"(((a{100}){100}){100})", "pattern of modules"}}) {
    QuantConfig config;
    config.left_out = {{Kind::kRegex, text}};
    const absl::Status status = LinearRules::Make(config).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text.substr(0, 40);
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
    config = {};
    config.rules = {Rule({{Kind::kRegex, text}}, "one")};
    EXPECT_FALSE(LinearRules::Make(config).ok());
  }
}

TEST(LinearRules, HostileExpressionsTakeLinearTime) {
  QuantConfig config;
  config.rules = {Rule({{Kind::kRegex, "(a*)*b"}}, "one")};
  EXPECT_EQ(MarkOf(*LinearRules::Make(config), std::string(100'000, 'a')), "");
}

}  // namespace
}  // namespace awqd::model
