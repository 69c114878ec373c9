// FindFormat: the table as a whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "kernels/formats/format.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

TEST(Formats, EveryRowIsComplete) {
  std::set<absl::string_view> names;
  ASSERT_FALSE(AllFormats().empty());
  for (const Format* format : AllFormats()) {
    EXPECT_TRUE(names.insert(format->name).second) << format->name << " is there twice";
    EXPECT_NE(format->refuses, nullptr) << format->name;
    EXPECT_NE(format->decode, nullptr) << format->name;
    EXPECT_FALSE(format->suffixes.empty()) << format->name;
    for (absl::string_view optional : format->optional_suffixes) {
      EXPECT_THAT(format->suffixes, ::testing::Contains(optional)) << format->name;
      EXPECT_NE(optional, format->suffixes.front()) << format->name;
    }
  }
}

TEST(Formats, FindsAwq) {
  const auto format = FindFormat({.quant_method = "awq", .version = "gemm", .bits = 4});
  ASSERT_TRUE(format.ok()) << format.status();
  EXPECT_EQ((*format)->name, "awq");
}

TEST(Formats, SaysWhatWasFoundAndWhatWasTried) {
  const auto format = FindFormat({.quant_method = "bitsandbytes", .version = "nf4", .bits = 4});
  EXPECT_EQ(format.status().code(), absl::StatusCode::kUnimplemented);
  const std::string message(format.status().message());
  EXPECT_THAT(message, HasSubstr("quant_method \"bitsandbytes\", version \"nf4\", bits 4"));
  for (const Format* tried : AllFormats()) {
    EXPECT_THAT(message, HasSubstr(std::string(tried->name) + ": "));
  }
}

TEST(Formats, WhatWasFoundIsEscaped) {
  const auto method = FindFormat({.quant_method = "a\nb", .version = "\xc3\xa9", .bits = 4});
  EXPECT_THAT(std::string(method.status().message()),
              HasSubstr("quant_method \"a\\nb\", version \"\\xc3\\xa9\", bits 4"));
  const auto version = FindFormat({.quant_method = "awq", .version = "a\nb", .bits = 4});
  EXPECT_THAT(std::string(version.status().message()), HasSubstr("version: got \"a\\nb\""));
  EXPECT_EQ(version.status().message().find('\n'), absl::string_view::npos);
}

}  // namespace
}  // namespace awqd
