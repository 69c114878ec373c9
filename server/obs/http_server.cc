// Bounds the connections of an HTTP server, and passes its requests to the handler.
#include "server/obs/http_server.h"

#include <microhttpd.h>
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
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/obs/origin.h"

namespace awqd::obs {
namespace {

using Clock = std::chrono::steady_clock;

// Enforces HttpLimits by shutting sockets down. libmicrohttpd owns the descriptors and then closes
// them. A thread of its own watches the times. Thread-safe.
class HttpConnections {
 public:
  struct Entry {
    int fd = -1;
    std::string peer;
    Clock::time_point deadline;
    bool ended = false;  // shut down, but not closed yet
    std::list<Entry>::iterator self;
  };

  explicit HttpConnections(const HttpLimits& limits)
      : limits_(limits), thread_([this] { WatchDeadlines(); }) {}
  ~HttpConnections() {
    {
      MutexLock lock(&mu_);
      stopping_ = true;
      changed_.NotifyAll();
    }
    thread_.join();
  }
  HttpConnections(const HttpConnections&) = delete;
  HttpConnections& operator=(const HttpConnections&) = delete;

  // Adds a connection that was accepted as `fd`. The entry lives until RemoveConnection.
  Entry* AddConnection(int fd) {
    std::string peer = Origin(fd);
    MutexLock lock(&mu_);
    const std::map<std::string, int> open = CountByPeer();
    const auto mine = open.find(peer);
    if (mine != open.end() && mine->second >= limits_.connections_per_peer) {
      ShutDownOldest(peer);
    } else if (open_ >= limits_.connections) {
      ShutDownOldest(BusiestPeer(open));
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

  // Starts the time of the answer; the request has arrived.
  void StartAnswer(Entry* entry) {
    MutexLock lock(&mu_);
    entry->deadline = Clock::now() + absl::ToChronoNanoseconds(limits_.answer_time);
  }

  // Called before the descriptor is closed.
  void RemoveConnection(Entry* entry) {
    MutexLock lock(&mu_);
    open_ -= entry->ended ? 0 : 1;
    entries_.erase(entry->self);
  }

 private:
  void WatchDeadlines() {
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

  void ShutDown(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    shutdown(entry.fd, SHUT_RDWR);
    entry.ended = true;
    --open_;
  }

  void ShutDownOldest(const std::string& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (Entry& entry : entries_) {
      if (entry.ended || entry.peer != peer) continue;
      LogLimited(LogLevel::kWarning, "http connection closed to make room for a new one",
                 {{"peer", peer}});
      ShutDown(entry);
      return;
    }
  }

  // The open connections of each peer.
  std::map<std::string, int> CountByPeer() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::map<std::string, int> counts;
    for (const Entry& entry : entries_) {
      if (!entry.ended) ++counts[entry.peer];
    }
    return counts;
  }

  // The peer with most open connections; of several, the one that came first.
  std::string BusiestPeer(const std::map<std::string, int>& open) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const Entry* busiest = nullptr;
    for (const Entry& entry : entries_) {
      if (entry.ended) continue;
      if (busiest == nullptr || open.at(entry.peer) > open.at(busiest->peer)) busiest = &entry;
    }
    return busiest == nullptr ? "" : busiest->peer;
  }

  const HttpLimits limits_;
  Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::list<Entry> entries_ ABSL_GUARDED_BY(mu_);  // oldest first
  int open_ ABSL_GUARDED_BY(mu_) = 0;              // entries that have not ended
  std::thread thread_;
};

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
    for (MHD_Daemon* daemon : daemons_) MHD_stop_daemon(daemon);
  }

  absl::Status Serve(UniqueFd socket) {
    // poll, because with epoll the library misses the end of a stream that arrives together with
    // bytes, and keeps the connection until it times out.
    constexpr unsigned kFlags = MHD_USE_POLL_INTERNAL_THREAD | MHD_USE_ITC | MHD_USE_ERROR_LOG;
    // Two threads, so that a slow handler does not delay a probe. Their stacks have the system's
    // default size, because the C library takes all thread-local variables from the stack, and
    // OpenBLAS alone has 60 KiB of them.
    // The logger is the first option, because later options may write lines.
    MHD_Daemon* const daemon = MHD_start_daemon(
        kFlags, 0, nullptr, nullptr, &Handle, this, MHD_OPTION_EXTERNAL_LOGGER, &Log, nullptr,
        MHD_OPTION_LISTEN_SOCKET, socket.get(), MHD_OPTION_THREAD_POOL_SIZE, 2U,
        MHD_OPTION_CONNECTION_LIMIT, max_connections_, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        kConnectionBytes, MHD_OPTION_NOTIFY_CONNECTION, &Notify, this, MHD_OPTION_END);
    if (daemon == nullptr) {
      return absl::ResourceExhaustedError("no thread or descriptor is left for an HTTP server");
    }
    (void)socket.Release();  // the library closes it
    daemons_.push_back(daemon);
    return absl::OkStatus();
  }

  int port() const override {
    return MHD_get_daemon_info(daemons_.front(), MHD_DAEMON_INFO_BIND_PORT)->port;
  }

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
  std::vector<MHD_Daemon*> daemons_;  // one for each socket
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(std::vector<UniqueFd> sockets,
                                                              HttpHandler handler,
                                                              const HttpLimits& limits) {
  auto server = std::make_unique<MicroServer>(std::move(handler), limits);
  for (UniqueFd& socket : sockets) AWQD_RETURN_IF_ERROR(server->Serve(std::move(socket)));
  return std::unique_ptr<HttpServer>(std::move(server));
}

}  // namespace awqd::obs
