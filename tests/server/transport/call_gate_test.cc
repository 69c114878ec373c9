// The call gate alone, and the kernel's counts of bytes under way.
#include "server/transport/call_gate.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "gtest/gtest.h"
#include "server/transport/shutdown.h"

namespace awqd::transport {
namespace {

TEST(CallGate, CountsTickets) {
  CallGate gate;
  EXPECT_EQ(gate.in_flight(), 0);
  {
    CallGate::Ticket one, two;
    EXPECT_EQ(gate.in_flight(), 0) << "nobody holds one";
    one.Hold(&gate);
    two.Hold(&gate);
    EXPECT_EQ(gate.in_flight(), 2);
  }
  EXPECT_EQ(gate.in_flight(), 0);
}

TEST(CallGate, AnswersCallsThatWaitWhenItRefusesAndLaterOnesAtOnce) {
  CallGate gate;
  int waiting = 0, late = 0;
  EXPECT_TRUE(gate.open());
  gate.Close();
  EXPECT_FALSE(gate.open());
  gate.TurnAway([&] { ++waiting; });
  EXPECT_EQ(waiting, 0);
  gate.Refuse();
  gate.Refuse();
  EXPECT_EQ(waiting, 1);
  gate.TurnAway([&] { ++late; });
  EXPECT_EQ(late, 1);
  EXPECT_EQ(gate.turned_away(), 2);
}

TEST(CallGate, TellsListenersOnceAndOnlyThoseThatExist) {
  CallGate gate;
  int heard = 0, unheard = 0;
  const CallGate::Listener early(&gate, [&] { ++heard; });
  {
    const CallGate::Listener gone(&gate, [&] { ++unheard; });
  }
  gate.Close();
  EXPECT_EQ(heard, 0);
  gate.Refuse();
  gate.Refuse();
  EXPECT_EQ(heard, 1);
  const CallGate::Listener late(&gate, [&] { ++heard; });
  EXPECT_EQ(heard, 2);
  EXPECT_EQ(unheard, 0);
}

TEST(AllSent, SeesBytesThatThePeerDoesNotTake) {
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
  EXPECT_TRUE(AllSent());
  const std::string block(1 << 20, 'x');
  while (send(out, block.data(), block.size(), MSG_DONTWAIT) > 0) {
  }
  EXPECT_FALSE(AllSent()) << "nobody reads";
  std::string taken(1 << 20, ' ');
  for (int i = 0; i < 1000 && !AllSent(); ++i) {
    while (recv(in, taken.data(), taken.size(), MSG_DONTWAIT) > 0) {
    }
    usleep(1000);
  }
  EXPECT_TRUE(AllSent());
  for (const int fd : {in, out, listener}) close(fd);
}

}  // namespace
}  // namespace awqd::transport
