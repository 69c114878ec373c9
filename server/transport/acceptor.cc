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
constexpr uint8_t kSettings = 4;

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

// Answers a browser, or curl, that speaks plaintext to a port with TLS. A client of HTTP/2 gets no
// answer: gRPC's would connect again at once.
void AnswerPlaintext(int fd) {
  constexpr absl::string_view kAnswer =
      "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 22\r\n"
      "Connection: close\r\n\r\nThis port speaks TLS.\n";
  char request[4096];
  const ssize_t got = recv(fd, request, sizeof(request), MSG_DONTWAIT);
  const bool http2 = got >= 3 && std::memcmp(request, kPreface.data(), 3) == 0;
  if (!http2) (void)!send(fd, kAnswer.data(), kAnswer.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace

Acceptor::Acceptor(const Limits& limits)
    : limits_(limits),
      open_(LimitToDescriptors(limits.max_connections), limits.max_connections_per_peer) {}

void Acceptor::AddListener(UniqueFd socket, bool tls, HandOver hand_over) {
  auto listener = std::make_unique<Listener>();
  listener->tls = tls;
  listener->fd = std::move(socket);
  listener->ready = [this, own = listener.get()](uint32_t) { AcceptFrom(*own); };
  listener->hand_over = std::move(hand_over);
  listeners_.push_back(std::move(listener));
}

bool Acceptor::Watch(Source* source, uint32_t events) {
  epoll_event event = {.events = events, .data = {.ptr = source}};
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, source->fd.get(), &event) == 0;
}

absl::Status Acceptor::Start() {
  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  stop_ = {UniqueFd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), [this](uint32_t) { stopped_ = true; }};
  wake_ = {UniqueFd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), [this](uint32_t) { ResetCrowds(); }};
  spare_ = OpenSpare();
  bool ready = spare_.ok() && Watch(&stop_, EPOLLIN) && Watch(&wake_, EPOLLIN);
  for (const auto& listener : listeners_) ready = ready && Watch(listener.get(), EPOLLIN);
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
    Signal(stop_.fd);
    thread_.join();
  }
  for (const Pending& pending : pending_) open_.Remove(pending.fd.get());
  pending_.clear();
  listeners_.clear();
}

