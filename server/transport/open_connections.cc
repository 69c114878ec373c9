// Counting connections that somebody else closes.
#include "server/transport/open_connections.h"

#include <arpa/inet.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"

namespace awqd::transport {
namespace {

// A look at 4096 connections takes 1 ms, and each connection past a limit asks for one.
constexpr absl::Duration kBetweenSweeps = absl::Milliseconds(20);

// 0 when `fd` is no socket.
uint64_t CookieOf(int fd) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

std::string Print(int family, const void* address) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(family, address, text, sizeof(text));
  return text;
}

// Whether gRPC calls the other end of `fd` so. It writes the brackets of IPv6 addresses one way or
// another.
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

}  // namespace

std::string Origin(int fd, const sockaddr_storage& peer) {
  if (peer.ss_family == AF_INET) {
    return Print(AF_INET, &reinterpret_cast<const sockaddr_in&>(peer).sin_addr);
  }
  if (peer.ss_family == AF_INET6) {
    in6_addr address = reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr;
    if (IN6_IS_ADDR_V4MAPPED(&address)) return Print(AF_INET, &address.s6_addr[12]);
    std::fill(address.s6_addr + 8, address.s6_addr + 16, 0);
    return absl::StrCat(Print(AF_INET6, &address), "/64");
  }
  ucred user = {};
  socklen_t size = sizeof(user);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &user, &size) != 0) return "user unknown";
  return absl::StrCat("user ", user.uid);
}

OpenConnections::Verdict OpenConnections::Judge(const std::string& origin) const {
  if (static_cast<int64_t>(connections_.size()) >= most_) return Verdict::kTooMany;
  const auto it = origins_.find(origin);
  const int64_t of_origin = it == origins_.end() ? 0 : it->second;
  return of_origin >= most_of_origin_ ? Verdict::kTooManyOfOrigin : Verdict::kWelcome;
}

OpenConnections::Verdict OpenConnections::Add(int fd, const std::string& origin) {
  MutexLock lock(&mu_);
  Forget(fd);  // the kernel gave out the number again, so the one before is closed
  Verdict verdict = Judge(origin);
  if (verdict != Verdict::kWelcome && absl::Now() - swept_ >= kBetweenSweeps) {
    Sweep();
    verdict = Judge(origin);
  }
  if (verdict != Verdict::kWelcome) return verdict;
  connections_.emplace(fd, Entry{.cookie = CookieOf(fd), .origin = origin});
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
    if (CookieOf(fd) != entry.cookie) closed.push_back(fd);
  }
  for (const int fd : closed) Forget(fd);
  swept_ = absl::Now();
}

int64_t OpenConnections::Count() {
  MutexLock lock(&mu_);
  Sweep();
  return static_cast<int64_t>(connections_.size());
}

void OpenConnections::Cut() {
  MutexLock lock(&mu_);
  Sweep();
  for (const auto& [fd, entry] : connections_) shutdown(fd, SHUT_RDWR);
}

absl::Duration OpenConnections::StillFor(const std::string& peer) {
  MutexLock lock(&mu_);
  const int fd = DescriptorOf(peer);
  return fd < 0 ? absl::InfiniteDuration() : transport::StillFor(fd);
}

bool OpenConnections::Cut(const std::string& peer) {
  MutexLock lock(&mu_);
  Sweep();
  const int fd = DescriptorOf(peer);
  return fd >= 0 && shutdown(fd, SHUT_RDWR) == 0;
}

int OpenConnections::DescriptorOf(const std::string& peer) const {
  for (const auto& [fd, entry] : connections_) {
    if (IsPeer(fd, peer)) return fd;
  }
  return -1;
}

}  // namespace awqd::transport
