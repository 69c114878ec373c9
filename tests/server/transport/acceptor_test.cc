// Acceptor: when a connection is handed over, which ones are closed, and the behaviour without free
// descriptors.
#include "server/transport/acceptor.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <filesystem>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/obs/origin.h"
#include "server/transport/listening.h"
#include "server/transport/open_connections.h"
#include "tests/testing/eventually.h"

namespace awqd::transport {
namespace {

const std::string kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
// Settings with one parameter of six bytes.
const std::string kSettings = std::string("\0\0\6\4\0\0\0\0\0", 9) + std::string("\0\3\0\0\0\1", 6);

void ConnectTo(int port, const UniqueFd& socket) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  EXPECT_EQ(connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
}

class Peer {
 public:
  explicit Peer(int port, uint32_t from = INADDR_LOOPBACK)
      : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(from);
    EXPECT_EQ(bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ConnectTo(port, fd_);
  }
  void Send(const std::string& bytes) const {
    EXPECT_EQ(send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t(bytes.size()));
  }
  bool IsClosed(int within_ms = 10'000) const {
    pollfd poll_fd = {.fd = fd_.get(), .events = POLLIN};
    char byte = 0;
    return poll(&poll_fd, 1, within_ms) == 1 && recv(fd_.get(), &byte, 1, 0) <= 0;
  }
  // Until the other end closes.
  std::string Receive() const {
    std::string all;
    char bytes[256];
    for (ssize_t got = 0; (got = recv(fd_.get(), bytes, sizeof(bytes), 0)) > 0;) {
      all.append(bytes, static_cast<size_t>(got));
    }
    return all;
  }
  void Close() { fd_.Reset(); }

 private:
  UniqueFd fd_;
};

class AcceptorTest : public ::testing::Test {
 protected:
  void Start(const Acceptor::Limits& limits, bool tls = false) {
    absl::StatusOr<ListenSockets> listening = ListenOnPort("127.0.0.1:0", absl::Seconds(20));
    ASSERT_TRUE(listening.ok()) << listening.status();
    port_ = listening->port;
    acceptor_ = std::make_unique<Acceptor>(limits);
    acceptor_->AddListener(std::move(listening->sockets.front()), tls, [this](int, int fd) {
      MutexLock lock(&mu_);
      taken_.emplace_back(fd);
    });
    ASSERT_TRUE(acceptor_->Start().ok());
  }
  size_t taken() {
    MutexLock lock(&mu_);
    return taken_.size();
  }
  // The name that gRPC has for the peer of the first.
  std::string NameOfTaken() {
    MutexLock lock(&mu_);
    sockaddr_in peer = {};
    socklen_t size = sizeof(peer);
    getpeername(taken_.front().get(), reinterpret_cast<sockaddr*>(&peer), &size);
    return "ipv4:127.0.0.1:" + std::to_string(ntohs(peer.sin_port));
  }
  // Closes it, as gRPC does.
  void CloseTaken() {
    MutexLock lock(&mu_);
    taken_.clear();
  }

