// Origin: where a connection comes from, as limits and logs see it.
#pragma once

#include <sys/socket.h>

#include <string>

namespace awqd::obs {

// "10.0.0.7", "2001:db8:1:2::/64" (a host has as many addresses as it likes beneath it), "user
// 1000" of a Unix domain socket. `fd` is the connection, `peer` its other end.
std::string Origin(int fd, const sockaddr_storage& peer);

}  // namespace awqd::obs
