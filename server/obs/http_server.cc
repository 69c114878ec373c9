// libmicrohttpd does the protocol; every request comes to one function here.
#include "server/obs/http_server.h"

#include <microhttpd.h>
#include <netdb.h>
#include <sys/socket.h>

#include <cstdarg>
#include <cstdio>
#include <exception>
#include <new>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/obs/logging.h"

namespace awqd::obs {
namespace {

// Beyond HttpLimits::connections there is room for those that are shut down and not yet closed, and
// for a thread that has more of them than the other. The library accepts nothing beyond this.
constexpr unsigned kSpareConnections = 48;
// What a request line and its headers may take.
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
        most_(static_cast<unsigned>(limits.connections) + kSpareConnections),
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
    // Not epoll: the library then misses the end of a stream that comes together with bytes, and
    // keeps the connection until it has been silent for too long.
    unsigned flags = MHD_USE_POLL_INTERNAL_THREAD | MHD_USE_ITC | MHD_USE_ERROR_LOG;
    if (where->ai_family == AF_INET6) flags |= MHD_USE_IPv6;
    // Two threads: a handler that takes long must not keep a probe waiting. Their stacks are the
    // system's default. Smaller ones are not safe: the C library takes every library's thread-local
    // variables from the stack, and OpenBLAS alone has 60 KiB of them.
    // The logger comes first, because the options behind it may write lines.
    daemon_ = MHD_start_daemon(
        flags, 0, nullptr, nullptr, &Handle, this, MHD_OPTION_EXTERNAL_LOGGER, &Log, nullptr,
        MHD_OPTION_SOCK_ADDR, where->ai_addr, MHD_OPTION_THREAD_POOL_SIZE, 2U,
        MHD_OPTION_CONNECTION_LIMIT, most_, MHD_OPTION_CONNECTION_MEMORY_LIMIT, kConnectionBytes,
        MHD_OPTION_NOTIFY_CONNECTION, &Notify, this, MHD_OPTION_END);
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

  // The library calls it before it closes the descriptor.
  static void Notify(void* server, MHD_Connection* connection, void** entry,
                     MHD_ConnectionNotificationCode code) {
    HttpConnections& connections = static_cast<MicroServer*>(server)->connections_;
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
      if (*entry != nullptr) connections.Closed(static_cast<HttpConnections::Entry*>(*entry));
      return;
    }
    const int fd =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    try {
      *entry = connections.Opened(fd);
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

  // Answers at once: no method that is answered has a body.
  static MHD_Result Handle(void* server, MHD_Connection* connection, const char* path,
                           const char* method, const char*, const char*, size_t*, void**) {
    HttpRequest request = {.path = path};
    MHD_get_connection_values(connection, MHD_HEADER_KIND, &KeepAuthorization, &request);
    const HttpAnswer answer = static_cast<MicroServer*>(server)->Answer(request, method);
    void* const entry =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
    if (entry == nullptr) return MHD_NO;  // shut down already
    static_cast<MicroServer*>(server)->connections_.Answers(
        static_cast<HttpConnections::Entry*>(entry));
    MHD_Response* const response = MHD_create_response_from_buffer(
        answer.body.size(), const_cast<char*>(answer.body.data()), MHD_RESPMEM_MUST_COPY);
    if (response == nullptr) return MHD_NO;
    MHD_add_response_header(response, "Content-Type", answer.type.c_str());
    for (const auto& [name, value] : kHeaders) MHD_add_response_header(response, name, value);
    if (answer.code == MHD_HTTP_UNAUTHORIZED) {
      MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
      // For browsers, which ask their user.
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
  const unsigned most_;
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
