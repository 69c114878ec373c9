// HttpServer: serves a few read-only pages over HTTP, with libmicrohttpd.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace awqd::obs {

// Bounds on the connections of clients, some of which are slow on purpose. A new connection is
// always accepted, because an orchestrator kills a server whose probe cannot connect: when a bound
// is reached, the oldest connection of the same peer, or of the peer with most connections, is
// closed.
struct HttpLimits {
  int connections = 48;
  int connections_per_peer = 16;  // a peer is an address, or a network as Origin says
  absl::Duration request_time = absl::Seconds(5);
  absl::Duration answer_time = absl::Seconds(10);
};

struct HttpRequest {
  std::string path;                         // decoded, without its query
  std::vector<std::string> authorizations;  // every header "Authorization"
};

struct HttpAnswer {
  int code = 200;
  std::string type = "text/plain; charset=utf-8";
  std::string body;
};

// Called by the server's own threads, several at a time. Returns code 404 for an unknown path. To
// code 401 the server adds the authentication schemes, Bearer and Basic.
using HttpHandler = std::function<HttpAnswer(const HttpRequest& request)>;

// Checks a numeric "host:port", such as 127.0.0.1:8002, [::1]:8002 or 0.0.0.0:8002. Returns
// INVALID_ARGUMENT with the address otherwise.
absl::Status CheckHttpAddress(absl::string_view address);

// Answers GET and HEAD, and code 405 to other methods. The destructor waits for running handlers,
// but not for clients.
class HttpServer {
 public:
  // UNAVAILABLE when the server cannot listen on `address`.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           HttpHandler handler,
                                                           const HttpLimits& limits = {});
  virtual ~HttpServer() = default;
  // The port that is bound, also when `address` has port 0.
  virtual int port() const = 0;
};

}  // namespace awqd::obs
