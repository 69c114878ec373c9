// Parses addresses before gRPC sees them, whose own errors name no reason; resolves, binds,
// listens; protects and removes socket files.
#include "server/transport/listening.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"

namespace awqd::transport {
namespace {

// False: `host` has none.
bool RemoveBrackets(std::string* host) {
  if (host->size() <= 2 || host->front() != '[' || host->back() != ']') return false;
  *host = host->substr(1, host->size() - 2);
  return true;
}

absl::Status Refused(absl::string_view text, absl::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("got \"", obs::LogText(text), "\", expected ", expected));
}

// Clients write the path as part of a URI, where these characters mean something else.
bool IsSpecialInUri(char c) {
  return c == '%' || c == '?' || c == '#' || static_cast<unsigned char>(c) <= ' ' || c == '\x7f';
}

absl::StatusOr<ListenAddress> ParseSocketPath(absl::string_view text, absl::string_view path) {
  if (absl::ConsumePrefix(&path, "//") && path.substr(0, 1) != "/") {
    return Refused(text, "unix:path or unix:///path, without a host");
  }
  if (path.empty() || path.back() == '/') return Refused(text, "unix: and the path of a socket");
  for (const char c : path) {
    if (!IsSpecialInUri(c)) continue;
    return Refused(text, "a socket path without blanks, control characters and % ? #");
  }
  if (path.size() > kMaxSocketPathBytes) {
    return absl::InvalidArgumentError(absl::StrCat("got a socket path of ", path.size(),
                                                   " bytes, expected at most ", kMaxSocketPathBytes,
                                                   ", the kernel's limit"));
  }
  return ListenAddress{.text = absl::StrCat("unix:", path), .socket_path = std::string(path)};
}

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

absl::Status Failed(int error) { return absl::UnavailableError(std::strerror(error)); }

// The same port of another address of the host.
void SetPort(sockaddr* address, int port) {
  const in_port_t number = htons(static_cast<uint16_t>(port));
  if (address->sa_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address)->sin6_port = number;
  } else {
    reinterpret_cast<sockaddr_in*>(address)->sin_port = number;
  }
}

int PortOf(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

// 0, or errno. Accepted connections inherit the options.
int ListenOnAddress(const addrinfo& address, absl::Duration unacknowledged, UniqueFd* out) {
  UniqueFd fd(socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.ok()) return errno;
  const int on = 1, off = 0;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  const auto millis = static_cast<unsigned>(
      std::clamp<int64_t>(absl::ToInt64Milliseconds(unacknowledged), 1, INT_MAX));
  setsockopt(fd.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &millis, sizeof(millis));
  if (address.ai_family == AF_INET6) {
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  }
  if (bind(fd.get(), address.ai_addr, address.ai_addrlen) != 0) return errno;
  if (listen(fd.get(), SOMAXCONN) != 0) return errno;
  *out = std::move(fd);
  return 0;
}

absl::StatusOr<Addresses> Resolve(const std::string& host, const std::string& port) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (error != 0) return absl::UnavailableError(gai_strerror(error));
  return Addresses(found, freeaddrinfo);
}

absl::StatusOr<ListenSockets> ListenOnEach(const std::string& host, const std::string& port,
                                           absl::Duration unacknowledged) {
  AWQD_ASSIGN_OR_RETURN(const Addresses addresses, Resolve(host, port));
  ListenSockets out;
  int missing = EADDRNOTAVAIL;
  for (addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    if (out.port != 0) SetPort(address->ai_addr, out.port);
    UniqueFd fd;
    const int error = ListenOnAddress(*address, unacknowledged, &fd);
    // A host that has several addresses may lack some of them without a mistake.
    if (error == EADDRNOTAVAIL || error == EAFNOSUPPORT) {
      missing = error;
      continue;
    }
    if (error != 0) return Failed(error);
    if (out.port == 0) out.port = PortOf(fd.get());
    out.sockets.push_back(std::move(fd));
  }
  if (out.sockets.empty()) return Failed(missing);
  return out;
}

// Another awqd holds the lock from its check to its listen: milliseconds.
constexpr absl::Duration kLockLimit = absl::Seconds(5);
constexpr absl::Duration kLockPoll = absl::Milliseconds(5);

absl::Status CannotUsePath(absl::string_view why, int error = 0) {
  return absl::InvalidArgumentError(error == 0 ? std::string(why)
                                               : absl::StrCat(why, ": ", std::strerror(error)));
}

// The open directory of `path`, which no other awqd can lock until it is closed.
absl::StatusOr<UniqueFd> LockDirectoryOf(const std::string& path) {
  std::string directory = std::filesystem::path(path).parent_path().string();
  if (directory.empty()) directory = ".";
  const std::string quoted = absl::StrCat("\"", obs::LogText(directory), "\"");
  UniqueFd fd(open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.ok()) return CannotUsePath("cannot open the directory " + quoted, errno);
  if (access(directory.c_str(), W_OK | X_OK) != 0) {
    return CannotUsePath("cannot write to the directory " + quoted, errno);
  }
  const absl::Time until = absl::Now() + kLockLimit;
  while (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK || absl::Now() > until) {
      return CannotUsePath("cannot lock the directory " + quoted, errno);
    }
    absl::SleepFor(kLockPoll);
  }
  return fd;
}

