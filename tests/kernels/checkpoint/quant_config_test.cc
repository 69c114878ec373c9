// From the JSON of a checkpoint to settings, and every refusal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/checkpoint/quant_settings.h"

namespace awqd::model {
namespace {

using ::testing::HasSubstr;

TEST(QuantConfigJson, EveryKindOfValue) {
  const auto config = ParseConfigJson(
      "{\"quantization_config\":{\"bits\":4,\"deep\":{\"list\":[\"a\",true,null,-1]},"
      "\"real\":4.0,\"large\":18446744073709551615,\"text\":\"4\",\"none\":null}}");
  ASSERT_TRUE(config.ok() && config->has_value()) << config.status();
  const Setting& all = (*config)->settings;
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
  const Setting& all = (*config)->settings;
  EXPECT_EQ(names(all), "zy");
  EXPECT_EQ(names(all.members.at("z")), "cab");
  EXPECT_EQ(names(all.members.at("z").members.at("a")), "qp");
  EXPECT_EQ(names(all.members.at("y").list[0]), "lk");
  const auto side = ParseQuantConfigJson("{\"b\":{\"d\":1,\"c\":2},\"a\":1}", "gptq");
  ASSERT_TRUE(side.ok()) << side.status();
  EXPECT_EQ(names(side->members.at("b")), "dc");
}

// As Python's json module writes an infinite or missing number.
TEST(QuantConfigJson, NumbersOfPython) {
  const auto config = ParseConfigJson(
      R"({"limit":[0.0,Infinity,-Infinity,NaN],"a NaN: \"":"Infinity \"NaN",)"
      R"("quantization_config":{"bits":4,"group_size":-Infinity,"x":[NaN,"NaN"]}})");
  ASSERT_TRUE(config.ok() && config->has_value()) << config.status();
  const Setting& all = (*config)->settings;
  EXPECT_EQ(*ReadInteger(all, "bits", 1, 8), 4);
  EXPECT_THAT(std::string(ReadGroupSize(all).status().message()),
              HasSubstr("group_size: got \"-Infinity\""));
  EXPECT_EQ(all.members.at("x").list[0], Setting::String("NaN"));
  for (const char* text : {"{\"a\":Nan}", "{\"a\":+Infinity}", "{\"a\":InfinityNaN}",
                           "{\"a\":--Infinity}", "{NaN:1,\"NaN\":2}"}) {
    EXPECT_FALSE(ParseConfigJson(text).ok()) << text;
  }
}

TEST(QuantConfigJson, SettingsOfAPart) {
  struct Place {
    const char* text;
    const char* place;
  };
  for (const Place& one : {
           Place{R"({"a":{"b":[{}]},"text_config":{"n":{},"quantization_config":{"z":1,"y":{}}}})",
                 "text_config.quantization_config"},
           Place{R"({"thinker_config":{"audio_config":{"quantization_config":{"q":1}},
                     "text_config":{"quantization_config":{"z":1,"y":{}}}}})",
                 "thinker_config.text_config.quantization_config"},
           Place{R"({"llm_config":{"quantization_config":{"z":1,"y":{}}},"quantization_config":null,
                     "text_config":3})",
                 "llm_config.quantization_config"},
           Place{R"({"text_config":{"quantization_config":{"q":1}},
                     "quantization_config":{"z":1,"y":{}}})",
                 "quantization_config"},
           Place{R"({"compression_config":{"z":1,"y":{}}})", "compression_config"},
       }) {
    const auto config = ParseConfigJson(one.text);
    ASSERT_TRUE(config.ok() && config->has_value()) << config.status() << one.text;
    EXPECT_EQ((*config)->place, one.place);
    const auto members = MembersInOrder((*config)->settings);
    ASSERT_EQ(members.size(), 2u) << one.text;
    EXPECT_EQ(members[0].first, "z");
    const bool old = (*config)->place == "compression_config";
    EXPECT_EQ(*ReadWord((*config)->settings, "quant_method"), old ? "compressed-tensors" : "");
  }
}

// MLX's own loader prefers them too. Other programs have something else under that name.
TEST(QuantConfigJson, SettingsOfMlxComeFirst) {
  constexpr absl::string_view kBase = R"("quantization_config":{"quant_method":"fp8"}})";
  for (const auto& [text, place] :
       {std::pair(R"({"quantization":{"group_size":64,"bits":4},)", "quantization"),
        std::pair(R"({"quantization":{"quant_algo":"FP8"},)", "quantization_config"),
        std::pair(R"({"quantization":"awq",)", "quantization_config")}) {
    const auto config = ParseConfigJson(absl::StrCat(text, kBase));
    ASSERT_TRUE(config.ok() && config->has_value()) << config.status() << text;
    EXPECT_EQ((*config)->place, place);
  }
  const auto nothing = ParseConfigJson(R"({"quantization":{"bits":4}})");
  ASSERT_TRUE(nothing.ok()) << nothing.status();
  EXPECT_FALSE(nothing->has_value());
}

// One entry for each expert, in one object.
TEST(QuantConfigJson, AHundredThousandEntries) {
  std::string text = "{\"quantization\":{\"quantized_layers\":{\"a\":{\"quant_algo\":\"FP8\"}";
  for (int i = 0; i < 250'000; ++i) {
    absl::StrAppend(&text, ",\"layers.experts.", i, ".up_proj\":{\"quant_algo\":\"NVFP4\"}");
  }
  const auto config = ParseQuantConfigJson(text + "}}}", "modelopt");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->members.at("quantization").members.at("quantized_layers").keys.size(),
            250'001u);
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
  for (int i = 0; i < 1'000'000; ++i) many += ",0";
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
           Bad{many, "got more than 1000000 values"},
       }) {
    const auto config = ParseConfigJson(bad.text);
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << bad.text.substr(0, 99);
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(bad.says))
        << bad.text.substr(0, 99);
  }
}

}  // namespace
}  // namespace awqd::model
