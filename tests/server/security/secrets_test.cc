// SHA-256 against the standard's own examples.
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "server/security/identities.h"

namespace awqd::security {
namespace {

// FIPS 180-2, appendix B.
constexpr char kAbc[] = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
constexpr char kEmpty[] = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

TEST(Digest, IsSha256) {
  EXPECT_EQ(Sha256("abc"), DigestFromHex(kAbc));
  EXPECT_EQ(Sha256(""), DigestFromHex(kEmpty));
  EXPECT_TRUE(SameSecret(Sha256("abc"), Sha256("abc")));
  EXPECT_FALSE(SameSecret(Sha256("abc"), Sha256("abd")));
}

TEST(Digest, FromEachThread) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int n = 0; n < 100; ++n) EXPECT_EQ(Sha256("abc"), DigestFromHex(kAbc));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Digest, HexIsSixtyFourDigits) {
  std::string upper = kAbc;
  for (char& c : upper) c = static_cast<char>(toupper(c));
  EXPECT_EQ(DigestFromHex(upper), DigestFromHex(kAbc));
  EXPECT_FALSE(DigestFromHex(""));
  EXPECT_FALSE(DigestFromHex(std::string(kAbc).substr(1)));
  EXPECT_FALSE(DigestFromHex(std::string(kAbc) + "0"));
  EXPECT_FALSE(DigestFromHex("x" + std::string(kAbc).substr(1)));
}

}  // namespace
}  // namespace awqd::security
