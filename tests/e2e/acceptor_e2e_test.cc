// Connections: their number, the time that they may be silent, the server without free descriptors,
// and its end with a silent connection.
#include <sys/resource.h>

#include <deque>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/http2.h"
#include "tests/e2e/server_process.h"

namespace awqd {
namespace {

using testing::HasSubstr;

class AcceptorE2eTest : public testing::Test {
 protected:
  void Start(std::vector<std::string> args) {
    args.push_back("--model_repository=" + repository_.path());
    server_ = std::make_unique<ServerProcess>(std::move(args));
    ASSERT_TRUE(server_->WaitServing()) << server_->log();
    port_ = PortOf(server_->address());
  }
  // Makes a call over a new connection.
  bool Answers() const { return server_->NewClient(absl::Seconds(5))->GetServerInfo().ok(); }
  bool AnswersSoon() const {
    for (const absl::Time until = absl::Now() + absl::Seconds(10); absl::Now() < until;) {
      if (Answers()) return true;
      absl::SleepFor(absl::Milliseconds(20));
    }
    return false;
  }

  TempFolder repository_;
  std::unique_ptr<ServerProcess> server_;
  int port_ = 0;
};

TEST_F(AcceptorE2eTest, TheEndOfDescriptorsDoesNotEndAccepting) {
  Start({});
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
  EXPECT_TRUE(AnswersSoon());
  EXPECT_LE(server_->OpenFilesAgain(before + 1), before + 1);
  const ExitReport report = server_->Stop();
  EXPECT_EQ(report.code, 0);
  EXPECT_THAT(report.log, HasSubstr("no file descriptors are left"));
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
  EXPECT_TRUE(AnswersSoon());
  const ExitReport report = server_->Stop();
  EXPECT_EQ(report.code, 0);
  EXPECT_THAT(report.log, HasSubstr("max_connections_per_peer are open"));
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
  EXPECT_EQ(server_->Stop().code, 0);
}

TEST_F(AcceptorE2eTest, NoConnectionHoldsTheEndBack) {
  Start({});
  Socket nothing(port_), preface(port_), half(port_), idle(port_);
  preface.Send(Hello().substr(0, 24));
  half.Send(Hello().substr(0, Hello().size() - 1));
  idle.Send(Hello());
  bool closed = false;
  EXPECT_NE(idle.Receive(200, &closed), "");
  const ExitReport report = server_->Stop();
  EXPECT_EQ(report.code, 0) << report.log;
  EXPECT_LT(report.took, absl::Seconds(5));
}

}  // namespace
}  // namespace awqd
