// Fuzzes the HTTP server of --metrics_address over a real connection: no bytes end the server or
// keep it from answering others, and a client without the token never gets names of models.
//
// Input: a request. An empty line is appended, because the server would otherwise wait for the
// rest.
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/obs/metrics_server.h"
#include "server/security/access.h"
#include "tests/fuzz/require.h"
#include "tests/server/obs/http_get.h"

namespace {

using awqd::fuzz::Require;

constexpr absl::string_view kToken = "metrics-token";  // as in the seeds
constexpr absl::string_view kModel = "a-model-that-nobody-may-see";
// More than the 5 s of a request, so that an incomplete request is closed by then.
constexpr int kPatienceMs = 9000;

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
        awqd::testing::ListenOnLoopback(),
        [](bool) {
          awqd::obs::Snapshot now;
          now.serving = true;
          now.models.emplace_back().name = std::string(kModel);
          return now;
        },
        [this](const std::vector<std::string>& authorizations) {
          const absl::Status status = access_
                                          ->Admit("metrics", awqd::security::Need::kMetrics,
                                                  {.authorizations = authorizations})
                                          .status();
          if (status.ok()) let_in_ = true;
          return status;
        });
    // Every few seconds libFuzzer checks its time limits in a handler of SIGALRM. Blocking the
    // signal here sends it to the server's threads, which do not block it; here it would end
    // connect and poll early.
    sigset_t alarm;
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    Require(pthread_sigmask(SIG_BLOCK, &alarm, nullptr) == 0);
  }

  ~Ground() { unlink(path_.c_str()); }

  // Returns the server's answers to these bytes and an empty line. Nothing more is sent, so the
  // server must close the connection itself. Waiting for that also waits for its handler: a late
  // one would set let_in_ for the next input.
  std::string Ask(absl::string_view request) {
    const std::string bytes = absl::StrCat(request, "\r\n\r\n");
    let_in_ = false;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(server_->port()));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    // Uses many addresses, because closed connections keep their ports for a minute.
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
      Require(poll(&wait, 1, kPatienceMs) == 1);
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

// Decodes Base64 from the beginning of `text`, as far as possible. Line ends are skipped, because a
// header may be folded. A single last digit is ignored, because it is not a byte.
std::string Decoded(absl::string_view text) {
  std::string digits;
  for (const char c : text) {
    if (absl::ascii_isspace(static_cast<unsigned char>(c))) continue;
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '+' && c != '/') break;
    digits += c;
  }
  if (digits.size() % 4 == 1) digits.pop_back();
  std::string decoded;
  Require(absl::Base64Unescape(digits, &decoded));
  return decoded;
}

// Whether the bytes have the token, plain or as the password of "Basic".
bool ShowsToken(absl::string_view bytes) {
  if (absl::StrContains(bytes, kToken)) return true;
  for (size_t at = bytes.find("Basic "); at != bytes.npos; at = bytes.find("Basic ", at + 1)) {
    if (absl::StrContains(Decoded(bytes.substr(at + 6)), kToken)) return true;
  }
  return false;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Ground ground;
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  const std::string answer = ground.Ask(bytes);
  Require(answer.empty() || absl::StartsWith(answer, "HTTP/1."));
  Require(!absl::StrContains(answer, kModel) || ground.let_in());
  Require(!ground.let_in() || ShowsToken(bytes));
  static int inputs = 0;
  if (++inputs % 64 != 0) return 0;
  Require(absl::StrContains(ground.Ask("GET /livez HTTP/1.1\r\nHost: a"), "ok\n"));
  return 0;
}
