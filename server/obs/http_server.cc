// civetweb does the protocol; every request comes to one function here.
#include "server/obs/http_server.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "civetweb.h"
#include "server/obs/logging.h"

namespace awqd::obs {
namespace {

constexpr absl::string_view Reason(int code) {
  switch (code) {
    case 200:
      return "OK";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 503:
      return "Service Unavailable";
    default:
      return "Internal Server Error";
  }
}

// While it lives, somebody comes every few milliseconds: civetweb looks whether it is to stop when
// somebody does, and otherwise every two seconds.
class Visitor {
 public:
  // `address` is numeric.
  Visitor(const std::string& address, int port)
      : thread_([host = Host(address), port = std::to_string(port)](const std::stop_token& stop) {
          const addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV,
                                  .ai_socktype = SOCK_STREAM};
          addrinfo* where = nullptr;
          if (getaddrinfo(host.c_str(), port.c_str(), &hints, &where) != 0) return;
          while (!stop.stop_requested()) {
            Visit(*where);
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
          }
          freeaddrinfo(where);
        }) {}

 private:
  // "::1" of "[::1]:8002".
  static std::string Host(const std::string& address) {
    const std::string host = address.substr(0, address.rfind(':'));
    return host.front() == '[' ? host.substr(1, host.size() - 2) : host;
  }
  static void Visit(const addrinfo& where) {
    const int fd = socket(where.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    // To come is all; whether it was let in does not matter.
    (void)!connect(fd, where.ai_addr, where.ai_addrlen);
    close(fd);
  }

  std::jthread thread_;
};

class CivetServer final : public HttpServer {
 public:
  explicit CivetServer(HttpHandler handler) : handler_(std::move(handler)) {}
  ~CivetServer() override {
    if (context_ == nullptr) return;
    const Visitor visitor(address_, port_);
    mg_stop(context_);
  }

  absl::Status Listen(const std::string& address) {
    // Two threads: a slow reader must not keep a probe waiting.
    const char* options[] = {"listening_ports",    address.c_str(), "num_threads", "2",
                             "request_timeout_ms", "10000",         nullptr};
    mg_callbacks callbacks = {};
    callbacks.begin_request = [](mg_connection* connection) {
      return static_cast<CivetServer*>(mg_get_request_info(connection)->user_data)
          ->Answer(connection);
    };
    callbacks.log_message = [](const mg_connection*, const char* message) {
      LogEvent(LogLevel::kDebug, "http", {{"message", LogText(message)}});
      return 1;
    };
    context_ = mg_start(&callbacks, this, options);
    if (context_ == nullptr) {
      return absl::UnavailableError(absl::StrCat("cannot listen on ", address, " over HTTP"));
    }
    mg_server_port port = {};
    if (mg_get_server_ports(context_, 1, &port) == 1) port_ = port.port;
    address_ = address;
    return absl::OkStatus();
  }

  int port() const override { return port_; }

 private:
  int Answer(mg_connection* connection) const {
    const mg_request_info& request = *mg_get_request_info(connection);
    const absl::string_view method = request.request_method;
    HttpAnswer answer = {.code = 405, .body = "GET and HEAD only\n"};
    if (method == "GET" || method == "HEAD") {
      try {
        answer = handler_(request.local_uri == nullptr ? "/" : request.local_uri);
      } catch (const std::exception& error) {
        answer = {.code = 500, .body = absl::StrCat(error.what(), "\n")};
      }
    }
    std::string out =
        absl::StrCat("HTTP/1.1 ", answer.code, " ", Reason(answer.code),
                     "\r\nContent-Type: ", answer.type, "\r\nContent-Length: ", answer.body.size(),
                     "\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff"
                     "\r\nContent-Security-Policy: default-src 'self'; frame-ancestors 'none'"
                     "\r\nConnection: close\r\n\r\n");
    if (method != "HEAD") out += answer.body;
    mg_write(connection, out.data(), out.size());
    return answer.code;
  }

  const HttpHandler handler_;
  mg_context* context_ = nullptr;
  std::string address_;
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
                                                              HttpHandler handler) {
  if (absl::Status status = CheckHttpAddress(address); !status.ok()) return status;
  auto server = std::make_unique<CivetServer>(std::move(handler));
  if (absl::Status status = server->Listen(address); !status.ok()) return status;
  return std::unique_ptr<HttpServer>(std::move(server));
}

}  // namespace awqd::obs
