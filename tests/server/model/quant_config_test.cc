// Every spelling of quantisation settings, and every refusal.
#include "server/model/quant_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace awqd::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Config(absl::string_view inner) {
  return absl::StrCat("{\"quantization_config\":{\"quant_method\":\"awq\"", inner, "}}");
}
const char kNumbers[] = ",\"bits\":4,\"group_size\":128";

TEST(QuantConfigJson, AsTheHubHasIt) {
  const auto config = ParseConfigJson(
      Config(",\"bits\":4,\"group_size\":128,\"zero_point\":true,\"version\":\"GEMM\",\"backend\":"
             "\"autoawq\","
             "\"modules_to_not_convert\":[\"lm_head\",\"visual\"],\"exllama_config\":null"));
  ASSERT_TRUE(config.ok() && config->has_value()) << config.status();
  EXPECT_EQ((*config)->quant_method, "awq");
  EXPECT_EQ((*config)->version, "gemm");
  EXPECT_EQ((*config)->bits, 4);
  EXPECT_EQ((*config)->group_size, 128);
  EXPECT_TRUE((*config)->zero_point);
  EXPECT_THAT((*config)->modules_to_not_convert, ElementsAre("lm_head", "visual"));
  EXPECT_TRUE(IsNotConverted(**config, "model.visual.blocks.0.qkv"));
  EXPECT_FALSE(IsNotConverted(**config, "model.layers.0.mlp.up_proj"));
}

TEST(QuantConfigJson, LegacyNames) {
  const auto config = ParseQuantConfigJson(
      "{\"zero_point\":false,\"q_group_size\":-1,\"w_bit\":4,\"version\":\"GEMM\","
      "\"modules_to_not_convert\":null}",
      "awq");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->bits, 4);
  EXPECT_EQ(config->group_size, -1);
  EXPECT_FALSE(config->zero_point);
  EXPECT_TRUE(config->modules_to_not_convert.empty());
}

TEST(QuantConfigJson, BothNamesThatAgree) {
  EXPECT_TRUE(
      ParseConfigJson(Config(",\"bits\":4,\"w_bit\":4,\"group_size\":64,\"q_group_size\":64"))
          .ok());
}

TEST(QuantConfigJson, VersionUnderOtherNames) {
  const auto config = ParseConfigJson(Config(absl::StrCat(kNumbers, ",\"format\":\"gemm\"")));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ((*config)->version, "gemm");
}

TEST(QuantConfigJson, AbsentOrNullIsNothing) {
  for (const char* text : {"{}", "{\"quantization_config\":null}"}) {
    const auto config = ParseConfigJson(text);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_FALSE(config->has_value());
  }
}

TEST(QuantConfigJson, OtherMethodsAreNotJudgedByOurKeys) {
  const auto config = ParseConfigJson(
      "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"config_groups\":{}}}");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ((*config)->quant_method, "compressed-tensors");
}

TEST(QuantConfigJson, QuantizeConfigWithoutMethodTakesTheDefault) {
  const auto config =
      ParseQuantConfigJson("{\"bits\":4,\"group_size\":128,\"desc_act\":true}", "gptq");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->quant_method, "gptq");
}

struct Bad {
  std::string text;
  std::string says;
};

TEST(QuantConfigJson, Refusals) {
  std::string deep;
  for (int i = 0; i < 100; ++i) deep += "{\"a\":";
  for (const Bad& bad : {
           Bad{"", "not valid JSON"},
           Bad{"[]", "got a JSON array, expected an object"},
           Bad{"{\"a\":1,\"a\":2}", "duplicate key \"a\""},
           Bad{deep, "nested deeper than 32"},
           Bad{std::string(100000, '['), "nested deeper than 32"},
           Bad{std::string("{}\0{", 4), "NUL byte"},
           Bad{"{\"a\":\"\xc3\"}", "UTF-8"},
           Bad{"{\"a\":1e999}", "not valid JSON"},
           Bad{"{\"quantization_config\":[]}",
               "quantization_config: got \"[]\", expected an object"},
           Bad{"{\"quantization_config\":{}}", "quantization_config.quant_method: got nothing"},
           Bad{"{\"quantization_config\":{\"quant_method\":4}}",
               "quant_method: got \"4\", expected a string"},
           Bad{Config(""), "bits (or w_bit): got nothing"},
           Bad{Config(",\"bits\":4"), "group_size (or q_group_size): got nothing"},
           Bad{Config(",\"bits\":\"4\",\"group_size\":128"), "bits: got"},
           Bad{Config(",\"bits\":4.0,\"group_size\":128"),
               "bits: got \"4.0\", expected a whole number"},
           Bad{Config(",\"bits\":0,\"group_size\":128"), "bits: got \"0\""},
           Bad{Config(",\"bits\":18446744073709551620,\"group_size\":128"), "bits: got"},
           Bad{Config(",\"bits\":18446744073709551612,\"group_size\":128"), "bits: got"},
           Bad{Config(",\"bits\":4,\"w_bit\":8,\"group_size\":128"),
               "bits: got \"4\", expected the same as w_bit"},
           Bad{Config(",\"bits\":4,\"group_size\":0"), "group_size (or q_group_size): got 0"},
           Bad{Config(",\"bits\":4,\"group_size\":-2"), "group_size: got \"-2\""},
           Bad{Config(",\"bits\":4,\"group_size\":9223372036854775808"), "group_size: got"},
           Bad{Config(absl::StrCat(kNumbers, ",\"zero_point\":1")),
               "zero_point: got \"1\", expected true or false"},
           Bad{Config(absl::StrCat(kNumbers, ",\"version\":2")),
               "version: got \"2\", expected a string"},
           Bad{Config(absl::StrCat(kNumbers, ",\"version\":\"", std::string(65, 'v'), "\"")),
               "version: got \"\\\"vvv"},
           Bad{absl::StrCat("{\"quantization_config\":{\"quant_method\":\"",
                            std::string(3 << 20, 'q'), "\"}}"),
               "...\", expected at most 64 bytes"},
           Bad{Config(absl::StrCat(kNumbers, ",\"modules_to_not_convert\":\"lm_head\"")),
               "modules_to_not_convert: got"},
           Bad{Config(absl::StrCat(kNumbers, ",\"modules_to_not_convert\":[3]")),
               "strings that are not empty"},
           Bad{Config(absl::StrCat(kNumbers, ",\"modules_to_not_convert\":[\"\"]")),
               "strings that are not empty"},
       }) {
    const auto config = ParseConfigJson(bad.text);
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << bad.text.substr(0, 99);
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(bad.says))
        << bad.text.substr(0, 99);
  }
}

}  // namespace
}  // namespace awqd::model
