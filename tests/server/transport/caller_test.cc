// The machine that a peer belongs to.
#include "server/transport/caller.h"

#include "gtest/gtest.h"

namespace awqd::transport {
namespace {

TEST(MachineOf, LeavesThePortOut) {
  EXPECT_EQ(MachineOf("ipv4:10.0.0.7:51034"), "ipv4:10.0.0.7");
  EXPECT_EQ(MachineOf("unix:"), "unix");
  EXPECT_EQ(MachineOf("unix:/run/awqd.sock"), "unix");
}

TEST(MachineOf, AnIpv6ClientHasItsNetwork) {
  const std::string machine = MachineOf("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:51034");
  EXPECT_EQ(machine, "ipv6:2001:db8:1:2::/64");
  EXPECT_EQ(MachineOf("ipv6:[2001:db8:1:2:ffff::1]:9"), machine);
  EXPECT_NE(MachineOf("ipv6:[2001:db8:1:3::1]:9"), machine);
}

TEST(MachineOf, AMappedAddressIsAnIpv4One) {
  EXPECT_EQ(MachineOf("ipv6:%5B::ffff:10.0.0.7%5D:51034"), "ipv4:10.0.0.7");
}

TEST(MachineOf, WhatItDoesNotKnowIsAMachineToo) {
  EXPECT_EQ(MachineOf("vsock:3:1"), "vsock:3");
  EXPECT_EQ(MachineOf("ipv6:[nonsense]:1"), "ipv6:[nonsense]");
  EXPECT_EQ(MachineOf(""), "");
}

}  // namespace
}  // namespace awqd::transport
