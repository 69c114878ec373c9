// Digests against values of the XXH64 of others.
#include "kernels/base/digest.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace awqd {
namespace {

TEST(Xxh64, ValuesOfXxhash) {
  const auto digest = [](const std::string& text, uint64_t seed = 0) {
    return Xxh64(text.data(), text.size(), seed);
  };
  EXPECT_EQ(digest(""), 0xef46db3751d8e999);
  EXPECT_EQ(digest("a"), 0xd24ec4f1a98c6e5b);
  EXPECT_EQ(digest("Nobody inspects the spammish repetition"), 0xfbcea83c8a378bf1);
  std::string bytes(1000, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7);
  EXPECT_EQ(digest(bytes.substr(0, 32)), 0x91b0cb0931a8c629);
  EXPECT_EQ(digest(bytes.substr(0, 47)), 0x980974feb2a7370d);
  EXPECT_EQ(digest(bytes, 42), 0x6d70f8faa18af724);
}

TEST(DigestOfWeight, EveryBlockCounts) {
  std::vector<uint8_t> bytes((9 << 20) + 3);
  const auto digest = [&](size_t count) {
    return DigestOfWeight(bytes.data(), static_cast<int64_t>(count));
  };
  const uint64_t truth = digest(bytes.size());
  EXPECT_NE(digest(bytes.size() - 1), truth);
  EXPECT_NE(digest(8 << 20), digest(4 << 20));
  for (const size_t at : {size_t{0}, size_t{4} << 20, size_t{5} << 20, bytes.size() - 1}) {
    bytes[at] ^= 0x80;
    EXPECT_NE(digest(bytes.size()), truth) << at;
    bytes[at] ^= 0x80;
  }
  EXPECT_EQ(digest(bytes.size()), truth);
  std::memset(bytes.data(), 1, 4 << 20);
  std::memset(bytes.data() + (4 << 20), 2, 4 << 20);
  const uint64_t before = digest(8 << 20);
  std::memset(bytes.data(), 2, 4 << 20);
  std::memset(bytes.data() + (4 << 20), 1, 4 << 20);
  EXPECT_NE(digest(8 << 20), before) << "in another order";
}

}  // namespace
}  // namespace awqd
