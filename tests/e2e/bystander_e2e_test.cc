// Peers that keep a thread of gRPC busy, and the waiting time of other clients.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/e2e/http2.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/synthetic_awq.h"

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
    size_t at = 0;
    while (at + 9 <= unread_.size()) {
      const auto byte = [&](size_t i) { return static_cast<uint8_t>(unread_[at + i]); };
      const auto word = [&](size_t i) {
        return int64_t{byte(i)} << 24 | byte(i + 1) << 16 | byte(i + 2) << 8 | byte(i + 3);
      };
      const size_t size = byte(0) << 16 | byte(1) << 8 | byte(2);
      if (at + 9 + size > unread_.size()) break;
      if (byte(3) == kWindowUpdate) (word(5) == 0 ? connection_ : stream_) += word(9);
      const bool acknowledges = (byte(4) & kAcknowledges) != 0;
      if (byte(3) == kPing && !acknowledges) {
        answers += Frame(kPing, kAcknowledges, 0, unread_.substr(at + 9, size));
      }
      if (byte(3) == kSettings && !acknowledges) {
        answers += Frame(kSettings, kAcknowledges, 0, "");
        for (size_t i = 9; i + 6 <= 9 + size; i += 6) {
          if ((byte(i) << 8 | byte(i + 1)) != kInitialWindowSize) continue;
          stream_ += word(i + 2) - initial_;
          initial_ = word(i + 2);
        }
      }
      at += 9 + size;
    }
    unread_.erase(0, at);
    return answers;
  }
  int64_t left() const { return std::min(connection_, stream_); }
  void Use(int64_t bytes) {
    connection_ -= bytes;
    stream_ -= bytes;
  }

 private:
  static constexpr uint8_t kWindowUpdate = 8, kAcknowledges = 1;
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

class BystanderTest : public testing::Test {
 protected:
  void Start(const std::vector<std::string>& args) {
    SyntheticAwq::Random(256, 64, 64, 1).Write(repository_ / "m");
    std::vector<std::string> all = args;
    all.push_back("--model_repository=" + repository_.path());
    server_ = std::make_unique<ServerProcess>(all);
    ASSERT_TRUE(server_->WaitServing()) << server_->log();
    port_ = PortOf(server_->address());
  }

  TempFolder repository_;
  std::unique_ptr<ServerProcess> server_;
  int port_ = 0;
};

TEST_F(BystanderTest, WaitsForNobodyWhoUploadsByteByByte) {
  Start({"--rpc_threads=2"});
  const auto client = server_->NewClient();
  const client::MatmulCall call = {.weight = client::WeightName{"m", "layer"},
                                   .activations = {v1::FP16, {1, 256}, std::string(512, '\0')}};
  ASSERT_TRUE(client->QuantizedMatmul(call).ok());
  std::atomic<bool> over{false};
  std::atomic<int64_t> sent{0};
  std::thread upload([&] { UploadByteByByte(port_, &over, &sent); });
  std::vector<absl::Duration> waits;
  for (const absl::Time end = absl::Now() + absl::Seconds(30);
       absl::Now() < end && sent < kUploadBytes;) {
    const absl::Time start = absl::Now();
    ASSERT_TRUE(client->QuantizedMatmul(call).ok());
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
  EXPECT_EQ(server_->Stop().code, 0);
}

}  // namespace
}  // namespace awqd
