// AutoAWQ's settings of a checkpoint under every name, every refusal, and widths other than 4 bits.
#include <random>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/formats/format.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

Setting Config() {
  Setting out;
  out.members = {{"bits", Setting::Literal(int64_t{4})},
                 {"group_size", Setting::Literal(int64_t{128})}};
  return out;
}

TEST(AwqFormat, ReadsSettings) {
  Setting config = Config();
  config.members["version"] = Setting::String("GEMM");
  config.members["zero_point"] = Setting::Literal(true);
  Setting& modules = config.members["modules_to_not_convert"];
  modules.kind = Setting::Kind::kList;
  modules.list = {Setting::String("lm_head"), Setting::String("visual")};
  const auto read = kAwqFormat.read(config);
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->rules.size(), 1u);
  EXPECT_EQ(read->rules[0].targets, std::vector<ModulePattern>(1));
  EXPECT_EQ(read->rules[0].settings.members.at("group_size"), Setting::Literal(int64_t{128}));
  for (const auto& [name, value] : read->rules[0].settings.members) {
    EXPECT_THAT(kAwqFormat.settings, ::testing::Contains(absl::string_view(name)));
  }
  const ModulePattern visual = {ModulePattern::Kind::kContains, "visual"};
  EXPECT_THAT(read->left_out, ::testing::ElementsAre(::testing::_, visual));
}

TEST(AwqFormat, ReadsOldNames) {
  Setting config;
  config.members = {{"w_bit", Setting::Literal(int64_t{4})},
                    {"bits", Setting::Literal(int64_t{4})},
                    {"q_group_size", Setting::Literal(int64_t{-1})}};
  const auto read = kAwqFormat.read(config);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->rules[0].settings.members.at("group_size"), Setting::Literal(int64_t{-1}));
}

// Each version has its format, under every name that writers use.
TEST(AwqFormat, VersionsTellTheFormat) {
  struct Case {
    std::string name, value;
    const Format* format;
  };
  for (const Case& c : {Case{"version", "GEMM", &kAwqFormat},
                        {"format", "gemv", &kAwqGemvFormat},
                        {"version", "GEMV", &kAwqGemvFormat},
                        {"version", "gemv_fast", &kAwqGemvFastFormat},
                        {"checkpoint_format", "llm-awq", &kAwqGemvFastFormat},
                        {"backend", "llm-awq", &kAwqGemvFastFormat},
                        {"backend", "autoawq", &kAwqFormat},
                        {"version", "marlin", &kAwqMarlinFormat}}) {
    Setting config = Config();
    config.members["quant_method"] = Setting::String("awq");
    config.members[c.name] = Setting::String(c.value);
    const auto found = FindFormat(config);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->format, c.format) << c.name << " " << c.value;
    for (const auto& [name, value] : found->config.rules.at(0).settings.members) {
      EXPECT_THAT(found->format->settings, ::testing::Contains(absl::string_view(name)));
    }
  }
}

TEST(AwqFormat, VersionsThatContradict) {
  Setting config = Config();
  config.members["quant_method"] = Setting::String("awq");
  config.members["version"] = Setting::String("gemv");
  config.members["format"] = Setting::String("gemm");
  const absl::Status versions = FindFormat(config).status();
  EXPECT_EQ(versions.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(versions.message()),
              HasSubstr("format: got \"gemm\", expected version's \"gemv\""));
  config.members.erase("format");
  for (const std::string version : {"gemv", "gemv_fast", "marlin"}) {
    config.members["version"] = Setting::String(version);
    config.members["bits"] = Setting::Literal(int64_t{8});
    const absl::Status bits = FindFormat(config).status();
    EXPECT_EQ(bits.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(bits.message()), HasSubstr("bits: got 8, expected 4"));
    config.members["bits"] = Setting::Literal(int64_t{4});
  }
  config.members["zero_point"] = Setting::Literal(true);
  EXPECT_THAT(std::string(FindFormat(config).status().message()),
              HasSubstr("zero_point: got true, expected false: version marlin has no zero points"));
}