  Mutex mu_;
  std::vector<UniqueFd> taken_;
  int port_ = 0;
  std::unique_ptr<Acceptor> acceptor_;
};

TEST_F(AcceptorTest, HandsOverOnceTheSettingsAreThere) {
  Start({});
  const Peer whole(port_), slow(port_), silent(port_);
  whole.Send(kPreface + kSettings);
  ASSERT_TRUE(Eventually([&] { return taken() == 1; }));
  const std::string hello = kPreface + kSettings;
  for (size_t i = 0; i + 1 < hello.size(); ++i) slow.Send(hello.substr(i, 1));
  const Peer after(port_);
  after.Send(hello);
  ASSERT_TRUE(Eventually([&] { return taken() == 2; })) << "the one after it";
  EXPECT_EQ(acceptor_->counts().handed_over, 2);
  slow.Send(hello.substr(hello.size() - 1));
  ASSERT_TRUE(Eventually([&] { return taken() == 3; }));
  // The bytes can still be read.
  char bytes[64];
  MutexLock lock(&mu_);
  EXPECT_EQ(recv(taken_.back().get(), bytes, sizeof(bytes), 0), ssize_t(hello.size()));
  EXPECT_EQ(acceptor_->open()->Count(), 4);
}

TEST_F(AcceptorTest, HandsOverWhatIsNoHttp2) {
  Start({});
  const Peer tls(port_), http1(port_), other_frame(port_), long_frame(port_);
  tls.Send("\x16");
  http1.Send("GET");
  other_frame.Send(kPreface + std::string("\0\0\6\1\0\0\0\0\0", 9));
  long_frame.Send(kPreface + std::string("\1\0\0\4\0\0\0\0\0", 9));
  EXPECT_TRUE(Eventually([&] { return taken() == 4; }));
}

TEST_F(AcceptorTest, CountsTlsOnAPortThatSpeaksPlaintext) {
  Start({});
  const Peer tls(port_), http2(port_);
  tls.Send("\x16\x03\x01");
  http2.Send(kPreface + kSettings);
  EXPECT_TRUE(Eventually([&] { return taken() == 2; })) << "gRPC's answer tells what it is";
  EXPECT_EQ(acceptor_->counts().tls, 1);
  EXPECT_EQ(acceptor_->counts().plaintext, 0);
}

TEST_F(AcceptorTest, ClosesPlaintextOnAPortThatSpeaksTls) {
  Start({}, /*tls=*/true);
  const Peer tls(port_), http2(port_), http1(port_);
  tls.Send("\x16\x03\x01");
  http2.Send(kPreface + kSettings);
  http1.Send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_TRUE(http2.IsClosed());
  EXPECT_THAT(http1.Receive(), ::testing::EndsWith("\r\n\r\nThis port speaks TLS.\n"));
  EXPECT_TRUE(Eventually([&] { return taken() == 1; }));
  EXPECT_EQ(acceptor_->counts().plaintext, 2);
  EXPECT_EQ(acceptor_->counts().tls, 0);
  EXPECT_EQ(acceptor_->open()->Count(), 1);
}

TEST_F(AcceptorTest, ClosesThoseThatSayNothingInTime) {
  Start({.handshake_timeout = absl::Milliseconds(100)});
  const absl::Time begin = absl::Now();
  const Peer silent(port_), half(port_), fine(port_);
  half.Send(kPreface + kSettings.substr(0, 12));
  fine.Send(kPreface + kSettings);
  EXPECT_TRUE(silent.IsClosed());
  EXPECT_TRUE(half.IsClosed());
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(99));
  EXPECT_EQ(acceptor_->counts().silent, 2);
  EXPECT_EQ(taken(), 1u);
  EXPECT_EQ(acceptor_->open()->Count(), 1);
}

TEST_F(AcceptorTest, ForgetsThoseThatGoAwaySilently) {
  Start({});
  Peer gone(port_), half(port_);
  half.Send(kPreface);
  ASSERT_TRUE(Eventually([&] { return acceptor_->open()->Count() == 2; }));
  gone.Close();
  half.Close();
  EXPECT_TRUE(Eventually([&] { return acceptor_->open()->Count() == 0; }));
  EXPECT_EQ(taken(), 0u);
}

TEST_F(AcceptorTest, BoundsConnectionsInAllAndOfEachPeer) {
  Start({.max_connections = 3, .max_connections_per_peer = 2});
  const Peer first(port_), second(port_);
  const Peer one_more(port_);
  EXPECT_TRUE(one_more.IsClosed());
  EXPECT_TRUE(Eventually([&] { return acceptor_->counts().too_many_of_origin == 1; }));
  const Peer elsewhere(port_, INADDR_LOOPBACK + 1);
  elsewhere.Send(kPreface + kSettings);
  ASSERT_TRUE(Eventually([&] { return taken() == 1; })) << "another peer is let in";
  const Peer third(port_, INADDR_LOOPBACK + 2);
  EXPECT_TRUE(third.IsClosed());
  EXPECT_TRUE(Eventually([&] { return acceptor_->counts().too_many == 1; }));
  CloseTaken();
  EXPECT_TRUE(Eventually([&] {
    const Peer again(port_, INADDR_LOOPBACK + 2);
    again.Send(kPreface + kSettings);
    return Eventually([&] { return taken() == 1 || again.IsClosed(0); }) && taken() == 1;
  })) << "there is room once gRPC has closed one";
}

// Lowers the limit on open files of the process while it exists.
class FewerFiles {
 public:
  explicit FewerFiles(rlim_t files) {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit fewer = {.rlim_cur = files, .rlim_max = before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &fewer), 0);
  }
  ~FewerFiles() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_ = {};
};

