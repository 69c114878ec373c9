// From the JSON of a checkpoint to settings, and every refusal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/checkpoint/checkpoint_files.h"

namespace awqd::model {
namespace {

using ::testing::HasSubstr;

TEST(QuantConfigJson, EveryKindOfValue) {
  const auto config = ParseConfigJson(
      "{\"quantization_config\":{\"bits\":4,\"deep\":{\"list\":[\"a\",true,null,-1]},"
      "\"real\":4.0,\"large\":18446744073709551615,\"text\":\"4\",\"none\":null}}");
  ASSERT_TRUE(config.ok() && config->has_value()) << config.status();
  const Setting& all = **config;
  EXPECT_EQ(*FindSetting(all, "bits"), Setting::Literal(int64_t{4}));
  EXPECT_EQ(FindSetting(all, "text")->kind, Setting::Kind::kString);
  EXPECT_EQ(FindSetting(all, "real")->text, "4.0");
  EXPECT_EQ(FindSetting(all, "large")->text, "18446744073709551615");
  EXPECT_EQ(FindSetting(all, "none"), nullptr);
  const Setting* list = FindSetting(*FindSetting(all, "deep"), "list");
  ASSERT_EQ(list->list.size(), 4u);
  EXPECT_EQ(list->list[0], Setting::String("a"));
  EXPECT_EQ(list->list[1], Setting::Literal(true));
  EXPECT_EQ(list->list[3], Setting::Literal(int64_t{-1}));
}

TEST(QuantConfigJson, NumbersAreNotRoundedIntoRange) {
  const auto config = ParseQuantConfigJson(
      "{\"a\":4.0,\"b\":18446744073709551620,\"c\":\"4\",\"d\":1e3,\"e\":7}", "awq");
  ASSERT_TRUE(config.ok()) << config.status();
  for (const char* name : {"a", "b", "c", "d"}) {
    EXPECT_FALSE(ReadInteger(*config, name, 0, 9).ok()) << name;
  }
  EXPECT_EQ(*ReadInteger(*config, "e", 0, 9), 7);
  EXPECT_FALSE(ReadInteger(*config, "e", 0, 6).ok());
}

// The first matching rule counts, so rules must not be sorted by name.
TEST(QuantConfigJson, MembersKeepTheirOrder) {
  const auto config = ParseConfigJson(
      "{\"a\":{\"x\":[{\"y\":1},{}]},\"quantization_config\":{\"z\":{\"c\":1,\"a\":{\"q\":1,\"p\":"
      "2},"
      "\"n\":null,\"b\":3},\"y\":[{\"l\":1,\"k\":2}]},\"b\":{}}");
  ASSERT_TRUE(config.ok() && config->has_value()) << config.status();
  const auto names = [](const Setting& object) {
    std::string out;
    for (const auto& [name, value] : MembersInOrder(object)) absl::StrAppend(&out, name);
    return out;
  };
  const Setting& all = **config;
  EXPECT_EQ(names(all), "zy");
  EXPECT_EQ(names(all.members.at("z")), "cab");
  EXPECT_EQ(names(all.members.at("z").members.at("a")), "qp");
  EXPECT_EQ(names(all.members.at("y").list[0]), "lk");
  const auto side = ParseQuantConfigJson("{\"b\":{\"d\":1,\"c\":2},\"a\":1}", "gptq");
  ASSERT_TRUE(side.ok()) << side.status();
  EXPECT_EQ(names(side->members.at("b")), "dc");
}

TEST(QuantConfigJson, AbsentOrNullIsNothing) {
  for (const char* text : {"{}", "{\"quantization_config\":null}"}) {
    const auto config = ParseConfigJson(text);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_FALSE(config->has_value());
  }
}

TEST(QuantConfigJson, SideFileWithoutMethodTakesTheDefault) {
  for (const char* method : {"", "\"quant_method\":null,", "\"quant_method\":\"gptq\","}) {
    const auto config = ParseQuantConfigJson(absl::StrCat("{", method, "\"bits\":4}"), "gptq");
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(*ReadWord(*config, "quant_method"), "gptq");
    EXPECT_EQ(*ReadInteger(*config, "bits", 1, 8), 4);
  }
}

struct Bad {
  std::string text;
  std::string says;
};

TEST(QuantConfigJson, Refusals) {
  std::string deep, many = "{\"quantization_config\":{\"a\":[0";
  for (int i = 0; i < 100; ++i) deep += "{\"a\":";
  for (int i = 0; i < 200'000; ++i) many += ",0";
  many += "]}}";
  for (const Bad& bad : {
           Bad{"", "not valid JSON"},
           Bad{"[]", "got a JSON array, expected an object"},
           Bad{"{\"a\":1,\"a\":2}", "duplicate key \"a\""},
           Bad{deep, "nested deeper than 32"},
           Bad{std::string(100000, '['), "nested deeper than 32"},
           Bad{std::string("{}\0{", 4), "NUL byte"},
           Bad{"{\"a\":\"\xc3\"}", "UTF-8"},
           Bad{"{\"a\":1e999}", "not valid JSON"},
           Bad{"{\"quantization_config\":[]}", "quantization_config: got \"array\""},
           Bad{many, "got more than 200000 values"},
       }) {
    const auto config = ParseConfigJson(bad.text);
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << bad.text.substr(0, 99);
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(bad.says))
        << bad.text.substr(0, 99);
  }
}

}  // namespace
}  // namespace awqd::model
