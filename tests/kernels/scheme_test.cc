// QuantScheme: validation names the member; print and parse are inverse.
#include "kernels/scheme.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

TEST(Scheme, PrintsAndParses) {
  for (const char* text : {"a16w4g128z", "a16w4g128s", "a16w8g64zb", "a8w4g32s", "a16w3g7zf"}) {
    const auto scheme = ParseScheme(text);
    ASSERT_TRUE(scheme.ok()) << text;
    EXPECT_EQ(ToString(*scheme), text);
  }
  for (const char* text : {"", "w4", "a16w4", "a16w4g128", "a4w4g128z", "a16w9g128z", "a16w4g0z",
                           "a16w4g128zq", "a16w4g128z "}) {
    EXPECT_FALSE(ParseScheme(text).ok()) << text;
  }
}

TEST(Scheme, ValidateNamesTheMember) {
  QuantScheme scheme;
  scheme.group_size = 128;
  EXPECT_TRUE(Validate(scheme, 256, 64).ok());
  EXPECT_THAT(Validate(scheme, 0, 64).ToString(), HasSubstr("K"));
  EXPECT_THAT(Validate(scheme, 256, 12).ToString(), HasSubstr("N"));
  EXPECT_THAT(Validate(scheme, 250, 64).ToString(), HasSubstr("group_size"));
  scheme.bits = 9;
  EXPECT_THAT(Validate(scheme, 256, 64).ToString(), HasSubstr("bits"));
  scheme.bits = 4;
  scheme.scale_dtype = DType::kInt8;
  EXPECT_THAT(Validate(scheme, 256, 64).ToString(), HasSubstr("scale"));
}

}  // namespace
}  // namespace awqd
