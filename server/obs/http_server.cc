// Bounds the connections of an HTTP server, and passes its requests to the handler.
#include "server/obs/http_server.h"

#include <microhttpd.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <exception>
#include <iterator>
#include <list>
#include <map>
#include <new>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/mutex.h"
#include "server/obs/logging.h"
#include "server/obs/origin.h"

namespace awqd::obs {
namespace {

using Clock = std::chrono::steady_clock;

// Enforces HttpLimits by shutting sockets down. libmicrohttpd owns the descriptors and then closes
// them. A thread of its own watches the times. Thread-safe.
class HttpConnections {
 public:
  class Entry {
   private:
    friend class HttpConnections;
    int fd = -1;
    std::string peer;
    Clock::time_point deadline;
    bool ended = false;  // shut down, but not closed yet
    std::list<Entry>::iterator self;
  };

  explicit HttpConnections(const HttpLimits& limits);
  ~HttpConnections();
  HttpConnections(const HttpConnections&) = delete;
  HttpConnections& operator=(const HttpConnections&) = delete;

  // Adds a connection that was accepted as `fd`. The entry lives until RemoveConnection.
  Entry* AddConnection(int fd);
  // Starts the time of the answer; the request has arrived.
  void StartAnswer(Entry* entry);
  // Called before the descriptor is closed.
  void RemoveConnection(Entry* entry);

 private:
  void WatchDeadlines();
  void ShutDown(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int CountOpen(const std::string& peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ShutDownOldest(const std::string& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The peer with most open connections; of several, the one that came first.
  std::string BusiestPeer() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const HttpLimits limits_;
  Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::list<Entry> entries_ ABSL_GUARDED_BY(mu_);  // oldest first
  int open_ ABSL_GUARDED_BY(mu_) = 0;              // entries that have not ended
  std::thread thread_;
};

HttpConnections::HttpConnections(const HttpLimits& limits)
    : limits_(limits), thread_([this] { WatchDeadlines(); }) {}

HttpConnections::~HttpConnections() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

HttpConnections::Entry* HttpConnections::AddConnection(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size);
  std::string peer = Origin(fd, address);
  MutexLock lock(&mu_);
  if (CountOpen(peer) >= limits_.connections_per_peer) {
    ShutDownOldest(peer);
  } else if (open_ >= limits_.connections) {
    ShutDownOldest(BusiestPeer());
  }
  Entry& entry = entries_.emplace_back();
  entry.self = std::prev(entries_.end());
  entry.fd = fd;
  entry.peer = std::move(peer);
  entry.deadline = Clock::now() + absl::ToChronoNanoseconds(limits_.request_time);
  ++open_;
  changed_.NotifyAll();
  return &entry;
}

void HttpConnections::StartAnswer(Entry* entry) {
  MutexLock lock(&mu_);
  entry->deadline = Clock::now() + absl::ToChronoNanoseconds(limits_.answer_time);
}

void HttpConnections::RemoveConnection(Entry* entry) {
  MutexLock lock(&mu_);
  open_ -= entry->ended ? 0 : 1;
  entries_.erase(entry->self);
}

void HttpConnections::ShutDown(Entry& entry) {
  shutdown(entry.fd, SHUT_RDWR);
  entry.ended = true;
  --open_;
}

int HttpConnections::CountOpen(const std::string& peer) const {
  return static_cast<int>(std::count_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return !entry.ended && entry.peer == peer;
  }));
}

void HttpConnections::ShutDownOldest(const std::string& peer) {
  const auto oldest = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return !entry.ended && entry.peer == peer;
  });
  if (oldest == entries_.end()) return;
  LogLimited(LogLevel::kWarning, "http connection closed to make room for a new one",
             {{"peer", peer}});
  ShutDown(*oldest);
}

std::string HttpConnections::BusiestPeer() const {
  std::map<std::string, int> counts;
  for (const Entry& entry : entries_) {
    if (!entry.ended) ++counts[entry.peer];
  }
  std::string busiest;
  for (const Entry& entry : entries_) {
    if (entry.ended) continue;
    if (busiest.empty() || counts[entry.peer] > counts[busiest]) busiest = entry.peer;
  }
  return busiest;
}

void HttpConnections::WatchDeadlines() {
  MutexLock lock(&mu_);
  while (!stopping_) {
    const Clock::time_point now = Clock::now();
    Clock::time_point next = now + std::chrono::hours(1);
    for (Entry& entry : entries_) {
      if (entry.ended) continue;
      if (entry.deadline <= now) {
        ShutDown(entry);
      } else {
        next = std::min(next, entry.deadline);
      }
    }
    changed_.WaitUntil(&mu_, next);
  }
}

// The library accepts this many connections beyond HttpLimits::connections: some are shut down but
// not closed yet, and one of the library's threads may have more of them than the other.
constexpr unsigned kSpareConnections = 48;
// The largest size of a request line and its headers.
constexpr size_t kConnectionBytes = 32 << 10;

constexpr std::pair<const char*, const char*> kHeaders[] = {
    {"Cache-Control", "no-store"},
    {"X-Content-Type-Options", "nosniff"},
    {"Content-Security-Policy", "default-src 'self'; frame-ancestors 'none'"},
    {"Connection", "close"},
};

class MicroServer final : public HttpServer {
 public:
  MicroServer(HttpHandler handler, const HttpLimits& limits)
      : handler_(std::move(handler)),
        max_connections_(static_cast<unsigned>(limits.connections) + kSpareConnections),
        connections_(limits) {}
  ~MicroServer() override {
    if (daemon_ != nullptr) MHD_stop_daemon(daemon_);
  }

