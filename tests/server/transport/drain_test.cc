// Drain by itself, and whether the kernel still has bytes to send.
#include "server/transport/drain.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "gtest/gtest.h"
#include "server/transport/open_connections.h"

namespace awqd::transport {
namespace {

TEST(Drain, CountsCallsInFlight) {
  Drain drain;
  EXPECT_EQ(drain.in_flight(), 0);
  {
    Drain::InFlight one, two;
    EXPECT_EQ(drain.in_flight(), 0) << "nobody holds one";
    one = drain.CountCall();
    two = drain.CountCall();
    EXPECT_EQ(drain.in_flight(), 2);
  }
  EXPECT_EQ(drain.in_flight(), 0);
}

TEST(Drain, AnswersCallsThatWaitWhenItRejectsAndLaterOnesAtOnce) {
  Drain drain;
  int waiting = 0, late = 0;
  EXPECT_TRUE(drain.open());
  drain.HoldNewCalls();
  EXPECT_FALSE(drain.open());
  drain.Reject([&] { ++waiting; });
  EXPECT_EQ(waiting, 0);
  drain.RejectNewCalls();
  drain.RejectNewCalls();
  EXPECT_EQ(waiting, 1);
  drain.Reject([&] { ++late; });
  EXPECT_EQ(late, 1);
  EXPECT_EQ(drain.rejected(), 2);
}

TEST(Drain, TellsListenersOnceAndOnlyThoseThatExist) {
  Drain drain;
  int heard = 0, unheard = 0;
  const Drain::Listener early(&drain, [&] { ++heard; });
  {
    const Drain::Listener gone(&drain, [&] { ++unheard; });
  }
  drain.HoldNewCalls();
  EXPECT_EQ(heard, 0);
  drain.RejectNewCalls();
  drain.RejectNewCalls();
  EXPECT_EQ(heard, 1);
  const Drain::Listener late(&drain, [&] { ++heard; });
  EXPECT_EQ(heard, 2);
  EXPECT_EQ(unheard, 0);
}

TEST(OpenConnections, SeesBytesThatThePeerDoesNotTake) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {.sin_family = AF_INET};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const int out = socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(connect(out, reinterpret_cast<sockaddr*>(&address), size), 0);
  const int in = accept(listener, nullptr, nullptr);
  OpenConnections open(10, 10);
  open.Add(out, "127.0.0.1");
  EXPECT_TRUE(open.AllSent());
  const std::string block(1 << 20, 'x');
  while (send(out, block.data(), block.size(), MSG_DONTWAIT) > 0) {
  }
  EXPECT_FALSE(open.AllSent()) << "nobody reads";
  std::string taken(1 << 20, ' ');
  for (int i = 0; i < 1000 && !open.AllSent(); ++i) {
    while (recv(in, taken.data(), taken.size(), MSG_DONTWAIT) > 0) {
    }
    usleep(1000);
  }
  EXPECT_TRUE(open.AllSent());
  for (const int fd : {in, out, listener}) close(fd);
}

}  // namespace
}  // namespace awqd::transport
