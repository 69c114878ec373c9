// A server that is stopped while its answers are under way through a slow network.
//
// gRPC closes the connection of the last call as soon as it has handed all bytes to the kernel. A
// later acknowledgement of the client is answered with a reset, which discards the bytes that are
// still under way: here up to half of the answer.
#include <signal.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_test.h"
#include "tests/e2e/transport/slow_link.h"

namespace awqd {
namespace {

// A client written by hand, which reads and acknowledges each piece, as many clients do. gRPC's own
// C++ client does so seldom.
class Acknowledging {
 public:
  // Begins a call of QuantizedMatmul.
  explicit Acknowledging(const std::string& address) : socket_(PortOf(address)) {
    const std::string most = "\x7f\xff\xff\xff";
    socket_.Send(Hello() +
                 Frame(kSettings, 0, 0, absl::StrCat(absl::string_view("\0\4", 2), most)) +
                 Frame(kWindowUpdate, 0, 0, std::string("\x7f\0\0\0", 4)) +
                 Frame(kHeaders, kEndHeaders, 1, CallHeaders()));
  }
  void Send(const std::string& frames) { socket_.Send(frames); }

  // Reads until the stream has ended, the server has closed, or nothing came for `quiet_ms`.
  void Read(int quiet_ms) {
    for (absl::Time last = absl::Now(); absl::Now() - last < absl::Milliseconds(quiet_ms);) {
      bool closed = false;
      const std::string piece = socket_.Receive(2, &closed);
      if (!piece.empty()) last = absl::Now();
      unread_ += piece;
      absl::string_view rest = unread_;
      while (const auto frame = TakeFrame(&rest)) Take(*frame);
      unread_.erase(0, unread_.size() - rest.size());
      if (closed || ended_) return;
    }
  }
  int64_t bytes() const { return bytes_; }
  bool ended() const { return ended_; }

 private:
  void Take(const ReceivedFrame& frame) {
    if (frame.type == kPing && (frame.flags & kAck) == 0) {
      socket_.Send(Frame(kPing, kAck, 0, frame.payload));
    }
    if (frame.type == kHeaders && (frame.flags & kEndStream) != 0) ended_ = true;
    if (frame.type == kData) {
      bytes_ += static_cast<int64_t>(frame.payload.size());
      socket_.Send(Frame(kWindowUpdate, 0, 1, std::string("\0\0\0\1", 4)));
    }
  }

  Socket socket_;
  std::string unread_;
  int64_t bytes_ = 0;
  bool ended_ = false;
};

class SlowNetworkTest : public ServerTest {
 protected:
  // Serves "m" behind a slow link.
  void StartBehindLink(int64_t k, int64_t n, int64_t group_size) {
    SyntheticAwq::Random(k, n, group_size, 1).Write(repository_ / "m");
    Start({"--stream_chunk_bytes=1MiB"});
    link_ = std::make_unique<SlowLink>(server_->address());
  }
  // Stops the server in the middle of an answer, which takes more than a second.
  void StopIn(absl::Duration delay) {
    stop_ = std::thread([this, delay] {
      absl::SleepFor(delay);
      server_->Signal(SIGTERM);
    });
  }
  void TearDown() override {
    if (stop_.joinable()) stop_.join();
    ExpectGoodEnd();
  }

  std::unique_ptr<SlowLink> link_;
  std::thread stop_;
};

TEST_F(SlowNetworkTest, BringsTheWholeStream) {
  StartBehindLink(512, 4096, 128);
  const auto client = client::Client::Create({.address = link_->address()});
  ASSERT_TRUE(client.ok()) << client.status();
  StopIn(absl::Milliseconds(200));
  const absl::Time start = absl::Now();
  const auto answer =
      (*client)->Dequantize({.weight = client::WeightName{"m", "layer"}, .output_dtype = v1::FP32});
  EXPECT_GT(absl::Now() - start, absl::Milliseconds(600)) << "it came before the server stopped";
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->output.bytes.size(), size_t{512} * 4096 * 4);
}

class SlowAnswerTest : public SlowNetworkTest {
 protected:
  static constexpr int kTokens = 512, kK = 32, kN = 8192;  // 8 MiB as fp16

  void SetUp() override {
    StartBehindLink(kK, kN, 32);
    slow_ = std::make_unique<Acknowledging>(link_->address());
    slow_->Read(200);  // the server has received the headers by then
  }

  void Ask() {
    const std::string bytes = ProductOfZeros(kTokens, kK).SerializeAsString();
    const std::string message = Message(static_cast<uint32_t>(bytes.size()), bytes);
    for (size_t at = 0; at < message.size(); at += 16384) {
      const bool last = at + 16384 >= message.size();
      slow_->Send(Frame(kData, last ? kEndStream : 0, 1, message.substr(at, 16384)));
    }
  }

  void ExpectTheWholeAnswer() {
    slow_->Read(5000);
    EXPECT_GT(slow_->bytes(), int64_t{kTokens} * kN * 2);
    EXPECT_TRUE(slow_->ended()) << "the status is lost";
  }

  std::unique_ptr<Acknowledging> slow_;
};

// gRPC has sent GOAWAY to the connection before the request comes.
TEST_F(SlowAnswerTest, IsWholeWhenItBeginsWhileTheServerStops) {
  server_->Signal(SIGTERM);
  slow_->Read(500);
  Ask();
  ExpectTheWholeAnswer();
}

TEST_F(SlowAnswerTest, IsWholeWhenTheServerStopsMeanwhile) {
  Ask();
  StopIn(absl::Milliseconds(200));
  ExpectTheWholeAnswer();
}

}  // namespace
}  // namespace awqd
