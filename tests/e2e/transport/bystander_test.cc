// Peers that keep a thread of gRPC busy, and the waiting time of other clients.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

// Each byte takes ten bytes on the wire. The upload lasts seconds, so that 1 % of the calls beside
// it are many calls. gRPC 1.51 has one thread for connections on which two threads work, and a call
// that meets the upload there waits for most of a second.
#if defined(AWQD_ADDRESS_SANITIZER) || defined(AWQD_THREAD_SANITIZER)
constexpr int64_t kUploadBytes = int64_t{2} << 20;
#else
constexpr int64_t kUploadBytes = int64_t{24} << 20;
#endif

// The flow-control windows that the server gives to a stream (RFC 9113, 6.9) and to its connection.
class Windows {
 public:
  // Returns the answers of a good client to these frames.
  std::string Read(const std::string& frames) {
    unread_ += frames;
    std::string answers;
    absl::string_view rest = unread_;
    while (const std::optional<ReceivedFrame> frame = TakeFrame(&rest)) {
      const bool acknowledges = (frame->flags & kAck) != 0;
      const auto number = [&](size_t at, size_t size) {
        int64_t out = 0;
        for (size_t i = at; i < at + size; ++i)
          out = out << 8 | static_cast<uint8_t>(frame->payload[i]);
        return out;
      };
      if (frame->type == kWindowUpdate)
        (frame->stream == 0 ? connection_ : stream_) += number(0, 4);
      if (frame->type == kPing && !acknowledges) answers += Frame(kPing, kAck, 0, frame->payload);
      if (frame->type == kSettings && !acknowledges) {
        answers += Frame(kSettings, kAck, 0, "");
        for (size_t at = 0; at + 6 <= frame->payload.size(); at += 6) {
          if (number(at, 2) != kInitialWindowSize) continue;
          stream_ += number(at + 2, 4) - initial_;
          initial_ = number(at + 2, 4);
        }
      }
    }
    unread_.erase(0, unread_.size() - rest.size());
    return answers;
  }
  int64_t left() const { return std::min(connection_, stream_); }
  void Use(int64_t bytes) {
    connection_ -= bytes;
    stream_ -= bytes;
  }

 private:
  static constexpr int kInitialWindowSize = 4;

  std::string unread_;
  int64_t initial_ = 65535, connection_ = 65535, stream_ = 65535;
};

// Sends one message of kUploadBytes, each byte in a frame of its own, until `over`.
void UploadByteByByte(int port, std::atomic<bool>* over, std::atomic<int64_t>* sent) {
  Socket socket(port);
  socket.Send(Hello() + Frame(kHeaders, kEndHeaders, 1, CallHeaders()));
  std::string head = Message(static_cast<uint32_t>(kUploadBytes), "");
  Windows windows;
  const std::string frame = Frame(kData, 0, 1, "x");
  std::string many;
  for (int i = 0; i < 4096; ++i) many += frame;
  socket.Send(Frame(kData, 0, 1, head));
  windows.Use(static_cast<int64_t>(head.size()));
  bool closed = false;
  while (!*over && !closed && *sent < kUploadBytes) {
    const int64_t now = std::min({windows.left(), kUploadBytes - *sent, int64_t{4096}});
    if (now > 0) {
      socket.Send(many.substr(0, static_cast<size_t>(now) * frame.size()));
      windows.Use(now);
      *sent += now;
    }
    socket.Send(windows.Read(socket.Receive(now > 0 ? 0 : 1, &closed)));
  }
}

using BystanderTest = ServerTest;

TEST_F(BystanderTest, WaitsForNobodyWhoUploadsByteByByte) {
  SyntheticAwq::Random(256, 64, 64, 1).Write(repository_ / "m");
  Start({"--rpc_threads=2"});
  const client::MatmulCall call = OneToken();
  ASSERT_TRUE(client_->QuantizedMatmul(call).ok());
  std::atomic<bool> over{false};
  std::atomic<int64_t> sent{0};
  std::thread upload([&] { UploadByteByByte(port_, &over, &sent); });
  std::vector<absl::Duration> waits;
  for (const absl::Time end = absl::Now() + absl::Seconds(30);
       absl::Now() < end && sent < kUploadBytes;) {
    const absl::Time start = absl::Now();
    ASSERT_TRUE(client_->QuantizedMatmul(call).ok());
    waits.push_back(absl::Now() - start);
  }
  over = true;
  upload.join();
  EXPECT_EQ(sent, kUploadBytes) << "there was something to suffer from";
  std::sort(waits.begin(), waits.end());
  const std::string text = absl::StrCat(
      waits.size(), " calls, half of them in ", absl::FormatDuration(waits[waits.size() / 2]),
      ", 99 % in ", absl::FormatDuration(waits[waits.size() * 99 / 100]), ", all in ",
      absl::FormatDuration(waits.back()), "; ", sent.load(), " bytes uploaded");
  RecordProperty("waits", text);
#if !defined(AWQD_ADDRESS_SANITIZER) && !defined(AWQD_THREAD_SANITIZER)
  // Under a sanitizer a byte costs so much that the upload keeps all CPUs busy, including the
  // client's.
  EXPECT_LT(waits[waits.size() * 99 / 100], absl::Milliseconds(250)) << text;
#endif
  Stop();
}

}  // namespace
}  // namespace awqd
