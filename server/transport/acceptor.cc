// One thread over epoll: accept, wait for the first frame, hand over.
#include "server/transport/acceptor.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/string_view.h"
#include "kernels/base/out_of_memory.h"
#include "server/obs/logging.h"
#include "server/obs/origin.h"

namespace awqd::transport {
namespace {

// Accepted in a row before connections that are waiting get their turn.
constexpr int kAcceptsInARow = 64;
constexpr int kEvents = 64;
// How long a peer whose connections were reset gets no new one: at first, and at most. The time
// doubles when it happens again before it is forgotten.
constexpr std::chrono::seconds kFirstPenalty(1), kLongestPenalty(8), kForgetPenalty(30);
// How long accepting pauses when not even the spare descriptor helps.
constexpr std::chrono::milliseconds kPause(100);

constexpr absl::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr size_t kFrameHeader = 9;
constexpr uint8_t kSettings = 4;
constexpr size_t kLargestFrame = 16384;  // that a peer may send unasked: RFC 9113, section 4.2

int64_t LimitToDescriptors(int64_t connections) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return connections;
  return std::min(connections, static_cast<int64_t>(limit.rlim_cur / 4 * 3));
}

void Signal(const UniqueFd& event) {
  const uint64_t one = 1;
  while (write(event.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

UniqueFd OpenSpare() { return UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

enum class FirstFrame { kIncomplete, kComplete, kGone };

// Complete: the client's preface and the whole SETTINGS frame behind it are there, or bytes that
// begin differently (TLS, or a mistake).
FirstFrame CheckStart(int fd) {
  char bytes[kPreface.size() + kFrameHeader];
  const ssize_t got = recv(fd, bytes, sizeof(bytes), MSG_PEEK | MSG_DONTWAIT);
  if (got == 0) return FirstFrame::kGone;
  if (got < 0) {
    const bool later = errno == EAGAIN || errno == EINTR;
    return later ? FirstFrame::kIncomplete : FirstFrame::kGone;
  }
  const auto size = static_cast<size_t>(got);
  const size_t common = std::min(size, kPreface.size());
  if (std::memcmp(bytes, kPreface.data(), common) != 0) return FirstFrame::kComplete;
  if (size < sizeof(bytes)) return FirstFrame::kIncomplete;
  const auto* frame = reinterpret_cast<const uint8_t*>(bytes) + kPreface.size();
  const size_t payload = size_t{frame[0]} << 16 | size_t{frame[1]} << 8 | frame[2];
  if (frame[3] != kSettings || payload > kLargestFrame) return FirstFrame::kComplete;
  int there = 0;
  if (ioctl(fd, FIONREAD, &there) != 0) return FirstFrame::kGone;
  const bool whole = static_cast<size_t>(there) >= sizeof(bytes) + payload;
  return whole ? FirstFrame::kComplete : FirstFrame::kIncomplete;
}

}  // namespace

Acceptor::Acceptor(const Limits& limits)
    : limits_(limits),
      open_(LimitToDescriptors(limits.max_connections), limits.max_connections_per_peer) {}

void Acceptor::AddListener(UniqueFd socket, HandOver hand_over) {
  auto listener = std::make_unique<Listener>();
  listener->fd = std::move(socket);
  listener->hand_over = std::move(hand_over);
  listeners_.push_back(std::move(listener));
}

absl::Status Acceptor::Start() {
  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  stop_ = UniqueFd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  wake_.fd = UniqueFd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  spare_ = OpenSpare();
  epoll_event wake = {.events = EPOLLIN, .data = {.ptr = static_cast<EventSource*>(&wake_)}};
  epoll_event stop = {.events = EPOLLIN, .data = {.ptr = nullptr}};
  bool ready = epoll_.ok() && stop_.ok() && wake_.fd.ok() && spare_.ok() &&
               epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.fd.get(), &wake) == 0 &&
               epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, stop_.get(), &stop) == 0;
  for (const auto& listener : listeners_) {
    epoll_event event = {.events = EPOLLIN,
                         .data = {.ptr = static_cast<EventSource*>(listener.get())}};
    ready = ready && epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener->fd.get(), &event) == 0;
  }
  if (!ready) {
    return absl::ResourceExhaustedError(
        "address: the process has no file descriptors left to accept connections with");
  }
  try {
    thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error&) {
    return absl::ResourceExhaustedError("address: no thread to accept connections with");
  }
  return absl::OkStatus();
}

void Acceptor::Stop() {
  if (thread_.joinable()) {
    Signal(stop_);
    thread_.join();
  }
  for (const Pending& pending : pending_) open_.Remove(pending.fd.get());
  pending_.clear();
  listeners_.clear();
}

Acceptor::Counts Acceptor::counts() const {
  return {.handed_over = handed_over_,
          .too_many = too_many_,
          .too_many_of_origin = too_many_of_origin_,
          .no_descriptor = no_descriptor_,
          .silent = silent_,
          .pauses = pauses_,
          .crowded = reset_,
          .penalized = penalized_};
}

int Acceptor::PollTimeout() const {
  Clock::time_point due = Clock::time_point::max();
  if (paused_) due = paused_until_;
  if (!pending_.empty()) due = std::min(due, pending_.front().until);
  if (due == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(due - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

void Acceptor::Run() {
  for (;;) {
    epoll_event events[kEvents];
    const int count = epoll_wait(epoll_.get(), events, kEvents, PollTimeout());
    for (int i = 0; i < count; ++i) {
      auto* const source = static_cast<EventSource*>(events[i].data.ptr);
      if (source == nullptr) return;
      // A connection that there is no memory for is closed as its owner is destroyed.
      CatchExceptions([&] {
        source->Ready(this, events[i].events);
        return absl::OkStatus();
      }).IgnoreError();
    }
    CloseSilent();
    if (paused_ && Clock::now() >= paused_until_) Resume();
  }
}

void Acceptor::AcceptFrom(Listener& listener) {
  for (int i = 0; i < kAcceptsInARow; ++i) {
    UniqueFd fd(accept4(listener.fd.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd.ok()) {
      Admit(listener, std::move(fd));
    } else if (!HandleAcceptError(listener, errno)) {
      return;
    }
  }
}

bool Acceptor::HandleAcceptError(Listener& listener, int error) {
  switch (error) {
    case EAGAIN:
      return false;
    case EMFILE:
    case ENFILE: {
      // The connection that has waited longest is closed, so that its client knows.
      spare_.Reset();
      UniqueFd refused(accept4(listener.fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
      const bool closed = refused.ok();
      no_descriptor_ +=
          closed ? 1 : 0;  // before the client can see it, as with those that are too many
      refused.Reset();
      spare_ = OpenSpare();
      obs::LogLimited(obs::LogLevel::kWarning, "no file descriptors are left for a connection", {});
      if (closed && spare_.ok()) return true;
      break;
    }
    case EINTR:
    case ECONNABORTED:
    case EPROTO:
      return true;  // about one connection, which is gone
    default:
      break;
  }
  Pause();
  return false;
}

void Acceptor::Admit(Listener& listener, UniqueFd fd) {
  sockaddr_storage peer = {};
  socklen_t size = sizeof(peer);
  if (getpeername(fd.get(), reinterpret_cast<sockaddr*>(&peer), &size) != 0) return;  // gone
  const std::string origin = obs::Origin(fd.get(), peer);
  if (HasPenalty(origin)) {
    ++penalized_;
    return;
  }
  switch (open_.Add(fd.get(), origin)) {
    case OpenConnections::Verdict::kTooMany:
      ++too_many_;
      return obs::LogLimited(obs::LogLevel::kWarning, "connection closed: max_connections are open",
                             {{"peer", origin}});
    case OpenConnections::Verdict::kTooManyOfOrigin:
      ++too_many_of_origin_;
      return obs::LogLimited(obs::LogLevel::kWarning,
                             "connection closed: max_connections_per_peer are open",
                             {{"peer", origin}});
    case OpenConnections::Verdict::kAdmitted:
      break;
  }
  Pending& pending = pending_.emplace_back();
  pending.self = std::prev(pending_.end());
  pending.fd = std::move(fd);
  pending.listener = &listener;
  pending.until = Clock::now() + absl::ToChronoNanoseconds(limits_.handshake_timeout);
  epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET,
                       .data = {.ptr = static_cast<EventSource*>(&pending)}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, pending.fd.get(), &event) == 0) return;
  open_.Remove(pending.fd.get());
  pending_.pop_back();
}

void Acceptor::ReadStart(Pending& pending, uint32_t events) {
  const int fd = pending.fd.get();
  FirstFrame start = CheckStart(fd);
  if (start == FirstFrame::kIncomplete) {
    if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) == 0) return;
    start = FirstFrame::kGone;  // nothing more will come
  }
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  if (start == FirstFrame::kComplete) {
    ++handed_over_;
    pending.listener->hand_over(pending.listener->fd.get(), pending.fd.Release());
  } else {
    open_.Remove(fd);
  }
  pending_.erase(pending.self);
}

void Acceptor::CloseSilent() {
  const Clock::time_point now = Clock::now();
  while (!pending_.empty() && pending_.front().until <= now) {
    ++silent_;
    obs::LogLimited(obs::LogLevel::kWarning,
                    "connection closed: no HTTP/2 settings came in handshake_timeout_s", {});
    open_.Remove(pending_.front().fd.get());
    pending_.pop_front();
  }
}

void Acceptor::CheckForCrowd(const std::string& peer) {
  MutexLock lock(&mu_);
  if (crowded_peers_.insert(peer).second) Signal(wake_.fd);
}

void Acceptor::ResetCrowds() {
  uint64_t signals = 0;
  (void)!read(wake_.fd.get(), &signals, sizeof(signals));
  std::set<std::string> peers;
  {
    MutexLock lock(&mu_);
    peers.swap(crowded_peers_);
  }
  for (const std::string& peer : peers) {
    for (const std::string& origin : open_.OriginsOf(peer)) {
      const OpenConnections::Crowd crowd =
          open_.ResetCrowd(origin, limits_.calls_per_peer, limits_.few_calls);
      if (crowd.reset == 0) continue;
      reset_ += crowd.reset;
      Penalize(origin);
      obs::LogLimited(obs::LogLevel::kWarning,
                      "connections reset: more calls wait in them than one peer may have",
                      {{"peer", origin}, {"connections", crowd.reset}, {"calls", crowd.waiting}});
    }
  }
}

void Acceptor::Penalize(const std::string& origin) {
  const Clock::time_point now = Clock::now();
  std::erase_if(penalties_,
                [now](const auto& entry) { return entry.second.until + kForgetPenalty <= now; });
  const auto [it, first] = penalties_.try_emplace(origin, Penalty{.length = kFirstPenalty});
  Penalty& penalty = it->second;
  // Connections that were on the way when the penalty began are part of the same crowd.
  if (!first && penalty.until <= now)
    penalty.length = std::min(2 * penalty.length, kLongestPenalty);
  penalty.until = now + penalty.length;
}

bool Acceptor::HasPenalty(const std::string& origin) {
  const auto it = penalties_.find(origin);
  return it != penalties_.end() && Clock::now() < it->second.until;
}

void Acceptor::WatchListeners(uint32_t events) {
  for (const auto& listener : listeners_) {
    epoll_event event = {.events = events,
                         .data = {.ptr = static_cast<EventSource*>(listener.get())}};
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener->fd.get(), &event);
  }
}

void Acceptor::Pause() {
  ++pauses_;
  paused_ = true;
  paused_until_ = Clock::now() + kPause;
  WatchListeners(0);
}

void Acceptor::Resume() {
  paused_ = false;
  if (!spare_.ok()) spare_ = OpenSpare();
  WatchListeners(EPOLLIN);
}

}  // namespace awqd::transport
