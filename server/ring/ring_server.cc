// The socket, its frames, and the thread.
#include "server/ring/ring_server.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/spin.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/obs/origin.h"
#include "server/ring/chain.h"

namespace awqd::ring {
namespace {

constexpr char kOpenMethod[] = "awqd.ring.Ring/Open";

// How often the sockets are looked at while there is traffic.
constexpr absl::Duration kSocketPeriod = absl::Microseconds(200);
// How long no connection is accepted after descriptors ran out.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);
// Read from one socket at a time.
constexpr size_t kReadBytes = 64 << 10;
// The longest token.
constexpr uint32_t kMaxTokenBytes = 8 << 10;

// Reads a struct from the beginning of bytes that are long enough.
template <typename T>
T ReadStruct(absl::string_view bytes) {
  T out;
  std::memcpy(&out, bytes.data(), sizeof(T));
  return out;
}

template <typename T>
absl::string_view BytesOf(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

// Whether all of the first frame is there, or it is one that ends the connection.
bool HasFrame(absl::string_view input) {
  if (input.size() < sizeof(Frame)) return false;
  const uint32_t bytes = ReadStruct<Frame>(input).bytes;
  return bytes > kMaxBodyBytes || input.size() >= sizeof(Frame) + bytes;
}

}  // namespace

// A client of the socket, and its ring once it has one.
struct RingServer::Connection {
  UniqueFd socket;
  UniqueFd event;      // the ring's
  std::string origin;  // "user 1000"
  std::string client;  // an identity, or the origin
  absl::Time opened;
  std::string input;            // read and not handled
  UniqueFd descriptor;          // came with it, the last one; kShare takes it
  std::shared_ptr<void> place;  // until the ring has it
  std::shared_ptr<Ring> ring;
  security::IdentityPtr identity;
  std::map<std::string, std::shared_ptr<void>, std::less<>> regions;  // shared by this connection
  std::string ended;                                                  // why; empty: it goes on
};

// A thread, and the connections that it serves.
class RingServer::Loop {
 public:
  explicit Loop(RingServer* server) : server_(*server) {}

  // `listens`: it accepts connections for all.
  absl::Status Start(bool listens);
  void Wake() { eventfd_write(wake_.get(), 1); }
  void Join() {
    if (thread_.joinable()) thread_.join();
  }
  int64_t prepared() const { return prepared_.load(std::memory_order_relaxed); }

 private:
  void Run();
  // Starts what is submitted. True: there was something.
  bool PollRings();
  // Waits for sockets and eventfds for `timeout`, and handles them.
  void PollSockets(absl::Duration timeout);
  // True: something was submitted before it slept.
  bool Sleep();
  void AcceptConnections();
  // Another thread's connection becomes this one's.
  void Hand(std::unique_ptr<Connection> connection);
  void AddHanded();
  void ReadSocket(Connection* connection);
  // Handles the first frame that was read, if all of it was.
  void HandleFrame(Connection* connection);
  absl::Status OpenRing(Connection* connection, absl::string_view body);
  absl::Status ShareMemory(Connection* connection, absl::string_view body);
  void Reply(Connection* connection, const absl::Status& status, uint64_t value,
             absl::string_view body);
  void SendFrame(Connection* connection, const Frame& frame, absl::string_view body,
                 bool with_descriptors = false);
  // Ends connections that failed, and those that opened no ring in time.
  void DropConnections();
  void SetSleeping(uint32_t sleeping);

