// HttpServer: a few read-only pages over HTTP, by libmicrohttpd.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/obs/http_connections.h"

namespace awqd::obs {

struct HttpRequest {
  std::string path;                         // decoded, without its query
  std::vector<std::string> authorizations;  // every header "Authorization"
};

struct HttpAnswer {
  int code = 200;
  std::string type = "text/plain; charset=utf-8";
  std::string body;
};

// Called on threads of the server's own, several at a time. An answer of code 404 for a path that
// is not there; one of code 401 also tells a client which ways of authentication there are.
using HttpHandler = std::function<HttpAnswer(const HttpRequest& request)>;

// "host:port": 127.0.0.1:8002, [::1]:8002, 0.0.0.0:8002. INVALID_ARGUMENT says what was got.
absl::Status CheckHttpAddress(absl::string_view address);

// Answers GET and HEAD; other methods are 405. The destructor waits for
// handlers that run, not for clients.
class HttpServer {
 public:
  // UNAVAILABLE when it cannot listen there.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           HttpHandler handler,
                                                           const HttpLimits& limits = {});
  virtual ~HttpServer() = default;
  // The port that is really bound, also for port 0.
  virtual int port() const = 0;
};

}  // namespace awqd::obs
