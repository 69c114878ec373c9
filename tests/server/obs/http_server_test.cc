// The HTTP server for its clients and for its handler.
#include "server/obs/http_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/obs/http_get.h"

namespace awqd::obs {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<HttpServer> Start(HttpHandler handler, const HttpLimits& limits = {}) {
  auto server = HttpServer::Start(testing::ListenOnLoopback(), std::move(handler), limits);
  EXPECT_TRUE(server.ok()) << server.status();
  return server.ok() ? *std::move(server) : nullptr;
}

int ConnectedTo(int port, uint32_t from = INADDR_LOOPBACK) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in own = {};
  own.sin_family = AF_INET;
  own.sin_addr.s_addr = htonl(from);
  EXPECT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&own), sizeof(own)), 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

HttpAnswer Echo(const HttpRequest& request) { return {.body = request.path}; }

TEST(HttpServerTest, AnswersWithWhatTheHandlerGave) {
  const auto server = Start([](const HttpRequest& request) {
    return HttpAnswer{.code = 503, .type = "text/odd", .body = "of " + request.path};
  });
  const testing::HttpPage page = testing::HttpGet(server->port(), "/a/b?query=1");
  EXPECT_EQ(page.code, 503);
  EXPECT_EQ(page.body, "of /a/b");
  EXPECT_THAT(page.head, HasSubstr("Content-Type: text/odd"));
  EXPECT_THAT(page.head, HasSubstr("Content-Length: 7"));
  EXPECT_THAT(page.head, HasSubstr("Cache-Control: no-store"));
}

TEST(HttpServerTest, HandsOverWhatTheClientShows) {
  const auto server = Start([](const HttpRequest& request) {
    HttpAnswer answer = {.code = 401};
    for (const std::string& value : request.authorizations) answer.body += value + ";";
    return answer;
  });
  const testing::HttpPage page = testing::HttpGet(
      server->port(), "/", "GET", "AUTHORIZATION: Bearer a\r\nAuthorization: b\r\nX-Other: c\r\n");
  EXPECT_EQ(page.body, "Bearer a;b;");
  EXPECT_THAT(page.head, HasSubstr("WWW-Authenticate: Bearer\r\n"));
  EXPECT_THAT(page.head, HasSubstr("WWW-Authenticate: Basic realm=\"awqd\""));
  EXPECT_EQ(testing::HttpGet(server->port(), "/").body, "");
}

TEST(HttpServerTest, OnlyReads) {
  const auto server = Start(Echo);
  const testing::HttpPage head = testing::HttpGet(server->port(), "/page", "HEAD");
  EXPECT_EQ(head.code, 200);
  EXPECT_THAT(head.head, HasSubstr("Content-Length: 5"));
  EXPECT_EQ(head.body, "");
  for (const char* const method : {"POST", "PUT", "DELETE", "OPTIONS", "MADE_UP"}) {
    EXPECT_EQ(testing::HttpGet(server->port(), "/page", method).code, 405) << method;
  }
}

TEST(HttpServerTest, AnExceptionIsAnAnswer) {
  const auto server =
      Start([](const HttpRequest&) -> HttpAnswer { throw std::runtime_error("no luck"); });
  const testing::HttpPage page = testing::HttpGet(server->port(), "/");
  EXPECT_EQ(page.code, 500);
  EXPECT_EQ(page.body, "no luck\n");
}

// Libraries with many thread-local variables use most of a small stack.
TEST(HttpServerTest, HandlersHaveAnOrdinaryStack) {
  const auto server = Start([](const HttpRequest&) {
    pthread_attr_t attributes;
    size_t bytes = 0;
    if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
      pthread_attr_getstacksize(&attributes, &bytes);
      pthread_attr_destroy(&attributes);
    }
    return HttpAnswer{.body = std::to_string(bytes)};
  });
  EXPECT_GE(std::stoll(testing::HttpGet(server->port(), "/").body), 1 << 20);
}

TEST(HttpServerTest, SilentClientsKeepNobodyWaiting) {
  auto server = Start(Echo);
  int silent[8];
  for (int& fd : silent) {
    fd = ConnectedTo(server->port());
    ASSERT_EQ(send(fd, "GET / HT", 8, MSG_NOSIGNAL), 8);
  }
  EXPECT_EQ(testing::HttpGet(server->port(), "/page").body, "/page");
  const absl::Time start = absl::Now();
  server = nullptr;
  EXPECT_LT(absl::Now() - start, absl::Seconds(5)) << "a request has that long";
  for (const int fd : silent) close(fd);
}

// Beginnings of requests, after which a slow client stops or sends byte by byte.
constexpr absl::string_view kBeginnings[] = {"", "GET / HT", "GET /livez HTTP/1.1\r\nHost: a\r\n"};