  RingServer& server_;
  UniqueFd epoll_, wake_;
  std::list<std::unique_ptr<Connection>> connections_;  // of the thread
  absl::Time accept_again_ = absl::InfinitePast();      // no descriptor was left before
  bool accepting_ = true;
  std::atomic<int64_t> load_{0};  // connections, those that were handed over too
  std::atomic<int64_t> prepared_{0};
  Mutex mu_;
  std::vector<std::unique_ptr<Connection>> handed_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

RingServer::RingServer(const Options& options, transport::Admission* admission,
                       transport::CallLoop* loop, Prepare prepare, Share share)
    : options_(options),
      admission_(admission),
      loop_(loop),
      prepare_(std::move(prepare)),
      share_(std::move(share)),
      empty_(admission->AddMethod("awqd.ring.Ring/Empty", security::Need::kInfer)),
      chains_(admission->AddMethod("awqd.ring.QuantizedInference/Chain", security::Need::kInfer)) {
  for (int i = 0; i < options.threads; ++i) loops_.push_back(std::make_unique<Loop>(this));
}

RingServer::~RingServer() { Stop(); }

absl::Status RingServer::Start(mode_t mode, absl::Duration handshake_timeout) {
  handshake_timeout_ = handshake_timeout;
  AWQD_ASSIGN_OR_RETURN(listening_, transport::ListenOnPath(options_.path, mode));
  // The first one may hand connections to the others at once.
  for (size_t i = loops_.size(); i > 0; --i) AWQD_RETURN_IF_ERROR(loops_[i - 1]->Start(i == 1));
  obs::LogEvent(obs::LogLevel::kInfo, "rings", {{"path", obs::LogText(options_.path, 1024)}});
  return absl::OkStatus();
}

void RingServer::Stop() {
  if (stopping_.exchange(true)) return;
  for (const auto& loop : loops_) loop->Wake();
  for (const auto& loop : loops_) loop->Join();
  listening_ = {};
  MutexLock lock(&places_->mu);
  while (places_->all > 0) places_->changed.Wait(&places_->mu);
}

obs::RingStats RingServer::statistics() const {
  obs::RingStats out = {.refused = refused_.load(std::memory_order_relaxed),
                        .broken = broken_.load(std::memory_order_relaxed),
                        .sleeps = sleeps_.load(std::memory_order_relaxed)};
  for (const auto& loop : loops_) out.prepared_calls += loop->prepared();
  MutexLock lock(&places_->mu);
  out.rings = places_->all;
  return out;
}

absl::StatusOr<std::shared_ptr<void>> RingServer::TakePlace(const std::string& client,
                                                            bool of_all) {
  {
    MutexLock lock(&places_->mu);
    const auto known = places_->of_client.find(client);
    const int64_t own = known == places_->of_client.end() ? 0 : known->second;
    if ((of_all && places_->all >= options_.max_rings) || own >= options_.max_rings_per_client) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "rings: got one more than the ", own, " of ", obs::LogText(client), " and the ",
          places_->all, " of all, expected at most ", options_.max_rings_per_client,
          " (max_rings_per_client) and ", options_.max_rings, " (max_rings)"));
    }
    ++places_->of_client[client];
    places_->all += of_all ? 1 : 0;
  }
  return std::shared_ptr<void>(nullptr, [places = places_, client, of_all](void*) {
    MutexLock lock(&places->mu);
    const auto own = places->of_client.find(client);
    if (--own->second == 0) places->of_client.erase(own);
    if (of_all && --places->all == 0) places->changed.NotifyAll();
  });
}

// --- The threads ---

absl::Status RingServer::Loop::Start(bool listens) {
  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event listener = {.events = EPOLLIN, .data = {.ptr = &server_.listening_}};
  epoll_event wake = {.events = EPOLLIN | EPOLLET, .data = {.ptr = nullptr}};
  if (!epoll_.ok() || !wake_.ok() ||
      epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &wake) != 0 ||
      (listens && epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, server_.listening_.sockets[0].get(),
                            &listener) != 0)) {
    return absl::UnavailableError(absl::StrCat("cannot wait for connections: ", strerror(errno)));
  }
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