UniqueFd NewPathSocket() {
  return UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// Leaves the path free, or says why it cannot be.
absl::Status RemoveDeadSocket(const std::string& path, const sockaddr_un& address) {
  struct stat found = {};
  if (lstat(path.c_str(), &found) != 0) {
    return errno == ENOENT ? absl::OkStatus() : CannotUsePath("cannot look at it", errno);
  }
  if (!S_ISSOCK(found.st_mode)) {
    return CannotUsePath("something that is not a socket is there; move it away first");
  }
  const UniqueFd fd = NewPathSocket();
  if (!fd.ok()) return Failed(errno);
  const auto* const to = reinterpret_cast<const sockaddr*>(&address);
  // EAGAIN: its server is alive, with a full backlog.
  if (connect(fd.get(), to, sizeof(address)) == 0 || errno == EAGAIN) {
    return absl::UnavailableError(
        "another server listens there, or this one was given the address twice");
  }
  if (errno == ENOENT) return absl::OkStatus();
  if (errno != ECONNREFUSED) return CannotUsePath("cannot tell whether a server is there", errno);
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    return CannotUsePath("cannot remove the socket that a dead server left", errno);
  }
  obs::LogEvent(obs::LogLevel::kInfo, "removed the socket of a server that is gone",
                {{"path", obs::LogText(path)}});
  return absl::OkStatus();
}

// The owner of the file that is at `path` now: ListenSockets::file.
std::shared_ptr<void> OwnFile(const std::string& path) {
  struct stat made = {};
  if (lstat(path.c_str(), &made) != 0) return nullptr;
  return {nullptr, [path, made](void*) {
            struct stat now = {};
            if (lstat(path.c_str(), &now) != 0) return;
            if (now.st_dev == made.st_dev && now.st_ino == made.st_ino) unlink(path.c_str());
          }};
}

}  // namespace

bool ListenAddress::local() const {
  if (!socket_path.empty()) return true;
  std::string host = text.substr(0, text.rfind(':'));
  RemoveBrackets(&host);
  in_addr v4 = {};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6 = {};
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost";
}

absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view text) {
  if (absl::string_view path = text; absl::ConsumePrefix(&path, "unix:")) {
    return ParseSocketPath(text, path);
  }
  const size_t colon = text.rfind(':');
  int port = -1;
  // No host has a slash: "http://host:port" is for browsers.
  if (colon != absl::string_view::npos && colon != 0 && !absl::StrContains(text, '/') &&
      absl::SimpleAtoi(text.substr(colon + 1), &port) && port >= 0 && port <= 65535) {
    return ListenAddress{.text = std::string(text)};
  }
  return Refused(text, "host:port with a port of 0 to 65535, or unix:/path");
}

absl::StatusOr<ListenSockets> ListenOn(const ListenAddress& address, mode_t socket_mode,
                                       absl::Duration unacknowledged) {
  absl::StatusOr<ListenSockets> listening = address.socket_path.empty()
                                                ? ListenOnPort(address.text, unacknowledged)
                                                : ListenOnPath(address.socket_path, socket_mode);
  if (listening.ok()) return listening;
  return Prefixed(absl::StrCat("cannot listen on \"", obs::LogText(address.text), "\""),
                  listening.status());
}

absl::StatusOr<ListenSockets> ListenOnPort(absl::string_view host_and_port,
                                           absl::Duration unacknowledged) {
  const size_t colon = host_and_port.rfind(':');
  std::string host(host_and_port.substr(0, colon));
  const std::string port(host_and_port.substr(colon + 1));
  if (!RemoveBrackets(&host) && host.find(':') != std::string::npos) {
    return absl::UnavailableError("an IPv6 address is written in brackets");
  }
  if (host == "0.0.0.0") {
    // One socket for both families; a machine without IPv6 has no such address.
    absl::StatusOr<ListenSockets> both = ListenOnEach("::", port, unacknowledged);
    if (both.ok()) return both;
  }
  return ListenOnEach(host, port, unacknowledged);
}

absl::StatusOr<ListenSockets> ListenOnPath(const std::string& path, mode_t mode) {
  sockaddr_un address = {.sun_family = AF_UNIX};
  if (path.size() >= sizeof(address.sun_path)) return Failed(ENAMETOOLONG);
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  AWQD_ASSIGN_OR_RETURN(const UniqueFd lock, LockDirectoryOf(path));
  AWQD_RETURN_IF_ERROR(RemoveDeadSocket(path, address));
  UniqueFd fd = NewPathSocket();
  if (!fd.ok() ||
      bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Failed(errno);
  }
  ListenSockets out;
  out.file = OwnFile(path);
  // Nobody can connect before the listen.
  if (chmod(path.c_str(), mode) != 0) return CannotUsePath("cannot set its permissions", errno);
  if (listen(fd.get(), SOMAXCONN) != 0) return Failed(errno);
  out.sockets.push_back(std::move(fd));
  return out;
}

}  // namespace awqd::transport
