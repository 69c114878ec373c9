// HttpServer: serves a few read-only pages over HTTP, with libmicrohttpd.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/unique_fd.h"

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

// Answers GET and HEAD, and code 405 to other methods. The destructor waits for running handlers,
// but not for clients.
class HttpServer {
 public:
  // Answers the connections of `sockets`, which listen and do not block. RESOURCE_EXHAUSTED when
  // there are no threads or descriptors for it.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(std::vector<UniqueFd> sockets,
                                                           HttpHandler handler,
                                                           const HttpLimits& limits = {});
  virtual ~HttpServer() = default;
  // The bound port of the first socket.
  virtual int port() const = 0;
};

}  // namespace awqd::obs
