// Origin: the peer of a connection as limits and logs name it.
#pragma once

#include <sys/socket.h>

#include <string>

namespace awqd::obs {

// Names the peer of the connection `fd`, whose address is `peer`: an IPv4 address "10.0.0.7"; an
// IPv6 network "2001:db8:1:2::/64", because a host can use any address in it; or "user 1000" on a
// Unix domain socket.
std::string Origin(int fd, const sockaddr_storage& peer);

}  // namespace awqd::obs
