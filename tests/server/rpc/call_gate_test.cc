// The gate by itself, and what a server that shuts down answers.
#include "server/rpc/call_gate.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "server/rpc/unsent.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace awqd {
namespace {

TEST(CallGate, CountsTickets) {
  CallGate gate;
  EXPECT_EQ(gate.in_flight(), 0);
  {
    const CallGate::Ticket one(&gate), two(&gate);
    EXPECT_EQ(gate.in_flight(), 2);
  }
  EXPECT_EQ(gate.in_flight(), 0);
  EXPECT_FALSE(gate.TurnAway(nullptr)) << "it is open";
}

class GateTest : public RpcTest {
 protected:
  // What a caller that repeats itself, one call after the other, is told in the end.
  grpc::Status AskUntilRefused() {
    for (;;) {
      v1::ListModelsResponse ignored;
      grpc::ClientContext context;
      Deadline(&context);
      const grpc::Status status = repository_->ListModels(&context, {}, &ignored);
      if (!status.ok()) return status;
    }
  }
};

TEST_F(GateTest, ACallInFlightIsAnsweredAndALaterOneRefused) {
  engine_.Hold(true);
  grpc::Status first;
  v1::QuantizedMatmulResponse response;
  std::thread caller([&] { first = Matmul(GoodMatmul(), &response); });
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 1; }));
  std::thread stop([&] { server_->Shutdown(absl::Seconds(30)); });
  const grpc::Status later = AskUntilRefused();
  EXPECT_EQ(later.error_code(), grpc::StatusCode::UNAVAILABLE) << later.error_message();
  while (engine_.held() > 0) engine_.Answer();
  caller.join();
  stop.join();
  EXPECT_TRUE(first.ok()) << first.error_message();
  server_ = nullptr;
}

TEST_F(GateTest, WhatIsStillInFlightAtTheDeadlineIsCancelled) {
  engine_.Hold(true);
  grpc::Status status;
  v1::QuantizedMatmulResponse response;
  std::thread caller([&] { status = Matmul(GoodMatmul(), &response); });
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 1; }));
  const absl::Time start = absl::Now();
  std::thread answer([&] {
    EXPECT_TRUE(Eventually([&] { return engine_.cancels() == 1; }));
    engine_.Answer();
  });
  server_->Shutdown(absl::Milliseconds(300));
  answer.join();
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(300));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  caller.join();
  EXPECT_FALSE(status.ok());
  server_ = nullptr;
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

TEST_F(GateTest, AnIdleStreamIsEndedAndDoesNotHoldTheEndBack) {
  grpc::ClientContext context;
  Deadline(&context);
  const auto stream = stub_->QuantizedMatmulStream(&context);
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(stream->Write(GoodMatmul()) && stream->Read(&response));
  std::thread stop([&] { server_->Shutdown(absl::Seconds(30)); });
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  const absl::Time told = absl::Now();
  stop.join();
  EXPECT_LT(absl::Now() - told, absl::Seconds(5));
  server_ = nullptr;
}

TEST_F(GateTest, AStreamIsEndedAfterWhatItWasPromised) {
  grpc::ClientContext context;
  Deadline(&context);
  const auto stream = stub_->QuantizedMatmulStream(&context);
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(stream->Write(GoodMatmul()) && stream->Read(&response));
  EXPECT_FALSE(response.has_error());
  engine_.Hold(true);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(stream->Write(GoodMatmul()));
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 3; }));
  std::thread stop([&] { server_->Shutdown(absl::Seconds(30)); });
  EXPECT_EQ(AskUntilRefused().error_code(), grpc::StatusCode::UNAVAILABLE);
  while (engine_.held() > 0) engine_.Answer();
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(stream->Read(&response)) << i;
    EXPECT_FALSE(response.has_error()) << response.error().message();
  }
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  stop.join();
  server_ = nullptr;
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
}  // namespace awqd
