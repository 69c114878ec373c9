// Counting connections that somebody else closes.
#include "server/transport/open_connections.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "server/transport/peer_socket.h"

namespace awqd::transport {
namespace {

// A look at 4096 connections takes 1 ms, and each connection past a limit asks for one.
constexpr absl::Duration kBetweenSweeps = absl::Milliseconds(20);

}  // namespace

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
  for (const auto& [fd, entry] : connections_) {
    // gRPC need not read what it has not read by now.
    if (WaitingCalls(fd) > 0) {
      Reset(fd, entry.cookie);
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
    if (entry.origin != origin || CookieOf(fd) != entry.cookie) continue;
    const int64_t waiting = WaitingCalls(fd);
    crowd.waiting += waiting;
    if (waiting > few) crowded.emplace_back(fd, entry.cookie);
    if (crowd.waiting <= allowed) continue;
    // At once: gRPC takes call after call meanwhile.
    for (const auto& [number, cookie] : crowded) crowd.reset += Reset(number, cookie) ? 1 : 0;
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

absl::Duration OpenConnections::StillFor(const std::string& peer) {
  MutexLock lock(&mu_);
  const int fd = DescriptorOf(peer);
  return fd < 0 ? absl::InfiniteDuration() : transport::StillFor(fd);
}

bool OpenConnections::Cut(const std::string& peer) {
  MutexLock lock(&mu_);
  Sweep();
  const int fd = DescriptorOf(peer);
  return fd >= 0 && Reset(fd, connections_.at(fd).cookie);
}

int OpenConnections::DescriptorOf(const std::string& peer) const {
  for (const auto& [fd, entry] : connections_) {
    if (IsPeer(fd, peer)) return fd;
  }
  return -1;
}

}  // namespace awqd::transport