void RingServer::Loop::Run() {
  server_.loop_->JoinThread(/*gathers=*/true);
  absl::Time busy = absl::InfinitePast();    // the last submission
  absl::Time polled = absl::InfinitePast();  // of the sockets
  int polls = 0;                             // in vain, in a row
  while (!server_.stopping_) {
    const bool found = PollRings();
    const bool more = server_.loop_->RunSubmitted();
    const absl::Time now = absl::Now();
    if (found || more) busy = now;
    if (now - polled >= kSocketPeriod) {
      polled = now;
      PollSockets(absl::ZeroDuration());
    }
    if (found || more) {
      polls = 0;
      continue;
    }
    const bool waiting =
        std::any_of(connections_.begin(), connections_.end(),
                    [](const auto& connection) { return HasFrame(connection->input); });
    if (now - busy < server_.options_.spin || waiting) {
      Relax(++polls);
    } else if (Sleep()) {
      busy = absl::Now();
    }
  }
  for (const auto& connection : connections_) {
    if (connection->ring != nullptr) connection->ring->Close();
  }
  while (server_.loop_->RunSubmitted()) {
  }
  connections_.clear();
  MutexLock lock(&mu_);
  handed_.clear();
}

bool RingServer::Loop::PollRings() {
  bool found = false;
  for (const auto& connection : connections_) {
    if (connection->ring == nullptr || !connection->ended.empty()) continue;
    const absl::StatusOr<int> started = connection->ring->TakeSubmissions();
    if (started.ok()) {
      found |= *started > 0;
    } else {
      connection->ended = std::string(started.status().message());
      server_.broken_.fetch_add(1, std::memory_order_relaxed);
    }
  }
  return found;
}

void RingServer::Loop::SetSleeping(uint32_t sleeping) {
  for (const auto& connection : connections_) {
    if (connection->ring != nullptr) connection->ring->memory()->header()->sleeping = sleeping;
  }
}

bool RingServer::Loop::Sleep() {
  // A client stores its tail before it looks at `sleeping`, so either it writes the eventfd or this
  // finds the submission. All four are sequentially consistent.
  SetSleeping(1);
  const bool found = PollRings();
  if (!found) {
    server_.sleeps_.fetch_add(1, std::memory_order_relaxed);
    absl::Duration timeout = absl::InfiniteDuration();
    if (!accepting_) timeout = kAcceptPause;
    for (const auto& connection : connections_) {
      // Its client may wait, and nothing else may wake this thread to drop it.
      if (!connection->ended.empty()) timeout = absl::ZeroDuration();
      if (connection->ring != nullptr) continue;
      timeout = std::min(timeout, connection->opened + server_.handshake_timeout_ - absl::Now());
    }
    PollSockets(std::max(timeout, absl::Milliseconds(1)));
  }
  SetSleeping(0);
  return found;
}

void RingServer::Loop::PollSockets(absl::Duration timeout) {
  if (!accepting_ && absl::Now() >= accept_again_) {
    epoll_event listener = {.events = EPOLLIN, .data = {.ptr = &server_.listening_}};
    accepting_ =
        epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, server_.listening_.sockets[0].get(), &listener) == 0;
  }
  std::array<epoll_event, 64> events;
  const int wait_ms =
      timeout == absl::InfiniteDuration()
          ? -1
          : static_cast<int>(absl::ToInt64Milliseconds(std::min(timeout, absl::Seconds(60))));
  const int count = epoll_wait(epoll_.get(), events.data(), events.size(), wait_ms);
  for (int i = 0; i < count; ++i) {
    void* const source = events[i].data.ptr;
    if (source == &server_.listening_) {
      AcceptConnections();
    } else if (source != nullptr) {
      ReadSocket(static_cast<Connection*>(source));
    }
  }
  AddHanded();
  // One frame of each at a time: no client's frames hold the rings of others up.
  for (const auto& connection : connections_) {
    if (connection->ended.empty()) HandleFrame(connection.get());
    // It came with a whole frame or with none. Kept, it could be the client's end of this
    // connection, which would never end then.
    if (!HasFrame(connection->input)) connection->descriptor.Reset();
  }
  DropConnections();
}