// Slow clients from `addresses` addresses; the first one is that of the probes.
std::vector<int> SlowClients(int port, int count, int addresses) {
  std::vector<int> slow;
  for (int i = 0; i < count; ++i) {
    slow.push_back(ConnectedTo(port, INADDR_LOOPBACK + static_cast<uint32_t>(i % addresses)));
    const absl::string_view beginning = kBeginnings[i % std::size(kBeginnings)];
    send(slow.back(), beginning.data(), beginning.size(), MSG_NOSIGNAL);
  }
  return slow;
}

TEST(HttpServerTest, SlowClientsLeaveAPlaceForProbes) {
  for (const int count : {64, 200}) {
    for (const int addresses : {1, 2, 7, 100}) {
      const auto server = Start(Echo);
      const std::vector<int> slow = SlowClients(server->port(), count, addresses);
      for (int probe = 0; probe < 5; ++probe) {
        const absl::Time start = absl::Now();
        EXPECT_EQ(testing::HttpGet(server->port(), "/livez").body, "/livez");
        EXPECT_LT(absl::Now() - start, absl::Seconds(1)) << count << " of " << addresses;
        for (const int fd : slow) (void)!send(fd, "x", 1, MSG_NOSIGNAL);
      }
      for (const int fd : slow) close(fd);
    }
  }
}

constexpr HttpLimits kShort = {.request_time = absl::Milliseconds(300),
                               .answer_time = absl::Milliseconds(300)};

// The time until the server closes `fd`; `turn` is called every 20 ms.
absl::Duration UntilClosed(int fd, const std::function<void()>& turn) {
  const absl::Time start = absl::Now();
  pollfd wait = {.fd = fd, .events = POLLRDHUP};
  while (poll(&wait, 1, 20) == 0 && absl::Now() - start < absl::Seconds(10)) turn();
  return absl::Now() - start;
}

TEST(HttpServerTest, ARequestHasATimeHoweverOftenItGoesOn) {
  const auto server = Start(Echo, kShort);
  const int fd = ConnectedTo(server->port());
  const absl::string_view line = "GET / HTTP/1.1\r\nX-Long: ";
  ASSERT_GT(send(fd, line.data(), line.size(), MSG_NOSIGNAL), 0);
  const absl::Duration took = UntilClosed(fd, [fd] { (void)!send(fd, "x", 1, MSG_NOSIGNAL); });
  EXPECT_GE(took, kShort.request_time - absl::Milliseconds(50));
  EXPECT_LT(took, absl::Seconds(5));
  close(fd);
}

TEST(HttpServerTest, AnAnswerHasATimeHoweverOftenItGoesOn) {
  const std::string much(64 << 20, 'y');
  const auto server = Start([&](const HttpRequest&) { return HttpAnswer{.body = much}; }, kShort);
  const int fd = ConnectedTo(server->port());
  const absl::string_view request = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
  ASSERT_GT(send(fd, request.data(), request.size(), MSG_NOSIGNAL), 0);
  std::string piece(4096, '\0');
  size_t read = 0;
  const auto take = [&] {
    const ssize_t got = recv(fd, piece.data(), piece.size(), 0);
    read += got > 0 ? static_cast<size_t>(got) : 0;
    return got > 0;
  };
  const absl::Time start = absl::Now();
  pollfd never = {.fd = -1, .events = 0};
  // On a busy machine the server may have closed within this time already.
  while (absl::Now() - start < 3 * kShort.answer_time && take()) poll(&never, 1, 10);
  piece.resize(1 << 20);
  while (take()) {  // answers that were under way when the time was up
  }
  EXPECT_LT(read, much.size() / 2);
  close(fd);
}

// Each would keep its place among the connections until the server times it out.
TEST(HttpServerTest, WhoEndsBeforeItsRequestDoesIsClosed) {
  const auto server = Start(Echo);
  for (const absl::string_view part :
       {"", "\r\n\r\n", "G", "GET / HT", "GET / HTTP/1.1\r\nHost: a\r\n"}) {
    const int fd = ConnectedTo(server->port());
    ASSERT_EQ(send(fd, part.data(), part.size(), MSG_NOSIGNAL), static_cast<ssize_t>(part.size()));
    ASSERT_EQ(shutdown(fd, SHUT_WR), 0);
    pollfd wait = {.fd = fd, .events = POLLIN};
    EXPECT_EQ(poll(&wait, 1, 5000), 1) << "after " << part;
    close(fd);
  }
}

TEST(HttpServerTest, AnswersOnEachSocket) {
  std::vector<UniqueFd> sockets = testing::ListenOnLoopback();
  int ports[2] = {};
  for (int& port : ports) {
    sockaddr_in address = {};
    socklen_t size = sizeof(address);
    ASSERT_EQ(getsockname(sockets.back().get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    port = ntohs(address.sin_port);
    if (&port == ports) sockets.push_back(std::move(testing::ListenOnLoopback().front()));
  }
  const auto server = HttpServer::Start(std::move(sockets), Echo);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ((*server)->port(), ports[0]);
  for (const int port : ports) EXPECT_EQ(testing::HttpGet(port, "/a").body, "/a") << port;
}

}  // namespace
}  // namespace awqd::obs