// The reserve does not help either, so the connections wait.
TEST_F(AcceptorTest, SurvivesTheEndOfDescriptors) {
  Start({});
  std::vector<UniqueFd> sockets;
  for (int i = 0; i < 4; ++i) sockets.emplace_back(socket(AF_INET, SOCK_STREAM, 0));
  {
    const FewerFiles none_left(3);
    for (const UniqueFd& socket : sockets) ConnectTo(port_, socket);
    EXPECT_TRUE(Eventually([&] { return acceptor_->counts().pauses >= 2; }));
    EXPECT_EQ(acceptor_->open()->Count(), 0);
  }
  EXPECT_TRUE(Eventually([&] { return acceptor_->open()->Count() == 4; }));
  const Peer after(port_);
  after.Send(kPreface + kSettings);
  EXPECT_TRUE(Eventually([&] { return taken() == 1; }));
}

// The reserve is the only free descriptor. Every connection is closed with its help.
TEST_F(AcceptorTest, ClosesConnectionsForWantOfADescriptor) {
  Start({});
  std::vector<UniqueFd> sockets;
  for (int i = 0; i < 4; ++i) sockets.emplace_back(socket(AF_INET, SOCK_STREAM, 0));
  int highest = 0;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    highest = std::max(highest, std::stoi(file.path().filename()));
  }
  std::vector<UniqueFd> filling;
  const FewerFiles full(static_cast<rlim_t>(highest) + 1);
  for (UniqueFd fd(dup(0)); fd.ok(); fd = UniqueFd(dup(0))) {
    filling.push_back(std::move(fd));
  }
  for (const UniqueFd& socket : sockets) {
    ConnectTo(port_, socket);
    pollfd poll_fd = {.fd = socket.get(), .events = POLLIN};
    EXPECT_EQ(poll(&poll_fd, 1, 10'000), 1) << "closed, not left to wait";
  }
  EXPECT_TRUE(Eventually([&] { return acceptor_->counts().no_descriptor == 4; }));
}

TEST_F(AcceptorTest, TheEndClosesWhatIsNotHandedOver) {
  Start({});
  const Peer silent(port_), fine(port_);
  fine.Send(kPreface + kSettings);
  ASSERT_TRUE(Eventually([&] { return taken() == 1 && acceptor_->open()->Count() == 2; }));
  acceptor_->Stop();
  EXPECT_TRUE(silent.IsClosed());
  EXPECT_EQ(acceptor_->open()->Count(), 1);
  acceptor_->open()->EndAll();
  EXPECT_TRUE(fine.IsClosed());
}

TEST_F(AcceptorTest, CutsOnePeer) {
  Start({});
  const Peer one(port_), other(port_);
  one.Send(kPreface + kSettings);
  ASSERT_TRUE(Eventually([&] { return taken() == 1; }));
  const std::string name = NameOfTaken();
  EXPECT_FALSE(acceptor_->open()->ResetPeer(name + "0"));
  EXPECT_FALSE(acceptor_->open()->ResetPeer("unix:"));
  EXPECT_TRUE(acceptor_->open()->ResetPeer(name));
  EXPECT_TRUE(one.IsClosed());
  EXPECT_FALSE(other.IsClosed(0));
}

std::string Frame(char kind, char flags, char stream, const std::string& payload) {
  const auto size = static_cast<char>(payload.size());
  return std::string{0, 0, size, kind, flags, 0, 0, 0, stream} + payload;
}
// A call of a method without a name, with a message of five bytes.
std::string CallFrames(int number) {
  const auto stream = static_cast<char>(2 * number % 128 + 1);
  return Frame(1, 4, stream, std::string(60, '\x10')) + Frame(0, 1, stream, std::string(5, '\0'));
}
std::string CallsFrames(int count) {
  std::string frames;
  for (int i = 0; i < count; ++i) frames += CallFrames(i);
  return frames;
}

class AcceptorCrowdTest : public AcceptorTest {
 protected:
  void Start() { AcceptorTest::Start({.few_calls = 8, .calls_per_peer = 100}); }
  // Hands over a connection with `bytes` after its settings.
  Peer Fresh(const std::string& bytes, uint32_t from = INADDR_LOOPBACK) {
    Peer client(port_, from);
    const size_t before = taken();
    client.Send(kPreface + kSettings + bytes);
    EXPECT_TRUE(Eventually([&] { return taken() == before + 1; }));
    return client;
  }
  // Unread bytes of the latest connection that was handed over.
  int UnreadOfTaken() {
    MutexLock lock(&mu_);
    int unread = 0;
    ioctl(taken_.back().get(), FIONREAD, &unread);
    return unread;
  }
};

TEST_F(AcceptorCrowdTest, ConnectionsWhereManyCallsWaitAreReset) {
  Start();
  const Peer calm = Fresh(CallsFrames(8)), other = Fresh(CallsFrames(50), INADDR_LOOPBACK + 1);
  const Peer crowded = Fresh(CallsFrames(100)), more = Fresh(CallsFrames(60));
  EXPECT_GT(UnreadOfTaken(), 0);
  acceptor_->CheckForCrowd("ipv4:127.0.0.1");
  EXPECT_TRUE(crowded.IsClosed());
  EXPECT_TRUE(more.IsClosed());
  EXPECT_EQ(UnreadOfTaken(), 0) << "gRPC finds nothing to go on with";
  EXPECT_FALSE(calm.IsClosed(0)) << "it has only a few";
  EXPECT_FALSE(other.IsClosed(0)) << "it is another peer";
  EXPECT_TRUE(Eventually([&] { return acceptor_->counts().crowded == 2; }));
  const Peer again(port_);
  EXPECT_TRUE(again.IsClosed()) << "for a second its peer gets no new one";
  EXPECT_TRUE(Eventually([&] { return acceptor_->counts().penalized == 1; }));
  const Peer elsewhere = Fresh("", INADDR_LOOPBACK + 1);
}

TEST_F(AcceptorCrowdTest, APeerThatCrowdsAgainWaitsLonger) {
  Start();
  for (const absl::Duration penalty : {absl::Seconds(1), absl::Seconds(2)}) {
    const Peer crowded = Fresh(CallsFrames(120));
    const absl::Time begin = absl::Now();
    acceptor_->CheckForCrowd("ipv4:127.0.0.1");
    EXPECT_TRUE(crowded.IsClosed());
    EXPECT_TRUE(Eventually([&] {
      const Peer later(port_);
      return !later.IsClosed(20);
    }));
    EXPECT_GE(absl::Now() - begin, penalty);
  }
}

TEST_F(AcceptorCrowdTest, NobodyIsResetWhoHasWhatAPeerMayHave) {
  Start();
  const Peer one = Fresh(CallsFrames(60)), other = Fresh(CallsFrames(50));
  const std::string upload = Frame(1, 4, 1, std::string(60, '\x10')) +
                             std::string{0, 64, 0, 0, 0, 0, 0, 0, 1} + std::string(16384, '\1');
  const Peer uploads = Fresh(upload + std::string(40'000, '\1'));
  acceptor_->CheckForCrowd("ipv4:127.0.0.1");
  acceptor_->CheckForCrowd("ipv4:127.0.0.2");
  acceptor_->CheckForCrowd("unix");
  const Peer after = Fresh("");  // the thread has looked by now
  EXPECT_EQ(acceptor_->counts().crowded, 0);
  EXPECT_FALSE(one.IsClosed(0));
  EXPECT_FALSE(other.IsClosed(0));
  EXPECT_FALSE(uploads.IsClosed(0));
}

// gRPC may have read up to the middle of a frame.
TEST_F(AcceptorCrowdTest, CallsAreSeenFromTheMiddleOfAFrameOn) {
  Start();
  const std::string frames = CallsFrames(201).substr(7);
  const Peer crowded = Fresh(frames);
  char read[64];
  {
    MutexLock lock(&mu_);
    const size_t hello = kPreface.size() + kSettings.size();
    ASSERT_EQ(recv(taken_.back().get(), read, hello, 0), static_cast<ssize_t>(hello));
  }
  acceptor_->CheckForCrowd("ipv4:127.0.0.1");
  EXPECT_TRUE(crowded.IsClosed());
}

TEST(PeerSocket, ASocketFileIsResetAsWell) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  const UniqueFd ours(pair[0]), theirs(pair[1]);
  const std::string frames = CallsFrames(20);
  ASSERT_GT(send(theirs.get(), frames.data(), frames.size(), 0), 0);
  EXPECT_EQ(CountWaitingCalls(ours.get()), 20);
  EXPECT_FALSE(ResetConnection(ours.get(), SocketCookie(theirs.get()))) << "it is another socket";
  EXPECT_TRUE(ResetConnection(ours.get(), SocketCookie(ours.get())));
  char byte = 0;
  EXPECT_EQ(recv(ours.get(), &byte, 1, 0), 0) << "the end, and nothing before it";
  EXPECT_LT(send(theirs.get(), &byte, 1, MSG_NOSIGNAL), 0);
}

TEST_F(AcceptorTest, SeesHowLongAPeerHasBeenStill) {
  Start({});
  const Peer client(port_);
  client.Send(kPreface + kSettings);
  ASSERT_TRUE(Eventually([&] { return taken() == 1; }));
  const std::string name = NameOfTaken();
  EXPECT_EQ(acceptor_->open()->IdleTime(name + "0"), absl::InfiniteDuration());
  EXPECT_EQ(acceptor_->open()->IdleTime("unix:"), absl::InfiniteDuration());
  absl::SleepFor(absl::Milliseconds(150));  // still
  EXPECT_GE(acceptor_->open()->IdleTime(name), absl::Milliseconds(100));
  const absl::Time sent = absl::Now();
  client.Send("x");
  const absl::Duration still = acceptor_->open()->IdleTime(name);
  EXPECT_LE(still, absl::Now() - sent + absl::Milliseconds(20));  // the kernel counts in its ticks
  const std::string much(1 << 20, 'y');
  {
    MutexLock lock(&mu_);
    const int fd = taken_.front().get();
    while (send(fd, much.data(), much.size(), MSG_NOSIGNAL | MSG_DONTWAIT) > 0) {
    }
  }
  absl::SleepFor(absl::Milliseconds(150));  // nothing moves, and yet something is on the way
  EXPECT_EQ(acceptor_->open()->IdleTime(name), absl::ZeroDuration()) << "the client does not read";
}

TEST(OpenConnections, OriginsAreAddressesNetworksAndUsers) {
  const auto origin = [](const char* text) {
    sockaddr_storage peer = {};
    auto& v4 = reinterpret_cast<sockaddr_in&>(peer);
    auto& v6 = reinterpret_cast<sockaddr_in6&>(peer);
    if (inet_pton(AF_INET, text, &v4.sin_addr) == 1) {
      v4.sin_family = AF_INET;
    } else {
      EXPECT_EQ(inet_pton(AF_INET6, text, &v6.sin6_addr), 1);
      v6.sin6_family = AF_INET6;
    }
    return obs::Origin(-1, peer);
  };
  EXPECT_EQ(origin("10.0.0.7"), "10.0.0.7");
  EXPECT_EQ(origin("::ffff:10.0.0.7"), "10.0.0.7");
  EXPECT_EQ(origin("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::/64");
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  sockaddr_storage peer = {};
  peer.ss_family = AF_UNIX;
  EXPECT_EQ(obs::Origin(pair[0], peer), "user " + std::to_string(geteuid()));
  close(pair[0]);
  close(pair[1]);
}

TEST(ListenSocket, APortInUseIsAnError) {
  const auto first = ListenOnPort("127.0.0.1:0", absl::Seconds(20));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_GT(first->port, 0);
  const auto second = ListenOnPort("127.0.0.1:" + std::to_string(first->port), absl::Seconds(20));
  EXPECT_EQ(second.status().message(), "Address already in use");
  const auto wide = ListenOnPort("0.0.0.0:" + std::to_string(first->port), absl::Seconds(20));
  EXPECT_FALSE(wide.ok());
}

TEST(ListenSocket, SaysWhyAnAddressCannotBeListenedOn) {
  EXPECT_EQ(ListenOnPort("192.0.2.1:0", absl::Seconds(20)).status().message(),
            "Cannot assign requested address");
  EXPECT_THAT(std::string(ListenOnPort("::1:0", absl::Seconds(20)).status().message()),
              ::testing::HasSubstr("brackets"));
  EXPECT_FALSE(ListenOnPort("no.such.host.invalid:0", absl::Seconds(20)).ok());
  EXPECT_FALSE(ListenOnPath("/nonexistent/a.sock", 0600).ok());
}

TEST(ListenSocket, EveryInterfaceMeansBothFamilies) {
  const auto any = ListenOnPort("0.0.0.0:0", absl::Seconds(20));
  ASSERT_TRUE(any.ok()) << any.status();
  const Peer over_ipv4(any->port);
  const auto loopback = ListenOnPort("[::1]:0", absl::Seconds(20));
  if (!loopback.ok()) GTEST_SKIP() << "no IPv6 here: " << loopback.status();
  const int fd = socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 address = {};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  address.sin6_port = htons(static_cast<uint16_t>(any->port));
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  close(fd);
}

}  // namespace
}  // namespace awqd::transport