  // `address` has passed CheckHttpAddress.
  absl::Status Listen(const std::string& address) {
    const absl::Status failed =
        absl::UnavailableError(absl::StrCat("cannot listen on ", address, " over HTTP"));
    const size_t colon = address.rfind(':');
    std::string host = address.substr(0, colon);
    if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
    const addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE,
                            .ai_socktype = SOCK_STREAM};
    addrinfo* where = nullptr;
    if (getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &where) != 0) return failed;
    const absl::Cleanup free_where = [where] { freeaddrinfo(where); };
    // poll, because with epoll the library misses the end of a stream that arrives together with
    // bytes, and keeps the connection until it times out.
    unsigned flags = MHD_USE_POLL_INTERNAL_THREAD | MHD_USE_ITC | MHD_USE_ERROR_LOG;
    if (where->ai_family == AF_INET6) flags |= MHD_USE_IPv6;
    // Two threads, so that a slow handler does not delay a probe. Their stacks have the system's
    // default size, because the C library takes all thread-local variables from the stack, and
    // OpenBLAS alone has 60 KiB of them.
    // The logger is the first option, because later options may write lines.
    daemon_ = MHD_start_daemon(
        flags, 0, nullptr, nullptr, &Handle, this, MHD_OPTION_EXTERNAL_LOGGER, &Log, nullptr,
        MHD_OPTION_SOCK_ADDR, where->ai_addr, MHD_OPTION_THREAD_POOL_SIZE, 2U,
        MHD_OPTION_CONNECTION_LIMIT, max_connections_, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        kConnectionBytes, MHD_OPTION_NOTIFY_CONNECTION, &Notify, this, MHD_OPTION_END);
    if (daemon_ == nullptr) return failed;
    port_ = MHD_get_daemon_info(daemon_, MHD_DAEMON_INFO_BIND_PORT)->port;
    return absl::OkStatus();
  }

  int port() const override { return port_; }

 private:
  static void Log(void*, const char* format, va_list arguments) {
    char line[512];
    std::vsnprintf(line, sizeof(line), format, arguments);
    LogEvent(LogLevel::kDebug, "http", {{"message", LogText(line)}});
  }

  // The library calls this after it accepts a connection and before it closes the descriptor.
  static void Notify(void* server, MHD_Connection* connection, void** entry,
                     MHD_ConnectionNotificationCode code) {
    HttpConnections& connections = static_cast<MicroServer*>(server)->connections_;
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
      if (*entry != nullptr)
        connections.RemoveConnection(static_cast<HttpConnections::Entry*>(*entry));
      return;
    }
    const int fd =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    try {
      *entry = connections.AddConnection(fd);
    } catch (const std::bad_alloc&) {
      *entry = nullptr;
      shutdown(fd, SHUT_RDWR);
    }
  }

  static MHD_Result KeepAuthorization(void* request, MHD_ValueKind, const char* name,
                                      const char* value) {
    if (value != nullptr && absl::EqualsIgnoreCase(name, "authorization")) {
      static_cast<HttpRequest*>(request)->authorizations.emplace_back(value);
    }
    return MHD_YES;
  }

  // Answers without waiting for a body: GET and HEAD have none.
  static MHD_Result Handle(void* server, MHD_Connection* connection, const char* path,
                           const char* method, const char*, const char*, size_t*, void**) {
    HttpRequest request = {.path = path};
    MHD_get_connection_values(connection, MHD_HEADER_KIND, &KeepAuthorization, &request);
    const HttpAnswer answer = static_cast<MicroServer*>(server)->Answer(request, method);
    void* const entry =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
    if (entry == nullptr) return MHD_NO;  // the connection was shut down
    static_cast<MicroServer*>(server)->connections_.StartAnswer(
        static_cast<HttpConnections::Entry*>(entry));
    MHD_Response* const response = MHD_create_response_from_buffer(
        answer.body.size(), const_cast<char*>(answer.body.data()), MHD_RESPMEM_MUST_COPY);
    if (response == nullptr) return MHD_NO;
    MHD_add_response_header(response, "Content-Type", answer.type.c_str());
    for (const auto& [name, value] : kHeaders) MHD_add_response_header(response, name, value);
    if (answer.code == MHD_HTTP_UNAUTHORIZED) {
      MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
      // Browsers then ask their user for a password.
      MHD_add_response_header(response, "WWW-Authenticate", "Basic realm=\"awqd\"");
    }
    const MHD_Result result =
        MHD_queue_response(connection, static_cast<unsigned>(answer.code), response);
    MHD_destroy_response(response);
    return result;
  }

  HttpAnswer Answer(const HttpRequest& request, absl::string_view method) const {
    if (method != "GET" && method != "HEAD") return {.code = 405, .body = "GET and HEAD only\n"};
    try {
      return handler_(request);
    } catch (const std::exception& error) {
      return {.code = 500, .body = absl::StrCat(error.what(), "\n")};
    }
  }

  const HttpHandler handler_;
  const unsigned max_connections_;
  HttpConnections connections_;
  MHD_Daemon* daemon_ = nullptr;
  int port_ = 0;
};

}  // namespace

absl::Status CheckHttpAddress(absl::string_view address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  const bool good = colon != absl::string_view::npos && colon > 0 &&
                    absl::SimpleAtoi(address.substr(colon + 1), &port) && port >= 0 &&
                    port <= 65535 && address.find_first_of(", \t+") == absl::string_view::npos;
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "got \"", address, "\", expected a numeric address and a port, such as 127.0.0.1:8002"));
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              HttpHandler handler,
                                                              const HttpLimits& limits) {
  if (absl::Status status = CheckHttpAddress(address); !status.ok()) return status;
  auto server = std::make_unique<MicroServer>(std::move(handler), limits);
  if (absl::Status status = server->Listen(address); !status.ok()) return status;
  return std::unique_ptr<HttpServer>(std::move(server));
}

}  // namespace awqd::obs