// --- Connections ---

void RingServer::Loop::AcceptConnections() {
  sockaddr_storage peer = {};
  socklen_t length = sizeof(peer);
  UniqueFd socket(accept4(server_.listening_.sockets[0].get(), reinterpret_cast<sockaddr*>(&peer),
                          &length, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.ok()) {
    if (errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS) return;
    epoll_event none = {.events = 0, .data = {.ptr = &server_.listening_}};
    accepting_ =
        epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, server_.listening_.sockets[0].get(), &none) != 0;
    accept_again_ = absl::Now() + kAcceptPause;
    return;
  }
  auto connection = std::make_unique<Connection>();
  connection->opened = absl::Now();
  connection->origin = connection->client = obs::Origin(socket.get(), peer);
  connection->socket = std::move(socket);
  absl::StatusOr<std::shared_ptr<void>> place = server_.TakePlace(connection->origin, true);
  if (!place.ok()) {
    server_.refused_.fetch_add(1, std::memory_order_relaxed);
    return Reply(connection.get(), place.status(), 0, "");
  }
  connection->place = *std::move(place);
  const auto& loops = server_.loops_;
  const auto target =
      std::min_element(loops.begin(), loops.end(), [](const auto& a, const auto& b) {
        return a->load_.load(std::memory_order_relaxed) < b->load_.load(std::memory_order_relaxed);
      });
  (*target)->Hand(std::move(connection));
}

void RingServer::Loop::Hand(std::unique_ptr<Connection> connection) {
  load_.fetch_add(1, std::memory_order_relaxed);
  {
    MutexLock lock(&mu_);
    handed_.push_back(std::move(connection));
  }
  Wake();
}

void RingServer::Loop::AddHanded() {
  std::vector<std::unique_ptr<Connection>> handed;
  {
    MutexLock lock(&mu_);
    handed.swap(handed_);
  }
  for (std::unique_ptr<Connection>& connection : handed) {
    epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data = {.ptr = connection.get()}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection->socket.get(), &event) == 0) {
      connections_.push_back(std::move(connection));
    } else {
      load_.fetch_sub(1, std::memory_order_relaxed);
    }
  }
}

void RingServer::Loop::ReadSocket(Connection* connection) {
  if (!connection->ended.empty()) return;
  // Whoever sends faster than frames are handled waits.
  if (connection->input.size() >= sizeof(Frame) + kMaxBodyBytes) return;
  std::array<char, kReadBytes> bytes;
  iovec part = {bytes.data(), bytes.size()};
  // Room for one descriptor: the system closes those beyond it.
  alignas(cmsghdr) char control[CMSG_LEN(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = recvmsg(connection->socket.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  const cmsghdr* const header = got >= 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == sizeof(control)) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
    connection->descriptor.Reset(fd);
  }
  if (got > 0) {
    connection->input.append(bytes.data(), static_cast<size_t>(got));
  } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
    connection->ended = "the client has gone";
  }
}

