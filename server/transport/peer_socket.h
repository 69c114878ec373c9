// The kernel's view of a connection's socket, and its reset, while gRPC owns the descriptor.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace awqd::transport {

// The number that the kernel gives to this socket and to no other; 0 when `fd` is no socket.
uint64_t CookieOf(int fd);

// Whether gRPC calls the other end of `fd` so.
bool IsPeer(int fd, absl::string_view name);

// How long nothing has been on the way, either way; zero while the peer's kernel has not
// acknowledged everything.
absl::Duration StillFor(int fd);

// How many calls begin in the first 64 KiB that nobody has read yet: their HEADERS frames. None are
// seen within TLS.
int64_t WaitingCalls(int fd);

// Ends the connection, and throws away what came of it and was not read: gRPC would go on with that
// for as long as there is some. False when its socket is not that of `cookie`.
bool Reset(int fd, uint64_t cookie);

}  // namespace awqd::transport