int Acceptor::PollTimeout() const {
  Clock::time_point due = paused_until_.value_or(Clock::time_point::max());
  if (!pending_.empty()) due = std::min(due, pending_.front().until);
  if (due == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(due - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

void Acceptor::Run() {
  while (!stopped_) {
    epoll_event events[kEvents];
    const int count = epoll_wait(epoll_.get(), events, kEvents, PollTimeout());
    for (int i = 0; i < count && !stopped_; ++i) {
      // A connection that there is no memory for is closed as its owner is destroyed.
      CatchExceptions([&] {
        static_cast<Source*>(events[i].data.ptr)->ready(events[i].events);
        return absl::OkStatus();
      }).IgnoreError();
    }
    CloseSilent();
    if (paused_until_ && Clock::now() >= *paused_until_) Resume();
  }
}

void Acceptor::AcceptFrom(const Listener& listener) {
  for (int i = 0; i < kAcceptsInARow; ++i) {
    UniqueFd fd(accept4(listener.fd.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd.ok()) {
      Admit(listener, std::move(fd));
    } else if (!HandleAcceptError(listener, errno)) {
      return;
    }
  }
}

bool Acceptor::HandleAcceptError(const Listener& listener, int error) {
  switch (error) {
    case EAGAIN:
      return false;
    case EMFILE:
    case ENFILE: {
      // The connection that has waited longest is closed, so that its client knows.
      spare_.Reset();
      UniqueFd refused(accept4(listener.fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
      const bool closed = refused.ok();
      // Before the client can see it, as with those that are too many.
      counts_.no_descriptor += closed ? 1 : 0;
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

void Acceptor::Admit(const Listener& listener, UniqueFd fd) {
  const std::string origin = obs::Origin(fd.get());
  if (origin.empty()) return;  // gone
  if (HasPenalty(origin)) {
    ++counts_.penalized;
    return;
  }
  const OpenConnections::Verdict verdict = open_.Add(fd.get(), origin);
  if (verdict != OpenConnections::Verdict::kAdmitted) {
    const bool of_all = verdict == OpenConnections::Verdict::kTooMany;
    ++(of_all ? counts_.too_many : counts_.too_many_of_origin);
    return obs::LogLimited(obs::LogLevel::kWarning,
                           of_all ? "connection closed: max_connections are open"
                                  : "connection closed: max_connections_per_peer are open",
                           {{"peer", origin}});
  }
  const auto pending = pending_.emplace(pending_.end());
  pending->fd = std::move(fd);
  pending->ready = [this, &listener, pending](uint32_t events) {
    ReadStart(listener, pending, events);
  };
  pending->until = Clock::now() + absl::ToChronoNanoseconds(limits_.handshake_timeout);
  if (Watch(&*pending, EPOLLIN | EPOLLRDHUP | EPOLLET)) return;
  open_.Remove(pending->fd.get());
  pending_.erase(pending);
}

void Acceptor::ReadStart(const Listener& listener, std::list<Pending>::iterator pending,
                         uint32_t events) {
  const int fd = pending->fd.get();
  FirstFrame start = CheckStart(fd);
  if (start == FirstFrame::kIncomplete) {
    if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) == 0) return;
    start = FirstFrame::kGone;  // nothing more will come
  }
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  if (start == FirstFrame::kComplete && CheckProtocol(listener, fd)) {
    ++counts_.handed_over;
    listener.hand_over(listener.fd.get(), pending->fd.Release());
  } else {
    open_.Remove(fd);
  }
  pending_.erase(pending);
}

bool Acceptor::CheckProtocol(const Listener& listener, int fd) {
  constexpr unsigned char kTlsHandshake =
      0x16;  // the first record's type; HTTP begins with a letter
  unsigned char first = 0;
  if (recv(fd, &first, 1, MSG_PEEK | MSG_DONTWAIT) != 1) return true;
  const bool tls = first == kTlsHandshake;
  if (tls == listener.tls) return true;
  ++(tls ? counts_.tls : counts_.plaintext);
  obs::LogRarely(obs::LogLevel::kWarning,
                 tls ? "connection refused: TLS on a port that speaks plaintext"
                     : "connection refused: plaintext on a port that speaks TLS",
                 {{"peer", obs::Origin(fd)}});
  // gRPC's answer to TLS tells the client that it is no TLS.
  if (!tls) AnswerPlaintext(fd);
  return tls;
}

void Acceptor::CloseSilent() {
  const Clock::time_point now = Clock::now();
  while (!pending_.empty() && pending_.front().until <= now) {
    ++counts_.silent;
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
      counts_.crowded += crowd.reset;
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
  if (!first && penalty.until <= now) {
    penalty.length = std::min(2 * penalty.length, kLongestPenalty);
  }
  penalty.until = now + penalty.length;
}

bool Acceptor::HasPenalty(const std::string& origin) {
  const auto it = penalties_.find(origin);
  return it != penalties_.end() && Clock::now() < it->second.until;
}

void Acceptor::WatchListeners(uint32_t events) {
  for (const auto& listener : listeners_) {
    epoll_event event = {.events = events, .data = {.ptr = static_cast<Source*>(listener.get())}};
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener->fd.get(), &event);
  }
}

void Acceptor::Pause() {
  ++counts_.pauses;
  paused_until_ = Clock::now() + kPause;
  WatchListeners(0);
}

void Acceptor::Resume() {
  paused_until_.reset();
  if (!spare_.ok()) spare_ = OpenSpare();
  WatchListeners(EPOLLIN);
}

}  // namespace awqd::transport