void RingServer::Loop::HandleFrame(Connection* connection) {
  if (!HasFrame(connection->input)) return;
  const auto frame = ReadStruct<Frame>(connection->input);
  if (frame.bytes > kMaxBodyBytes) {
    connection->ended = absl::StrCat("a frame of ", frame.bytes, " bytes");
    return;
  }
  const std::string body = connection->input.substr(sizeof(Frame), frame.bytes);
  connection->input.erase(0, sizeof(Frame) + frame.bytes);
  const bool has_ring = connection->ring != nullptr;
  absl::StatusOr<uint64_t> value = absl::InvalidArgumentError(absl::StrCat(
      "kind: got ", frame.kind,
      has_ring ? ", expected kPrepare, kRelease, kShare or kUnshare" : ", expected kOpen"));
  PreparedBody prepared = {};
  absl::string_view reply;
  const absl::Status handled = CatchExceptions([&]() -> absl::Status {
    if (!has_ring && frame.kind == kOpen) return OpenRing(connection, body);
    if (has_ring && frame.kind == kPrepare) {
      Ring& ring = *connection->ring;
      AWQD_ASSIGN_OR_RETURN(PreparedPtr call,
                            frame.value == kChain
                                ? MakeChain(ring, body, server_.chains_)
                                : server_.prepare_(frame.value, body, ring.charge()));
      prepared = call->body();
      reply = BytesOf(prepared);
      AWQD_ASSIGN_OR_RETURN(value, connection->ring->AddPrepared(std::move(call)));
    } else if (has_ring && frame.kind == kRelease) {
      value = 0;
      return connection->ring->Release(frame.value);
    } else if (has_ring && frame.kind == kShare) {
      value = 0;
      return ShareMemory(connection, body);
    } else if (has_ring && frame.kind == kUnshare) {
      value = 0;
      const auto region = connection->regions.find(body);
      if (region == connection->regions.end()) {
        return absl::NotFoundError(absl::StrCat("region: got \"", obs::LogText(body, 64),
                                                "\", expected one that this ring shares"));
      }
      connection->regions.erase(region);
    }
    return value.status();
  });
  if (!handled.ok()) {
    Reply(connection, handled, 0, "");
    if (!has_ring) connection->ended = "no ring was opened";
  } else if (has_ring) {
    Reply(connection, handled, *value, reply);
  }
}

absl::Status RingServer::Loop::OpenRing(Connection* connection, absl::string_view body) {
  const auto refuse = [this](absl::Status status) {
    server_.refused_.fetch_add(1, std::memory_order_relaxed);
    return status;
  };
  if (body.size() < sizeof(OpenBody) || body.size() > sizeof(OpenBody) + kMaxTokenBytes) {
    return refuse(absl::InvalidArgumentError(
        absl::StrCat("open: got ", body.size(), " bytes, expected ", sizeof(OpenBody),
                     " and a token of at most ", kMaxTokenBytes)));
  }
  const auto open = ReadStruct<OpenBody>(body);
  const absl::string_view authorization = body.substr(sizeof(OpenBody));
  if (open.version != kVersion) {
    return refuse(absl::UnimplementedError(
        absl::StrCat("version: got ", open.version, ", expected ", kVersion)));
  }
  if (open.slots > kMaxSlots || !std::has_single_bit(open.slots)) {
    return refuse(absl::InvalidArgumentError(absl::StrCat(
        "slots: got ", open.slots, ", expected a power of two of at most ", kMaxSlots)));
  }
  if (open.payload_bytes > static_cast<uint64_t>(server_.options_.max_bytes)) {
    return refuse(absl::ResourceExhaustedError(
        absl::StrCat("payload_bytes: got ", open.payload_bytes, ", expected at most ",
                     server_.options_.max_bytes, " (max_ring_bytes)")));
  }
  security::Credentials shown;
  if (!authorization.empty()) shown.authorizations.emplace_back(authorization);
  auto identity = server_.admission_->access().Admit(kOpenMethod, security::Need::kInfer, shown);
  if (!identity.ok()) return refuse(identity.status());
  if (*identity != nullptr && (*identity)->name != connection->client) {
    // It is one of its user's and one of its own.
    absl::StatusOr<std::shared_ptr<void>> place = server_.TakePlace((*identity)->name, false);
    if (!place.ok()) return refuse(place.status());
    connection->place = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(
        std::move(connection->place), *std::move(place));
    connection->client = (*identity)->name;
  }
  connection->identity = *identity;
  AWQD_ASSIGN_OR_RETURN(std::shared_ptr<Memory> memory,
                        Memory::Create(open.slots, open.payload_bytes));
  connection->event = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  // The counter is never read: edges wake the thread. Its client shares the description, and could
  // make a read block.
  epoll_event event = {.events = EPOLLIN | EPOLLET, .data = {.ptr = nullptr}};
  if (!connection->event.ok() ||
      epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection->event.get(), &event) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", strerror(errno)));
  }
  const uint64_t size = memory->size();
  connection->ring = std::make_shared<Ring>(
      std::move(memory), server_.admission_, server_.empty_,
      transport::RingClient{*std::move(identity), std::make_shared<transport::Connection>()},
      std::move(connection->place));
  SendFrame(connection, {.kind = kOk, .bytes = 0, .value = size}, "", /*with_descriptors=*/true);
  obs::LogLimited(obs::LogLevel::kInfo, "ring opened",
                  {{"client", obs::LogText(connection->client)},
                   {"origin", connection->origin},
                   {"slots", int64_t{open.slots}},
                   {"bytes", static_cast<int64_t>(size)}});
  return absl::OkStatus();
}

