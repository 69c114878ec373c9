// JSON and rules without memory: whichever allocation fails, std::bad_alloc is thrown, and partial
// objects can be destroyed.
#include <new>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/checkpoint/containers/json.h"
#include "kernels/checkpoint/linear_rules.h"
#include "tests/testing/failing_new.h"

namespace awqd::model {
namespace {

// Three levels, with more keys than fit a set before it grows.
std::string Document() {
  std::string out = "{";
  for (int i = 0; i < 40; ++i) {
    absl::StrAppend(&out, i > 0 ? "," : "", "\"a tensor with a long name, number ", i,
                    "\":{\"shape\":[1,2],\"inner\":{\"dtype\":\"a text that is not short\"}}");
  }
  return out + "}";
}

// Calls `body` again and again, each time with a later allocation that fails, until none does.
// Returns the number of failures.
template <typename F>
int FailEach(F body) {
  for (int failures = 0; failures < 100'000; ++failures) {
    try {
      const awqd::testing::FailingNew failing(failures + 1);
      body();
      if (!failing.failed()) return failures;
    } catch (const std::bad_alloc&) {
    }
  }
  ADD_FAILURE() << "it never succeeds";
  return 0;
}

TEST(JsonMemoryTest, EventsEndWithAnException) {
  const std::string text = Document();
  const int failures = FailEach([&] {
    JsonEvents events(8);
    EXPECT_TRUE(ParseJson(text, &events).ok());
  });
  EXPECT_GT(failures, 100);
}

TEST(JsonMemoryTest, ADocumentEndsWithAnException) {
  const std::string text = Document();
  absl::StatusOr<nlohmann::json> out;  // its destructor needs memory
  KeysInOrder keys;
  const int failures = FailEach([&] {
    keys.clear();
    out = ParseJsonObject(text, 8, &keys);
  });
  EXPECT_GT(failures, 200);
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_EQ(out->size(), 40u);
}

TEST(JsonMemoryTest, RulesEndWithAnException) {
  QuantConfig config;
  for (int i = 0; i < 30; ++i) {
    config.left_out.push_back(
        {ModulePattern::Kind::kPath, absl::StrCat("model.layers.", i, ".mlp.gate_projection")});
  }
  config.rules.push_back({});
  const int failures = FailEach([&] {
    const auto rules = LinearRules::Make(config);
    EXPECT_TRUE(rules.ok() && *rules->RuleOf("model.layers.3.mlp.gate_projection") == nullptr);
  });
  EXPECT_GT(failures, 30);
}

}  // namespace
}  // namespace awqd::model
