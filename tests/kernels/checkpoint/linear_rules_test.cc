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
  config.rules = {Rule({{Kind::kPath, "a.b"}, {Kind::kContains, "mlp.gate"}}, "one"),
                  Rule({{Kind::kRegex, ".*self_attn\\.(q|k|v)_proj$"}}, "two"),
                  Rule({{Kind::kRegex, "x"}}, "three")};
  config.left_out = {{Kind::kPath, "lm_head"}, {Kind::kContains, "visual."}};
  auto made = LinearRules::Make(config);
  ASSERT_TRUE(made.ok()) << made.status();
  const LinearRules rules = *std::move(made);
  EXPECT_EQ(MarkOf(rules, "a.b"), "one");
  EXPECT_EQ(MarkOf(rules, "a.b.c"), "one") << "beneath a path";
  EXPECT_EQ(MarkOf(rules, "a.bc"), "");
  EXPECT_EQ(MarkOf(rules, "model.language_model.a.b"), "one") << "of a wrapper";
  EXPECT_EQ(MarkOf(rules, "c.mlp.gate"), "one");
  EXPECT_EQ(MarkOf(rules, "c.mlp.gate.0"), "one");
  EXPECT_EQ(MarkOf(rules, "c.mlp.gate_proj"), "");
  EXPECT_EQ(MarkOf(rules, "c.old_mlp.gate"), "");
  EXPECT_EQ(MarkOf(rules, "m.0.self_attn.q_proj"), "two");
  EXPECT_EQ(MarkOf(rules, "m.0.self_attn.q_projection"), "");
  EXPECT_EQ(MarkOf(rules, "x.anything"), "three") << "the end need not match";
  EXPECT_EQ(MarkOf(rules, "a.x"), "") << "the beginning must";
  EXPECT_EQ(MarkOf(rules, "visual.gate"), "");
  EXPECT_EQ(MarkOf(rules, "lm_head"), "");
  EXPECT_EQ(MarkOf(rules, "model.visual.x"), "");
}

// The rules that match "a.b.c", by their marks and in order; "-" where it is left out.
std::vector<std::string> MarksOf(const QuantConfig& config, absl::string_view path) {
  std::vector<std::string> out;
  const auto keep = [&](const LinearRule* rule) {
    out.push_back(rule == nullptr ? "-" : rule->settings.members.at("mark").text);
    return true;
  };
  EXPECT_TRUE(LinearRules::Make(config)->VisitRules(path, keep).ok());
  return out;
}

TEST(LinearRules, EveryRuleThatMatchesIsVisitedOnceAndInOrder) {
  QuantConfig config;
  config.rules = {Rule({{Kind::kPath, "a"}}, "all of a"),
                  Rule({{Kind::kRegex, ".*c$"}, {Kind::kContains, "b.c"}}, "c"),
                  Rule({{Kind::kPath, "a.b"}}, "all of a.b"), Rule({{}}, "every"),
                  Rule({{Kind::kRegex, "a\\.b"}, {Kind::kRegex, "a.[a-c]"}}, "a.b and on")};
  config.left_out = {{Kind::kPath, "a.b"}};
  EXPECT_THAT(MarksOf(config, "a.b.c"),
              ::testing::ElementsAre("-", "c", "all of a.b", "every", "a.b and on"))
      << "of paths the deepest counts";
  EXPECT_THAT(MarksOf(config, "a.x"), ::testing::ElementsAre("all of a", "every"));
}

// 2,270 expressions without operators and 36,000 linears, as a quantised mixture of experts has.
TEST(LinearRules, AdditionsHaveListsOfTheirOwn) {
  QuantConfig config;
  config.left_out = {{Kind::kEvery, ""}};
  config.additions = {{Rule({{Kind::kRegex, ".*c$"}}, "c"), {{Kind::kPath, "a.b"}}},
                      {Rule({{Kind::kPath, "a.b.c"}, {Kind::kEvery, ""}}, "all"), {}}};
  const auto marks = [&](absl::string_view path) {
    const auto rules = LinearRules::Make(config);
    std::string out;
    const auto additions = rules->FindAdditions(path);
    for (const LinearRule* rule : additions.value()) {
      const auto mark = rule->settings.members.find("mark");
      absl::StrAppend(
          &out, mark == rule->settings.members.end() ? rule->unread.ToString() : mark->second.text,
          " ");
    }
    return out;
  };
  EXPECT_EQ(marks("x.c"), "c all ");
  EXPECT_EQ(marks("a.b"), "all ");
  EXPECT_EQ(marks("x"), "all ");
  config.additions[0].rule.targets = {{Kind::kRegex, "(?!x)"}};
  EXPECT_THAT(marks("x"), HasSubstr("UNIMPLEMENTED: pattern of modules: got \"(?!x)\""));
}

TEST(LinearRules, ThousandsOfPathsAsExpressionsTakeNoTime) {
  QuantConfig config;
  for (int i = 0; i < 40'000; ++i) {
    config.left_out.push_back(
        {Kind::kRegex, absl::StrCat("^model\\.layers\\.", i, "\\.mlp\\.experts\\.7\\.up_proj$")});
  }
  config.rules = {Rule({{}}, "all")};
  const auto rules = LinearRules::Make(config);
  ASSERT_TRUE(rules.ok()) << rules.status();
  for (int i = 0; i < 40'000; ++i) {
    const std::string layer = absl::StrCat("model.layers.", i, ".mlp.experts.7.");
    ASSERT_EQ(MarkOf(*rules, layer + "up_proj"), "") << i;
    ASSERT_EQ(MarkOf(*rules, layer + "up_proj2"), "all") << i;
  }
}

TEST(LinearRules, EveryLinear) {
  QuantConfig config;
  config.rules = {Rule({{}}, "all")};
  EXPECT_EQ(MarkOf(*LinearRules::Make(config), "anything"), "all");
  EXPECT_EQ(*LinearRules::Make({})->RuleOf("anything"), nullptr);
}

TEST(LinearRules, BadExpressionsMatchNothingAndAreNoted) {
  for (const auto& [text, says] : {std::pair<std::string, std::string>{"(", "missing"},
                                   {"a(?!b)", "expected a regular expression of RE2"},
                                   {std::string(1025, 'a') + "+", "got 1026 bytes"},
                                   {"(((a{100}){100}){100})", "pattern of modules"}}) {
    QuantConfig config;
    config.rules = {Rule({{Kind::kRegex, text}, {Kind::kPath, "a"}}, "one")};
    config.left_out = {{Kind::kRegex, text}};
    const auto rules = LinearRules::Make(config);
    ASSERT_TRUE(rules.ok()) << rules.status();
    EXPECT_THAT(rules->note(), ::testing::AllOf(HasSubstr(says), HasSubstr(" and 1 more")));
    EXPECT_EQ(MarkOf(*rules, "a"), "one");
    EXPECT_EQ(MarkOf(*rules, std::string(1025, 'a')), "");
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
  EXPECT_EQ(refusal("layers\\.[7]", 5000), "");
  EXPECT_THAT(refusal("a?", 5001), HasSubstr("got more than 10000 regular expressions, the limit"));
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