TEST(AwqFormat, RefusesSettings) {
  struct Bad {
    std::string name;
    Setting value;
    absl::StatusCode code;
    std::string says;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kOther = absl::StatusCode::kUnimplemented;
  const Setting null = {Setting::Kind::kNull};
  Setting list = {Setting::Kind::kList};
  list.list = {Setting::String("")};
  for (const Bad& bad : {
           Bad{"bits", null, kInvalid, "bits (or w_bit): got nothing"},
           Bad{"bits", Setting::Literal(int64_t{9}), kOther, "bits: got 9, expected 2 to 8"},
           Bad{"bits", Setting::Literal(int64_t{0}), kInvalid, "bits: got 0"},
           Bad{"w_bit", Setting::Literal(int64_t{8}), kInvalid,
               "bits: got 4, expected the same as w_bit"},
           Bad{"group_size", null, kInvalid, "group_size (or q_group_size): got nothing"},
           Bad{"group_size",
               {Setting::Kind::kLiteral, "9223372036854775808"},
               kInvalid,
               "group_size: got 9223372036854775808"},
           Bad{"version", Setting::String("gemv"), kOther, "version: got \"gemv\""},
           Bad{"backend", Setting::String("llm-awq"), kOther, "version: got \"llm-awq\""},
           Bad{"format", Setting::String("gemv"), kOther, "version: got \"gemv\""},
           Bad{"zero_point", Setting::Literal(int64_t{1}), kInvalid,
               "zero_point: got 1, expected true or false"},
           Bad{"modules_to_not_convert", Setting::String("lm_head"), kInvalid,
               "modules_to_not_convert: got \"lm_head\", expected null or a list"},
           Bad{"modules_to_not_convert", list, kInvalid, "strings that are not empty"},
       }) {
    Setting config = Config();
    config.members[bad.name] = bad.value;
    const auto read = kAwqFormat.read(config);
    EXPECT_EQ(read.status().code(), bad.code) << bad.says;
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(bad.says));
  }
}

// --- Widths ---

Linear MakeLinear(int bits, int64_t k, int64_t n, int64_t group_size) {
  Linear out = {.format = &kAwqFormat};
  const int64_t words = (n * bits + 31) / 32;
  out.Set("bits", bits);
  out.Set("group_size", group_size);
  out.Add("qweight", "I32", {k, words});
  out.Add("qzeros", "I32", {k / group_size, words});
  out.Add("scales", "BF16", {k / group_size, n});
  return out;
}

TEST(AwqFormat, WithoutZeroPointsTheyAreTheMiddle) {
  for (const int bits : {2, 4, 8}) {
    Linear linear = MakeLinear(bits, 64, 16, 32);
    linear.Set("zero_point", Setting::Literal(false));
    for (uint8_t& byte : linear.tensors["qzeros"].bytes) {
      byte = bits == 8 ? 0x80 : bits == 4 ? 0x88 : 0xaa;
    }
    for (int i = 0; i < 2; ++i) {
      const auto weight = linear.Decode();
      ASSERT_TRUE(weight.ok()) << weight.status();
      ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
      EXPECT_EQ(weight->scheme, Symmetric(bits, 32, DType::kBf16)) << bits;
      linear.tensors.erase("qzeros");
    }
  }
}

// Dense words of every other width, packed a bit at a time.
TEST(AwqFormat, OtherWidthsAreInNaturalOrder) {
  std::mt19937 random(11);
  for (int bits = 2; bits <= 8; ++bits) {
    if (bits == 4) continue;
    for (const int n : {32, 40, 7}) {
      Linear linear = MakeLinear(bits, 16, n, 8);
      const int words = (n * bits + 31) / 32;
      for (const std::string name : {"qweight", "qzeros"}) {
        for (uint8_t& byte : linear.tensors[name].bytes) byte = static_cast<uint8_t>(random());
      }
      const auto weight = linear.Decode();
      ASSERT_TRUE(weight.ok()) << weight.status();
      ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
      EXPECT_EQ(weight->scheme, Asymmetric(bits, 8, DType::kBf16));
      const auto code = [&](const std::string& name, int row, int col) {
        int out = 0;
        for (int bit = 0; bit < bits; ++bit) {
          const int at = row * words * 32 + col * bits + bit;
          out |= (linear.tensors[name].bytes[at / 8] >> (at % 8) & 1) << bit;
        }
        return out;
      };
      int wrong = 0;
      for (int row = 0; row < 16; ++row) {
        for (int col = 0; col < n; ++col) {
          wrong += weight->Code(row, col) != code("qweight", row, col);
          wrong += weight->Zero(row / 8, col) != code("qzeros", row / 8, col);
        }
      }
      EXPECT_EQ(wrong, 0) << bits << " " << n;
    }
  }
}

}  // namespace
}  // namespace awqd
