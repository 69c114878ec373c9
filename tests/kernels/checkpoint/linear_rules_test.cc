// The linears that a checkpoint's settings choose.
#include "kernels/checkpoint/linear_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <re2/re2.h>

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

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
  const auto rule = rules.RuleOf(path);
  EXPECT_TRUE(rule.ok()) << rule.status();
  return !rule.ok() || *rule == nullptr ? "" : (*rule)->settings.members.at("mark").text;
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
  EXPECT_EQ(*LinearRules::Make({})->RuleOf("anything"), nullptr);
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

// Hundreds of expressions in several automata choose what each of them alone would choose.
TEST(LinearRules, ManyExpressionsAsOneByOne) {
  QuantConfig config;
  std::vector<std::pair<std::unique_ptr<RE2>, int>> all;  // and the rule; -1: excluded
  const auto add = [&](const std::string& text, int rule) {
    std::vector<ModulePattern>& to =
        rule < 0 ? config.left_out : config.rules.at(static_cast<size_t>(rule)).targets;
    to.push_back({Kind::kRegex, text});
    all.emplace_back(std::make_unique<RE2>(text), rule);
  };
  for (int i = 0; i < 60; ++i) add(absl::StrCat("model\\.layers\\.", i, "\\.mlp\\.gate$"), -1);
  add("^lm_head", -1);
  for (int rule = 0; rule < 40; ++rule) {
    config.rules.push_back(Rule({}, absl::StrCat(rule)));
    for (int i = 0; i < 20; ++i) {
      add(absl::StrCat("(?i).*LAYERS\\.", (7 * rule + i) % 64, "\\.(self_attn|mlp)\\.[a-",
                       std::string(1, static_cast<char>('f' + i)), "]+_proj\\b"),
          rule);
      add(absl::StrCat("model.layers.[", i % 6, "-6]", rule % 10, ".*\\Q.", i, ".up"), rule);
    }
  }
  const auto made = LinearRules::Make(config);
  ASSERT_TRUE(made.ok()) << made.status();
  std::set<std::string> chosen;
  for (int layer = 0; layer < 70; ++layer) {
    for (const std::string module :
         {"mlp.gate", "mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj", "self_attn.o_proj",
          "mlp.experts.3.up", "mlp.experts.19.up_proj", "norm"}) {
      for (const std::string root : {"model.layers.", "Layers.", "x.layers."}) {
        const std::string path = absl::StrCat(root, layer, ".", module);
        int expected = static_cast<int>(config.rules.size());
        for (const auto& [one, rule] : all) {
          if (rule >= expected) continue;
          if (one->Match(path, 0, path.size(), RE2::ANCHOR_START, nullptr, 0)) expected = rule;
        }
        const bool none = expected < 0 || expected == static_cast<int>(config.rules.size());
        EXPECT_EQ(MarkOf(*made, path), none ? "" : absl::StrCat(expected)) << path;
        chosen.insert(MarkOf(*made, path));
      }
    }
  }
  EXPECT_GT(chosen.size(), 10u);
}

TEST(LinearRules, ExpressionsOfAllListsTogetherAreBounded) {
  const auto refusal = [](const std::string& text, int in_each) {
    QuantConfig config;
    config.rules = {Rule({}, "one")};
    for (int i = 0; i < in_each; ++i) {
      config.left_out.push_back({Kind::kRegex, text});
      config.rules[0].targets.push_back({Kind::kRegex, text});
    }
    const absl::Status status = LinearRules::Make(config).status();
    EXPECT_TRUE(status.ok() || absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(refusal("layers\\.7", 5000), "");
  EXPECT_THAT(refusal("a", 5001), HasSubstr("got more than 10000 regular expressions, the limit"));
  EXPECT_EQ(refusal("a{1000}", 100), "");
  EXPECT_THAT(refusal("a{1000}", 300), HasSubstr("instructions of RE2, the limit"));
}

TEST(LinearRules, IsCancelled) {
  QuantConfig config;
  config.rules = {Rule({{Kind::kRegex, "a"}}, "one")};
  config.left_out = {{Kind::kContains, "b"}};
  const std::atomic<bool> running = false, cancelled = true;
  const auto rules = LinearRules::Make(config, &running);
  ASSERT_TRUE(rules.ok()) << rules.status();
  EXPECT_TRUE(rules->RuleOf("a", &running).ok());
  EXPECT_TRUE(absl::IsUnavailable(rules->RuleOf("a", &cancelled).status()));
  EXPECT_TRUE(absl::IsUnavailable(LinearRules::Make(config, &cancelled).status()));
}

TEST(LinearRules, HostileExpressionsTakeLinearTime) {
  QuantConfig config;
  config.rules = {Rule({{Kind::kRegex, "(a*)*b"}}, "one")};
  EXPECT_EQ(MarkOf(*LinearRules::Make(config), std::string(100'000, 'a')), "");
}

}  // namespace
}  // namespace awqd::model
