// Connections that gRPC closes: their sockets by the kernel's account, and how many there are.
#include "server/transport/open_connections.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "kernels/base/unique_fd.h"
#include "server/obs/origin.h"

namespace awqd::transport {
namespace {

// Checking 4096 connections takes 1 ms, and each connection past a limit asks for it.
constexpr absl::Duration kBetweenSweeps = absl::Milliseconds(20);

// RFC 9113, section 6.
constexpr uint8_t kHeaders = 1, kLastKind = 9;
constexpr uint8_t kHeadersFlags = 0x2d;

struct Frame {
  bool headers = false;
  size_t end = 0;
};

// The frame that may begin at `at`.
std::optional<Frame> ParseFrame(absl::Span<const uint8_t> bytes, size_t at) {
  if (at + kFrameHeader > bytes.size()) return std::nullopt;
  const uint8_t* const head = bytes.data() + at;
  const size_t size = size_t{head[0]} << 16 | size_t{head[1]} << 8 | head[2];
  if (size > kLargestFrame || head[3] > kLastKind || (head[5] & 0x80) != 0) return std::nullopt;
  const bool headers = head[3] == kHeaders;
  if (headers && (size == 0 || (head[4] & ~kHeadersFlags) != 0 || (head[8] & 1) == 0)) {
    return std::nullopt;
  }
  return Frame{.headers = headers, .end = at + kFrameHeader + size};
}

// The reader may have stopped within a frame, so the walk begins where one of HEADERS is followed
// by what may be a frame too.
int64_t CountHeaders(absl::Span<const uint8_t> bytes) {
  int64_t count = 0;
  size_t at = 0;
  std::optional<Frame> frame;
  for (; at < kFrameHeader + kLargestFrame; ++at) {
    frame = ParseFrame(bytes, at);
    if (frame && frame->headers && ParseFrame(bytes, frame->end)) break;
    frame.reset();
  }
  for (; frame; frame = ParseFrame(bytes, at)) {
    count += frame->headers ? 1 : 0;
    at = frame->end;
  }
  return count;
}

// Whether gRPC calls the other end of `fd` so. gRPC writes the brackets of IPv6 addresses one way
// or another.
bool IsPeer(int fd, absl::string_view name) {
  sockaddr_storage peer = {};
  socklen_t size = sizeof(peer);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return false;
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(peer);
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(peer);
  if (peer.ss_family == AF_INET) {
    return name ==
           absl::StrCat("ipv4:", obs::PrintAddress(AF_INET, &v4.sin_addr), ":", ntohs(v4.sin_port));
  }
  if (peer.ss_family != AF_INET6) return false;
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    return name == absl::StrCat("ipv4:", obs::PrintAddress(AF_INET, &v6.sin6_addr.s6_addr[12]), ":",
                                ntohs(v6.sin6_port));
  }
  return absl::EndsWith(name, absl::StrCat(":", ntohs(v6.sin6_port))) &&
         absl::StrContains(name, obs::PrintAddress(AF_INET6, &v6.sin6_addr));
}

// Whether the peer's kernel has not acknowledged everything. False for a socket that is not TCP's.
bool HasUnacknowledged(int fd) {
  int protocol = 0, unsent = 0;
  socklen_t size = sizeof(protocol);
  return getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) == 0 &&
         protocol == IPPROTO_TCP && ioctl(fd, SIOCOUTQ, &unsent) == 0 && unsent > 0;
}

}  // namespace

uint64_t SocketCookie(int fd) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

int64_t CountWaitingCalls(int fd) {
  constexpr size_t kPeek = 64 << 10;
  int unread = 0;
  if (ioctl(fd, FIONREAD, &unread) != 0 || unread < static_cast<int>(kFrameHeader)) return 0;
  static thread_local const std::unique_ptr<uint8_t[]> bytes(new uint8_t[kPeek]);
  const ssize_t got = recv(fd, bytes.get(), kPeek, MSG_PEEK | MSG_DONTWAIT);
  return got <= 0 ? 0 : CountHeaders({bytes.get(), static_cast<size_t>(got)});
}

