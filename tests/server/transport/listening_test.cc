// Addresses that only this machine can reach, and others.
#include "server/transport/listening.h"

#include "gtest/gtest.h"

namespace awqd::transport {
namespace {

TEST(ListenAddress, LocalOnes) {
  for (const char* text : {"127.0.0.1:8001", "127.1.2.3:0", "[::1]:8001", "localhost:1",
                           "unix:/run/a.sock", "unix:a.sock"}) {
    EXPECT_TRUE(ParseListenAddress(text)->local()) << text;
  }
}

TEST(ListenAddress, AllOthersAreNot) {
  for (const char* text : {"0.0.0.0:8001", "[::]:8001", "10.0.0.7:1", "128.0.0.1:1", "127.1:1",
                           "127.0.0.1.example.org:1", "example.org:1", "localhost.example.org:1",
                           "[::ffff:10.0.0.1]:1", "[::2]:1", "*:1"}) {
    EXPECT_FALSE(ParseListenAddress(text)->local()) << text;
  }
}

}  // namespace
}  // namespace awqd::transport
