// Idle time, age and keepalive of connections: each flag does what its help says, as a raw socket
// sees it, and gRPC clients lose nothing.
#include <cstdint>
#include <thread>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

constexpr uint32_t kNoError = 0, kEnhanceYourCalm = 11;  // RFC 9113, section 7

class ConnectionTest : public ServerTest {
 protected:
  void TearDown() override { Stop(); }
};

// A silent connection: the frames that it received, and when it was closed.
struct Silence {
  std::string frames;
  bool closed = false;
  absl::Duration took;
};

// Answers pings or not, and does nothing else until the connection is closed or `limit` is over.
Silence StaySilent(int port, bool answer_pings, absl::Duration limit) {
  Silence out;
  const absl::Time start = absl::Now();
  Socket socket(port);
  socket.Send(Hello());
  while (!out.closed && absl::Now() - start < limit) {
    const std::string frames = socket.Receive(50, &out.closed);
    out.frames += frames;
    const std::string pings = PayloadsOf(kPing, frames);
    for (size_t at = 0; answer_pings && at + 8 <= pings.size(); at += 8) {
      socket.Send(Frame(kPing, kAck, 0, pings.substr(at, 8)));
    }
  }
  out.took = absl::Now() - start;
  return out;
}

// The error code of the first GOAWAY; -1 when there was none.
int64_t GoAwayCode(const std::string& frames) {
  const std::string payload = PayloadsOf(kGoAway, frames);
  if (payload.size() < 8) return -1;
  int64_t code = 0;
  for (int i = 4; i < 8; ++i) code = code << 8 | static_cast<uint8_t>(payload[i]);
  return code;
}

TEST_F(ConnectionTest, StaysOpenByDefault) {
  Start();
  const Silence silence = StaySilent(port_, true, absl::Seconds(3));
  EXPECT_FALSE(silence.closed);
  EXPECT_EQ(GoAwayCode(silence.frames), -1);
}

TEST_F(ConnectionTest, IdleOnesAreSentAway) {
  Start({"--max_connection_idle_s=1"});
  const Silence silence = StaySilent(port_, true, absl::Seconds(15));
  EXPECT_TRUE(silence.closed);
  EXPECT_NE(GoAwayCode(silence.frames), -1);
  EXPECT_GE(silence.took, absl::Milliseconds(900));
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(client_->GetServerInfo().ok()) << "a client makes itself a new connection";
    absl::SleepFor(absl::Milliseconds(700));
  }
}

TEST_F(ConnectionTest, OldOnesAreSentAwayAndNoCallFails) {
  Start({"--max_connection_age_s=1"});
  Silence silence;
  std::thread other([&] { silence = StaySilent(port_, true, absl::Seconds(15)); });
  int calls = 0;
  for (const absl::Time start = absl::Now(); absl::Now() - start < absl::Seconds(4); ++calls) {
    const absl::Status status = client_->GetServerInfo().status();
    ASSERT_TRUE(status.ok()) << status << " after " << calls;
  }
  EXPECT_GT(calls, 100);
  other.join();
  EXPECT_TRUE(silence.closed);
  EXPECT_EQ(GoAwayCode(silence.frames), kNoError);
  EXPECT_GE(silence.took, absl::Milliseconds(800));  // gRPC varies the age by a tenth
}

// The time that an unused stream stays open, at most `limit`, and its status.
grpc::Status HoldStream(v1::QuantizedInference::Stub& stub, absl::Duration limit,
                        absl::Duration* took) {
  grpc::ClientContext context;
  const absl::Time start = absl::Now();
  context.set_deadline(absl::ToChronoTime(start + limit));
  const auto stream = stub.QuantizedMatmulStream(&context);
  v1::QuantizedMatmulResponse response;
  while (stream->Read(&response)) {
  }
  const grpc::Status status = stream->Finish();
  *took = absl::Now() - start;
  return status;
}

TEST_F(ConnectionTest, AgeWaitsForCallsUnlessAGraceIsSet) {
  absl::Duration took;
  Start({"--max_connection_age_s=1"});
  // It lasts until its own deadline. The server knows the deadline too, and then closes the old
  // connection, so that a slow client may see the end of the connection before its timer.
  const grpc::Status held = HoldStream(*stub_, absl::Seconds(4), &took);
  EXPECT_THAT(held.error_code(), ::testing::AnyOf(grpc::DEADLINE_EXCEEDED, grpc::UNAVAILABLE))
      << held.error_message();
  EXPECT_GE(took, absl::Seconds(3.9));
  Stop();
  Start({"--max_connection_age_s=1", "--max_connection_age_grace_s=1"});
  const grpc::Status cut = HoldStream(*stub_, absl::Seconds(20), &took);
  EXPECT_EQ(cut.error_code(), grpc::UNAVAILABLE) << cut.error_message();
  EXPECT_GE(took, absl::Seconds(1.5));
  EXPECT_LT(took, absl::Seconds(10));
}

TEST_F(ConnectionTest, VanishedClientsAreFoundByPings) {
  Start({"--keepalive_time_s=1", "--keepalive_timeout_s=1"});
  Silence answering;
  std::thread other([&] { answering = StaySilent(port_, true, absl::Seconds(5)); });
  const Silence vanished = StaySilent(port_, false, absl::Seconds(15));
  other.join();
  EXPECT_FALSE(PayloadsOf(kPing, vanished.frames).empty());
  EXPECT_TRUE(vanished.closed);
  EXPECT_GE(vanished.took, absl::Milliseconds(1800));
  EXPECT_GE(PayloadsOf(kPing, answering.frames).size(), 8u * 2);
  EXPECT_FALSE(answering.closed) << "it answered every ping";
}

// The server's answer to twenty pings in a row.
std::string SendPings(int port, bool* closed) {
  Socket socket(port);
  socket.Send(Hello());
  std::string frames = socket.Receive(200, closed);
  for (int i = 0; i < 20 && !*closed; ++i) {
    socket.Send(Frame(kPing, 0, 0, std::string(8, 'x')));
    frames += socket.Receive(20, closed);
  }
  return frames + (*closed ? "" : socket.Receive(500, closed));
}

TEST_F(ConnectionTest, ClientsThatPingTooMuchAreSentAway) {
  bool closed = false;
  Start();
  EXPECT_EQ(GoAwayCode(SendPings(port_, &closed)), kEnhanceYourCalm);
  EXPECT_TRUE(closed);
  Stop();
  Start({"--min_ping_interval_s=0"});
  const std::string frames = SendPings(port_, &closed);
  EXPECT_EQ(GoAwayCode(frames), -1);
  EXPECT_FALSE(closed);
  EXPECT_EQ(PayloadsOf(kPing, frames).size(), 8u * 20);
}

}  // namespace
}  // namespace awqd