bool ResetConnection(int fd, uint64_t cookie) {
  // gRPC may close `fd` at any time, and its number then goes to another file; a second descriptor
  // stays with the socket. When none is left the first one has to do.
  const UniqueFd own(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  const int held = own.ok() ? own.get() : fd;
  if (SocketCookie(held) != cookie) return false;
  // A TCP socket that is connected to nothing sends a reset and keeps nothing that it received.
  const sockaddr nothing = {.sa_family = AF_UNSPEC, .sa_data = {}};
  if (connect(held, &nothing, sizeof(nothing)) == 0) return true;
  if (shutdown(held, SHUT_RDWR) != 0) return false;
  // The bytes of a peer of a socket file stay there otherwise.
  char bytes[16384];
  while (recv(held, bytes, sizeof(bytes), MSG_DONTWAIT) > 0) {
  }
  return true;
}

OpenConnections::Verdict OpenConnections::CheckLimits(const std::string& origin) const {
  if (static_cast<int64_t>(connections_.size()) >= limit_) return Verdict::kTooMany;
  const auto it = origins_.find(origin);
  const int64_t of_origin = it == origins_.end() ? 0 : it->second;
  return of_origin >= limit_per_origin_ ? Verdict::kTooManyOfOrigin : Verdict::kAdmitted;
}

OpenConnections::Verdict OpenConnections::Add(int fd, const std::string& origin) {
  MutexLock lock(&mu_);
  Forget(fd);  // the kernel gave out the number again, so the one before is closed
  Verdict verdict = CheckLimits(origin);
  if (verdict != Verdict::kAdmitted && absl::Now() - swept_ >= kBetweenSweeps) {
    Sweep();
    verdict = CheckLimits(origin);
  }
  if (verdict != Verdict::kAdmitted) return verdict;
  connections_.emplace(fd, Entry{.cookie = SocketCookie(fd), .origin = origin});
  ++origins_[origin];
  return verdict;
}

void OpenConnections::Remove(int fd) {
  MutexLock lock(&mu_);
  Forget(fd);
}

void OpenConnections::Forget(int fd) {
  const auto it = connections_.find(fd);
  if (it == connections_.end()) return;
  const auto origin = origins_.find(it->second.origin);
  if (--origin->second == 0) origins_.erase(origin);
  connections_.erase(it);
}

void OpenConnections::Sweep() {
  std::vector<int> closed;
  for (const auto& [fd, entry] : connections_) {
    if (SocketCookie(fd) != entry.cookie) closed.push_back(fd);
  }
  for (const int fd : closed) Forget(fd);
  swept_ = absl::Now();
}

int64_t OpenConnections::Count() {
  MutexLock lock(&mu_);
  Sweep();
  return static_cast<int64_t>(connections_.size());
}

bool OpenConnections::AllSent() {
  MutexLock lock(&mu_);
  Sweep();
  return std::none_of(connections_.begin(), connections_.end(),
                      [](const auto& entry) { return HasUnacknowledged(entry.first); });
}

void OpenConnections::EndAll() {
  MutexLock lock(&mu_);
  Sweep();
  for (const auto& [fd, entry] : connections_) {
    // gRPC need not read what it has not read by now.
    if (CountWaitingCalls(fd) > 0) {
      ResetConnection(fd, entry.cookie);
    } else {
      shutdown(fd, SHUT_RDWR);
    }
  }
}

OpenConnections::Crowd OpenConnections::ResetCrowd(const std::string& origin, int64_t per_peer,
                                                   int64_t few) {
  Crowd crowd;
  std::vector<std::pair<int, uint64_t>> crowded;
  MutexLock lock(&mu_);
  const auto found = origins_.find(origin);
  if (found == origins_.end()) return crowd;
  const int64_t allowed = per_peer + few * found->second;
  for (const auto& [fd, entry] : connections_) {
    if (entry.origin != origin || SocketCookie(fd) != entry.cookie) continue;
    const int64_t waiting = CountWaitingCalls(fd);
    crowd.waiting += waiting;
    if (waiting > few) crowded.emplace_back(fd, entry.cookie);
    if (crowd.waiting <= allowed) continue;
    // At once: gRPC takes call after call meanwhile.
    for (const auto& [number, cookie] : crowded)
      crowd.reset += ResetConnection(number, cookie) ? 1 : 0;
    crowded.clear();
  }
  return crowd;
}

std::vector<std::string> OpenConnections::OriginsOf(const std::string& peer) {
  if (peer != "unix") return {peer.substr(peer.find(':') + 1)};  // "ipv4:10.0.0.7"
  MutexLock lock(&mu_);
  std::vector<std::string> users;
  for (const auto& [origin, count] : origins_) {
    if (absl::StartsWith(origin, "user ")) users.push_back(origin);
  }
  return users;
}

bool OpenConnections::IsConnected(const std::string& peer) {
  if (!absl::StartsWith(peer, "ipv")) return true;
  MutexLock lock(&mu_);
  Sweep();
  return FindDescriptor(peer) >= 0;
}

absl::Duration OpenConnections::IdleTime(const std::string& peer) {
  MutexLock lock(&mu_);
  const int fd = FindDescriptor(peer);
  tcp_info info = {};
  socklen_t size = sizeof(info);
  if (fd < 0 || getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) {
    return absl::InfiniteDuration();
  }
  if (HasUnacknowledged(fd)) return absl::ZeroDuration();
  return absl::Milliseconds(std::min(info.tcpi_last_data_sent, info.tcpi_last_data_recv));
}

bool OpenConnections::ResetPeer(const std::string& peer) {
  MutexLock lock(&mu_);
  Sweep();
  const int fd = FindDescriptor(peer);
  return fd >= 0 && ResetConnection(fd, connections_.at(fd).cookie);
}

int OpenConnections::FindDescriptor(const std::string& peer) const {
  for (const auto& [fd, entry] : connections_) {
    if (IsPeer(fd, peer)) return fd;
  }
  return -1;
}

}  // namespace awqd::transport
