// Where a server may listen: a TCP port, or a Unix domain socket in the file system.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace awqd::transport {

// What the kernel's sockaddr_un holds, less the closing zero.
inline constexpr size_t kMaxSocketPathBytes = 107;

struct ListenAddress {
  std::string text;         // as gRPC wants it: "127.0.0.1:0", "[::1]:8001", "unix:/run/awqd.sock"
  std::string socket_path;  // of a Unix domain socket; empty for TCP

  // Whether only this machine can reach it: a socket, "localhost", 127.0.0.0/8 or ::1, spelled so.
  bool local() const;
};

// "host:port" with a port of 0 to 65535, "unix:path" or "unix:///path". INVALID_ARGUMENT says what
// was got and expected; the caller names the field.
absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view text);

}  // namespace awqd::transport
