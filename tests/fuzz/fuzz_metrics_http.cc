// Fuzzes what is sent to --metrics_address, over a real connection: no bytes end the server or keep
// it from answering others, and names of models go to nobody who does not show the token.
//
// Input: a request. An empty line is added to it, without which the server would wait for the rest.
#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/http_caller.h"
#include "server/obs/metrics_server.h"
#include "server/security/access.h"
#include "tests/fuzz/require.h"

namespace {

using awqd::fuzz::Require;

constexpr absl::string_view kToken = "metrics-token";  // of the seeds
constexpr absl::string_view kModel = "a-model-that-nobody-may-see";

std::string IdentitiesFile() {
  std::string path = "/tmp/awqd-fuzz-tokens-XXXXXX";
  const int fd = mkstemp(path.data());
  Require(fd >= 0);
  close(fd);
  const auto digest = awqd::security::Sha256(kToken);
  std::ofstream(path) << "probe metrics sha256:"
                      << absl::BytesToHexString(
                             {reinterpret_cast<const char*>(digest.data()), digest.size()})
                      << "\n";
  return path;
}

class Ground {
 public:
  Ground() {
    access_ = *awqd::security::Access::Create({.tokens = path_});
    server_ = *awqd::obs::MetricsServer::Start(
        "127.0.0.1:0",
        [](bool) {
          awqd::obs::Snapshot now;
          now.serving = true;
          now.models.emplace_back().name = std::string(kModel);
          return now;
        },
        [this](const std::vector<std::string>& authorizations) {
          const absl::Status status = access_
                                          ->Admit("metrics", awqd::security::Need::kMetrics,
                                                  awqd::HttpCaller(authorizations))
                                          .status();
          if (status.ok()) let_in_ = true;
          return status;
        });
  }

  ~Ground() { unlink(path_.c_str()); }

  // What the server answers to these bytes and an empty line; empty if nothing in `patience_ms`.
  std::string Ask(absl::string_view request, int patience_ms) {
    const std::string bytes = absl::StrCat(request, "\r\n\r\n");
    let_in_ = false;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(server_->port()));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    // From many addresses, as closed connections keep their ports for a minute.
    sockaddr_in from = {};
    from.sin_family = AF_INET;
    from.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1 + static_cast<uint32_t>(++asked_ % 250));
    Require(bind(fd, reinterpret_cast<sockaddr*>(&from), sizeof(from)) == 0);
    Require(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0);
    (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    shutdown(fd, SHUT_WR);
    std::string answer;
    char piece[4096];
    for (;;) {
      pollfd wait = {.fd = fd, .events = POLLIN};
      if (poll(&wait, 1, patience_ms) != 1) break;
      const ssize_t got = recv(fd, piece, sizeof(piece), 0);
      if (got <= 0) break;
      answer.append(piece, static_cast<size_t>(got));
    }
    close(fd);
    return answer;
  }
  bool let_in() const { return let_in_; }

 private:
  const std::string path_ = IdentitiesFile();
  std::unique_ptr<awqd::security::Access> access_;
  std::unique_ptr<awqd::obs::MetricsServer> server_;
  std::atomic<bool> let_in_ = false;
  int64_t asked_ = 0;
};

// Whether the token is there, as it is or as the password of "Basic".
bool ShowsToken(absl::string_view bytes) {
  if (absl::StrContains(bytes, kToken)) return true;
  for (size_t at = bytes.find("Basic "); at != bytes.npos; at = bytes.find("Basic ", at + 1)) {
    const absl::string_view rest = bytes.substr(at + 6);
    std::string pair;
    const bool good = absl::Base64Unescape(rest.substr(0, rest.find_first_of("\r\n")), &pair);
    if (good && absl::StrContains(pair, kToken)) return true;
  }
  return false;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Ground ground;
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  const std::string answer = ground.Ask(bytes, 50);
  Require(answer.empty() || absl::StartsWith(answer, "HTTP/1."));
  Require(!absl::StrContains(answer, kModel) || ground.let_in());
  Require(!ground.let_in() || ShowsToken(bytes));
  static int inputs = 0;
  if (++inputs % 64 != 0) return 0;
  Require(absl::StrContains(ground.Ask("GET /livez HTTP/1.1\r\nHost: a", 9000), "ok\n"));
  return 0;
}
