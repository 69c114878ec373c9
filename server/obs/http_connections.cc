// A list in order of arrival, and a thread that looks for those whose time is up.
#include "server/obs/http_connections.h"

#include <sys/socket.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "server/obs/logging.h"
#include "server/obs/origin.h"

namespace awqd::obs {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

HttpConnections::HttpConnections(const HttpLimits& limits)
    : limits_(limits), thread_([this] { Run(); }) {}

HttpConnections::~HttpConnections() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

HttpConnections::Entry* HttpConnections::Opened(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size);
  std::string peer = Origin(fd, address);
  MutexLock lock(&mu_);
  if (CountOf(peer) >= limits_.connections_per_peer) {
    EndOldestOf(peer);
  } else if (open_ >= limits_.connections) {
    EndOldestOfMost();
  }
  Entry& entry = entries_.emplace_back();
  entry.self = std::prev(entries_.end());
  entry.fd = fd;
  entry.peer = std::move(peer);
  entry.until = Clock::now() + absl::ToChronoNanoseconds(limits_.request_time);
  ++open_;
  changed_.NotifyAll();
  return &entry;
}

void HttpConnections::Answers(Entry* entry) {
  MutexLock lock(&mu_);
  entry->until = Clock::now() + absl::ToChronoNanoseconds(limits_.answer_time);
}

void HttpConnections::Closed(Entry* entry) {
  MutexLock lock(&mu_);
  open_ -= entry->ended ? 0 : 1;
  entries_.erase(entry->self);
}

void HttpConnections::End(Entry& entry) {
  shutdown(entry.fd, SHUT_RDWR);
  entry.ended = true;
  --open_;
}

int HttpConnections::CountOf(const std::string& peer) const {
  return static_cast<int>(std::count_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return !entry.ended && entry.peer == peer;
  }));
}

void HttpConnections::EndOldestOf(const std::string& peer) {
  const auto oldest = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return !entry.ended && entry.peer == peer;
  });
  if (oldest == entries_.end()) return;
  LogLimited(LogLevel::kWarning, "http connection closed: a new one needs its place",
             {{"peer", peer}});
  End(*oldest);
}

void HttpConnections::EndOldestOfMost() {
  std::map<std::string, int> counts;
  std::string most;
  for (const Entry& entry : entries_) {
    if (!entry.ended) ++counts[entry.peer];
  }
  for (const Entry& entry : entries_) {  // the peer that came first, of those that have as many
    if (!entry.ended && (most.empty() || counts[entry.peer] > counts[most])) most = entry.peer;
  }
  EndOldestOf(most);
}

void HttpConnections::Run() {
  MutexLock lock(&mu_);
  while (!stopping_) {
    const Clock::time_point now = Clock::now();
    Clock::time_point next = now + std::chrono::hours(1);
    for (Entry& entry : entries_) {
      if (entry.ended) continue;
      if (entry.until <= now) {
        End(entry);
      } else {
        next = std::min(next, entry.until);
      }
    }
    changed_.WaitUntil(&mu_, next);
  }
}

}  // namespace awqd::obs
