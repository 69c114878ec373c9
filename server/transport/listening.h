// Addresses to listen on, and listening sockets, which have the options that gRPC gives its own.
//
// Attacker of socket files: another user of the machine, who connects before the permissions are
// set or puts a file in the way. Shown by tests/e2e/transport/unix_socket_test.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/unique_fd.h"

namespace awqd::transport {

// The kernel's sockaddr_un holds so many bytes and a closing zero.
inline constexpr size_t kMaxSocketPathBytes = 107;

// A TCP port, or a Unix domain socket in the file system.
struct ListenAddress {
  std::string text;         // as gRPC wants it: "127.0.0.1:0", "[::1]:8001", "unix:/run/awqd.sock"
  std::string socket_path;  // of a Unix domain socket; empty for TCP

  // Whether only this machine can reach it: a socket, "localhost", 127.0.0.0/8 or ::1, spelled so.
  bool local() const;
};

// "host:port" with a port of 0 to 65535, "unix:path" or "unix:///path". INVALID_ARGUMENT says what
// was got and expected; the caller names the field.
absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view text);

struct ListenSockets {
  std::vector<UniqueFd> sockets;  // non-blocking
  int port = 0;                   // the port that is bound; 0 for a path
  // Owns the file of a path: removes it when the last copy goes, unless something else has taken
  // its place. Goes before the socket is closed: the kernel gives the file's number to another one
  // afterwards.
  std::shared_ptr<void> file;
};

// Listens on the address, as the functions below. Their errors begin with "cannot listen on
// ADDRESS".
absl::StatusOr<ListenSockets> ListenOn(const ListenAddress& address, mode_t socket_mode,
                                       absl::Duration unacknowledged);

// Listens on "host:port" or "[host]:port": one socket for each address of the host that this
// machine has, all on one port. Every interface is listened on by IPv4 and IPv6, as far as the
// machine has them. Nobody else can listen on the port at the same time. Connections are given up
// by the kernel when the peer has acknowledged nothing for `unacknowledged`. UNAVAILABLE says why
// it cannot.
absl::StatusOr<ListenSockets> ListenOnPort(absl::string_view host_and_port,
                                           absl::Duration unacknowledged);

// Listens on a socket file. Removes a socket there that no server listens on, and nothing else.
// `mode`: permissions of the file, set before anyone can connect; a user who may write to it may
// connect. UNAVAILABLE when a server listens there, INVALID_ARGUMENT when something else is there
// or the directory cannot be written.
absl::StatusOr<ListenSockets> ListenOnPath(const std::string& path, mode_t mode);

}  // namespace awqd::transport
