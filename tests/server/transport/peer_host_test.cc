// PeerHost: the host that a peer belongs to.
#include "gtest/gtest.h"
#include "server/obs/origin.h"

namespace awqd::obs {
namespace {

TEST(PeerHost, LeavesThePortOut) {
  EXPECT_EQ(PeerHost("ipv4:10.0.0.7:51034"), "ipv4:10.0.0.7");
  EXPECT_EQ(PeerHost("unix:"), "unix");
  EXPECT_EQ(PeerHost("unix:/run/awqd.sock"), "unix");
}

TEST(PeerHost, AnIpv6ClientHasItsNetwork) {
  const std::string machine = PeerHost("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:51034");
  EXPECT_EQ(machine, "ipv6:2001:db8:1:2::/64");
  EXPECT_EQ(PeerHost("ipv6:[2001:db8:1:2:ffff::1]:9"), machine);
  EXPECT_NE(PeerHost("ipv6:[2001:db8:1:3::1]:9"), machine);
}

TEST(PeerHost, AMappedAddressIsAnIpv4One) {
  EXPECT_EQ(PeerHost("ipv6:%5B::ffff:10.0.0.7%5D:51034"), "ipv4:10.0.0.7");
}

TEST(PeerHost, WhatItDoesNotKnowIsAMachineToo) {
  EXPECT_EQ(PeerHost("vsock:3:1"), "vsock:3");
  EXPECT_EQ(PeerHost("ipv6:[nonsense]:1"), "ipv6:[nonsense]");
  EXPECT_EQ(PeerHost(""), "");
}

}  // namespace
}  // namespace awqd::obs
