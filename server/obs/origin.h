// Where connections come from, as text: addresses, networks and users, as limits and logs see them.
#pragma once

#include <sys/socket.h>

#include <string>

#include "absl/strings/string_view.h"

namespace awqd::obs {

// "10.0.0.7", "2001:db8::7": `address` is an in_addr or in6_addr, as `family` says.
std::string PrintAddress(int family, const void* address);

// "10.0.0.7"; "2001:db8:1:2::/64", because a host has as many addresses as it likes beneath it;
// "user 1000" of a Unix domain socket. `fd` is the connection, `peer` its other end.
std::string Origin(int fd, const sockaddr_storage& peer);

// The same of the other end that the kernel knows; empty where it is gone.
std::string Origin(int fd);

// The host of a peer as gRPC names it: "ipv4:10.0.0.7" of "ipv4:10.0.0.7:51034", the network of 64
// bits of an IPv6 address, "unix" of all that come by a socket file.
std::string PeerHost(absl::string_view peer);

}  // namespace awqd::obs
