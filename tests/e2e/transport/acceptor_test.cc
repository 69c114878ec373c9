// Connections: their number, the time that they may be silent, the server without free descriptors,
// and its end with a silent connection.
#include <sys/resource.h>

#include <deque>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

class AcceptorE2eTest : public ServerTest {
 protected:
  // Makes a call over a new connection.
  bool Answers() const { return server_->NewClient(absl::Seconds(5))->GetServerInfo().ok(); }
};

TEST_F(AcceptorE2eTest, TheEndOfDescriptorsDoesNotEndAccepting) {
  Start();
  const int before = server_->open_files();
  const auto files = static_cast<rlim_t>(before + 10);
  const rlimit few = {.rlim_cur = files, .rlim_max = files};
  ASSERT_EQ(prlimit(server_->pid(), RLIMIT_NOFILE, &few, nullptr), 0);
  {
    std::deque<Socket> sockets;
    for (int i = 0; i < 70; ++i) sockets.emplace_back(port_).Send(Hello());
    bool closed = false;
    sockets.back().Receive(5000, &closed);
    EXPECT_TRUE(closed) << "it is told";
  }
  EXPECT_TRUE(Eventually([&] { return Answers(); }));
  EXPECT_LE(server_->OpenFilesAgain(before + 1), before + 1);
  EXPECT_THAT(Stop().log, HasSubstr("no file descriptors are left"));
}

TEST_F(AcceptorE2eTest, ConnectionsAreBounded) {
  Start({"--max_connections_per_peer=8"});
  std::deque<Socket> sockets;
  for (int i = 0; i < 30; ++i) sockets.emplace_back(port_).Send(Hello());
  int closed = 0;
  for (Socket& socket : sockets) {
    bool gone = false;
    socket.Receive(200, &gone);
    closed += gone ? 1 : 0;
  }
  // WaitServing may have used one of the eight.
  EXPECT_GE(closed, 22);
  EXPECT_LE(closed, 23);
  if (closed == 23) sockets.emplace_back(port_).Send(Hello());  // in the place of WaitServing's
  EXPECT_FALSE(Answers());
  sockets.clear();
  EXPECT_TRUE(Eventually([&] { return Answers(); }));
  EXPECT_THAT(Stop().log, HasSubstr("max_connections_per_peer are open"));
}

TEST_F(AcceptorE2eTest, SilentConnectionsAreClosed) {
  Start({"--handshake_timeout_s=0.3"});
  Socket nothing(port_), half(port_), fine(port_);
  half.Send(Hello().substr(0, Hello().size() - 1));
  fine.Send(Hello());
  bool closed = false;
  EXPECT_EQ(nothing.Receive(5000, &closed), "");
  EXPECT_TRUE(closed);
  EXPECT_EQ(half.Receive(5000, &closed), "");
  EXPECT_TRUE(closed);
  EXPECT_NE(fine.Receive(500, &closed), "");
  EXPECT_FALSE(closed);
  Stop();
}

TEST_F(AcceptorE2eTest, NoConnectionHoldsTheEndBack) {
  Start();
  Socket nothing(port_), preface(port_), half(port_), idle(port_);
  preface.Send(Hello().substr(0, 24));
  half.Send(Hello().substr(0, Hello().size() - 1));
  idle.Send(Hello());
  bool closed = false;
  EXPECT_NE(idle.Receive(200, &closed), "");
  EXPECT_LT(Stop().took, absl::Seconds(5));
}

}  // namespace
}  // namespace awqd