absl::Status RingServer::Loop::ShareMemory(Connection* connection, absl::string_view body) {
  AWQD_ASSIGN_OR_RETURN(
      RingServer::SharedRegion region,
      server_.share_(connection->identity, body, std::move(connection->descriptor)));
  connection->regions[std::move(region.name)] = std::move(region.held);
  return absl::OkStatus();
}

void RingServer::Loop::Reply(Connection* connection, const absl::Status& status, uint64_t value,
                             absl::string_view body) {
  if (!status.ok()) {
    value = static_cast<uint64_t>(status.code());
    body = absl::string_view(status.message()).substr(0, kReadBytes);
  }
  SendFrame(connection,
            {.kind = status.ok() ? kOk : kError,
             .bytes = static_cast<uint32_t>(body.size()),
             .value = value},
            body);
}

void RingServer::Loop::SendFrame(Connection* connection, const Frame& frame, absl::string_view body,
                                 bool with_descriptors) {
  iovec parts[2] = {{const_cast<Frame*>(&frame), sizeof(frame)},
                    {const_cast<char*>(body.data()), body.size()}};
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  alignas(cmsghdr) char control[CMSG_SPACE(3 * sizeof(int))] = {};
  UniqueFd events;
  if (with_descriptors) {
    events = connection->ring->memory()->TakeClientEvents();
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(3 * sizeof(int));
    const int fds[3] = {connection->ring->memory()->fd(), connection->event.get(), events.get()};
    std::memcpy(CMSG_DATA(header), fds, sizeof(fds));
  }
  const ssize_t sent = sendmsg(connection->socket.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  // Answers are small: whoever has so many unread that there is no room sends without reading.
  if (sent != static_cast<ssize_t>(sizeof(frame) + body.size())) {
    connection->ended = "the client does not read its answers";
  }
}

void RingServer::Loop::DropConnections() {
  const absl::Time now = absl::Now();
  int64_t prepared = 0;
  for (auto it = connections_.begin(); it != connections_.end();) {
    Connection& connection = **it;
    if (connection.ring == nullptr && now > connection.opened + server_.handshake_timeout_) {
      connection.ended = "no ring was opened in handshake_timeout_s";
    }
    if (connection.ended.empty()) {
      if (connection.ring != nullptr) prepared += connection.ring->prepared();
      ++it;
      continue;
    }
    if (connection.ring != nullptr) {
      connection.ring->Close();
      obs::LogLimited(obs::LogLevel::kInfo, "ring closed",
                      {{"client", obs::LogText(connection.client)},
                       {"reason", obs::LogText(connection.ended)}});
    }
    if (connection.event.ok()) {
      // Closing it alone would leave it watched: its client has it too.
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.event.get(), nullptr);
    }
    it = connections_.erase(it);
    load_.fetch_sub(1, std::memory_order_relaxed);
  }
  prepared_.store(prepared, std::memory_order_relaxed);
}

}  // namespace awqd::ring
