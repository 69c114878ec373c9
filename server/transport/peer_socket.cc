// Socket options, and a look at frames of HTTP/2 that lie in a socket.
#include "server/transport/peer_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/base/unique_fd.h"

namespace awqd::transport {
namespace {

std::string Print(int family, const void* address) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(family, address, text, sizeof(text));
  return text;
}

// RFC 9113, sections 4.1 and 6.
constexpr size_t kFrameHeader = 9;
constexpr size_t kLargestFrame = 16384;
constexpr uint8_t kHeaders = 1, kLastKind = 9;
constexpr uint8_t kHeadersFlags = 0x2d;

struct FrameAt {
  bool headers = false;
  size_t end = 0;
};

// The frame that may begin there.
std::optional<FrameAt> FrameOf(absl::Span<const uint8_t> bytes, size_t at) {
  if (at + kFrameHeader > bytes.size()) return std::nullopt;
  const uint8_t* const head = bytes.data() + at;
  const size_t size = size_t{head[0]} << 16 | size_t{head[1]} << 8 | head[2];
  if (size > kLargestFrame || head[3] > kLastKind || (head[5] & 0x80) != 0) return std::nullopt;
  const bool headers = head[3] == kHeaders;
  if (headers && (size == 0 || (head[4] & ~kHeadersFlags) != 0 || (head[8] & 1) == 0)) {
    return std::nullopt;
  }
  return FrameAt{.headers = headers, .end = at + kFrameHeader + size};
}

// The reader may have stopped within a frame, so the walk begins where one of HEADERS is followed
// by what may be a frame too.
int64_t CountHeaders(absl::Span<const uint8_t> bytes) {
  int64_t count = 0;
  size_t at = 0;
  std::optional<FrameAt> frame;
  for (; at < kFrameHeader + kLargestFrame; ++at) {
    frame = FrameOf(bytes, at);
    if (frame && frame->headers && FrameOf(bytes, frame->end)) break;
    frame.reset();
  }
  for (; frame; frame = FrameOf(bytes, at)) {
    count += frame->headers ? 1 : 0;
    at = frame->end;
  }
  return count;
}

// A peer of a socket file goes on to have its bytes there.
void ThrowAwayUnread(int fd) {
  char bytes[16384];
  while (recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT) > 0) {
  }
}

}  // namespace

uint64_t CookieOf(int fd) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

// gRPC writes the brackets of IPv6 addresses one way or another.
bool IsPeer(int fd, absl::string_view name) {
  sockaddr_storage peer = {};
  socklen_t size = sizeof(peer);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return false;
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(peer);
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(peer);
  if (peer.ss_family == AF_INET) {
    return name == absl::StrCat("ipv4:", Print(AF_INET, &v4.sin_addr), ":", ntohs(v4.sin_port));
  }
  if (peer.ss_family != AF_INET6) return false;
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    return name == absl::StrCat("ipv4:", Print(AF_INET, &v6.sin6_addr.s6_addr[12]), ":",
                                ntohs(v6.sin6_port));
  }
  return absl::EndsWith(name, absl::StrCat(":", ntohs(v6.sin6_port))) &&
         absl::StrContains(name, Print(AF_INET6, &v6.sin6_addr));
}

absl::Duration StillFor(int fd) {
  int unsent = 0;
  if (ioctl(fd, SIOCOUTQ, &unsent) == 0 && unsent > 0) return absl::ZeroDuration();
  tcp_info info = {};
  socklen_t size = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return absl::InfiniteDuration();
  return absl::Milliseconds(std::min(info.tcpi_last_data_sent, info.tcpi_last_data_recv));
}

int64_t WaitingCalls(int fd) {
  constexpr size_t kPeek = 64 << 10;
  int unread = 0;
  if (ioctl(fd, FIONREAD, &unread) != 0 || unread < static_cast<int>(kFrameHeader)) return 0;
  static thread_local const std::unique_ptr<uint8_t[]> bytes(new uint8_t[kPeek]);
  const ssize_t got = recv(fd, bytes.get(), kPeek, MSG_PEEK | MSG_DONTWAIT);
  return got <= 0 ? 0 : CountHeaders({bytes.get(), static_cast<size_t>(got)});
}

bool Reset(int fd, uint64_t cookie) {
  // gRPC may close `fd` at any time, and its number then goes to another file; a second descriptor
  // stays with the socket. When none is left the first one has to do.
  const UniqueFd own(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  const int held = own.valid() ? own.get() : fd;
  if (CookieOf(held) != cookie) return false;
  // A TCP socket that is connected to nothing sends a reset and keeps nothing that it received.
  const sockaddr nothing = {.sa_family = AF_UNSPEC, .sa_data = {}};
  if (connect(held, &nothing, sizeof(nothing)) == 0) return true;
  if (shutdown(held, SHUT_RDWR) != 0) return false;
  ThrowAwayUnread(held);
  return true;
}

}  // namespace awqd::transport
