// FindFormat: the table as a whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "kernels/formats/format.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

Setting Method(const std::string& method) {
  Setting out;
  out.members["quant_method"] = Setting::String(method);
  return out;
}

TEST(Formats, EveryRowIsComplete) {
  std::set<absl::string_view> names;
  ASSERT_FALSE(AllFormats().empty());
  for (const Format* format : AllFormats()) {
    SCOPED_TRACE(std::string(format->name));
    EXPECT_TRUE(names.insert(format->name).second) << "is there twice";
    EXPECT_EQ(FormatNamed(format->name), format);
    EXPECT_FALSE(format->quant_method.empty());
    EXPECT_NE(format->read, nullptr);
    EXPECT_NE(format->decode_parts, nullptr);
    ASSERT_FALSE(format->suffixes.empty());
    for (absl::string_view optional : format->optional_suffixes) {
      EXPECT_THAT(format->suffixes, ::testing::Contains(optional));
      EXPECT_NE(optional, format->suffixes.front());
    }
  }
  EXPECT_EQ(FormatNamed("no such format"), nullptr);
}

// Every format names the missing tensor, and the code is the client's fault.
TEST(Formats, NothingIsRefusedByEach) {
  for (const Format* format : AllFormats()) {
    SCOPED_TRACE(std::string(format->name));
    const absl::Status status = format->Decode({}, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(": got nothing, expected "));
  }
}

TEST(Formats, FindsAwq) {
  Setting config = Method("AWQ");
  config.members["bits"] = Setting::Literal(int64_t{4});
  config.members["group_size"] = Setting::Literal(int64_t{128});
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format->name, "awq");
  EXPECT_EQ(found->quant_method, "awq");
}

TEST(Formats, SaysWhatWasFoundAndWhatEachFormatOfTheMethodMissed) {
  const auto other = FindFormat(Method("no-such-method"));
  EXPECT_EQ(other.status().code(), absl::StatusCode::kUnimplemented);
  const std::string message(other.status().message());
  EXPECT_THAT(message, HasSubstr("got quant_method \"no-such-method\", which is not read"));
  for (const Format* tried : AllFormats()) {
    EXPECT_THAT(message, HasSubstr(std::string(tried->quant_method)));
  }
  Setting config = Method("awq");
  config.members["version"] = Setting::String("ipex");
  const auto version = FindFormat(config);
  EXPECT_EQ(version.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(
      std::string(version.status().message()),
      ::testing::AllOf(::testing::StartsWith("awq: version: got \"ipex\""),
                       HasSubstr("awq-gemv: version: "), ::testing::Not(HasSubstr("gptq"))));
}

// The format that the settings name comes first, whatever it missed.
TEST(Formats, TheNearestFormatsReasonComesFirst) {
  Setting config = Method("awq");
  config.members["version"] = Setting::String("gemv");
  config.members["bits"] = Setting::Literal(int64_t{8});
  config.members["group_size"] = Setting::Literal(int64_t{128});
  EXPECT_THAT(std::string(FindFormat(config).status().message()),
              ::testing::StartsWith("awq-gemv: bits: got 8"));
}

TEST(Formats, FamiliesThatAreNotReadAreNamed) {
  for (const auto& [method, family] :
       {std::pair<std::string, std::string>{"aqlm", "AQLM"}, {"exl2", "ExLlamaV2"}}) {
    const absl::Status status = FindFormat(Method(method)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(status.message()), HasSubstr(family));
  }
}

TEST(Formats, SettingsThatNoFormatCouldReadAreInvalid) {
  const auto nothing = FindFormat({});
  EXPECT_EQ(nothing.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(nothing.status().message()), HasSubstr("quant_method: got nothing"));
  Setting config = Method("awq");
  config.members["bits"] = Setting::String("four");
  EXPECT_EQ(FindFormat(config).status().code(), absl::StatusCode::kInvalidArgument);
  config.members["quant_method"] = Setting::String(std::string(65, 'q'));
  EXPECT_THAT(std::string(FindFormat(config).status().message()), HasSubstr("at most 64 bytes"));
  config.members["quant_method"] = Setting::Literal(int64_t{4});
  EXPECT_THAT(std::string(FindFormat(config).status().message()),
              HasSubstr("quant_method: got 4, expected a string"));
}

TEST(Formats, WhatWasFoundIsEscaped) {
  const auto method = FindFormat(Method("a\n\xc3\xa9"));
  EXPECT_THAT(std::string(method.status().message()), HasSubstr("quant_method \"a\\n\\xc3\\xa9\""));
  Setting config = Method("awq");
  config.members["version"] = Setting::String("a\nb");
  const absl::Status version = FindFormat(config).status();
  EXPECT_THAT(std::string(version.message()), HasSubstr("version: got \"a\\nb\""));
  EXPECT_EQ(version.message().find('\n'), absl::string_view::npos);
}

}  // namespace
}  // namespace awqd
