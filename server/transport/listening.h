// Listening sockets, made as gRPC makes its own.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/unique_fd.h"

namespace awqd::transport {

struct ListenSockets {
  std::vector<UniqueFd> sockets;  // non-blocking
  int port = 0;                     // that is really bound; 0 for a path
};

// Of "host:port" or "[host]:port": one for each address of the host that this machine has, all on
// one port. Every interface is listened on by IPv4 and IPv6, as far as the machine has them.
// Nobody else can listen on the port at the same time. Connections are given up by the kernel when
// the peer has acknowledged nothing for `unacknowledged`. UNAVAILABLE says why it cannot be.
absl::StatusOr<ListenSockets> ListenOnPort(absl::string_view host_and_port,
                                           absl::Duration unacknowledged);

// Of a socket file, which must not exist. UNAVAILABLE says why it cannot be.
absl::StatusOr<ListenSockets> ListenOnPath(const std::string& path);

}  // namespace awqd::transport
