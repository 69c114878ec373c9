// Bytes that no gRPC client would send, over raw sockets: the server closes or refuses, stays
// alive, and stays small.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "awqd/v1/inference.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_process.h"

namespace awqd {
namespace {

// A TCP connection to the server that sends what it is told.
class Socket {
 public:
  explicit Socket(int port) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0;
    const int on = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  ~Socket() { close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  bool connected() const { return connected_; }

  // Stops early when the server has closed, or does not read any more.
  void Send(const std::string& bytes) {
    size_t sent = 0;
    while (sent < bytes.size()) {
      pollfd poll_fd = {.fd = fd_, .events = POLLOUT};
      if (poll(&poll_fd, 1, 2000) <= 0) return;
      const ssize_t n =
          send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n <= 0) return;
      sent += static_cast<size_t>(n);
    }
  }

  // Everything until the server closes, or nothing came for `quiet_ms`.
  std::string Receive(int quiet_ms, bool* closed) {
    std::string all;
    char block[65536];
    *closed = false;
    for (;;) {
      pollfd poll_fd = {.fd = fd_, .events = POLLIN};
      if (poll(&poll_fd, 1, quiet_ms) <= 0) return all;
      const ssize_t n = recv(fd_, block, sizeof(block), 0);
      if (n <= 0) {
        *closed = true;
        return all;
      }
      all.append(block, static_cast<size_t>(n));
    }
  }

 private:
  const int fd_;
  bool connected_ = false;
};

// --- HTTP/2 by hand (RFC 9113), headers as literals without Huffman (RFC 7541) ---

constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr uint8_t kData = 0, kHeaders = 1, kSettings = 4, kContinuation = 9;
constexpr uint8_t kEndStream = 1, kEndHeaders = 4;

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload) {
  const size_t size = payload.size();
  std::string out;
  for (int shift : {16, 8, 0}) out.push_back(static_cast<char>(size >> shift));
  out.push_back(static_cast<char>(type));
  out.push_back(static_cast<char>(flags));
  for (int shift : {24, 16, 8, 0}) out.push_back(static_cast<char>(stream >> shift));
  return out + payload;
}

std::string HpackString(const std::string& text) {
  std::string out;
  size_t size = text.size();
  if (size < 127) {
    out.push_back(static_cast<char>(size));
    return out + text;
  }
  out.push_back(127);
  for (size -= 127; size >= 128; size >>= 7) out.push_back(static_cast<char>(size % 128 + 128));
  out.push_back(static_cast<char>(size));
  return out + text;
}

std::string Header(const std::string& name, const std::string& value) {
  return std::string(1, '\0') + HpackString(name) + HpackString(value);
}

std::string CallHeaders() {
  return Header(":method", "POST") + Header(":scheme", "http") +
         Header(":path", "/awqd.v1.QuantizedInference/QuantizedMatmul") +
         Header(":authority", "localhost") + Header("te", "trailers") +
         Header("content-type", "application/grpc");
}

std::string Hello() { return kPreface + Frame(kSettings, 0, 0, ""); }

// A gRPC message with a length of our choice.
std::string Message(uint32_t claimed, const std::string& payload) {
  std::string out(1, '\0');
  for (int shift : {24, 16, 8, 0}) out.push_back(static_cast<char>(claimed >> shift));
  return out + payload;
}

// Payloads of the DATA frames in a byte stream of frames.
std::string DataOf(const std::string& frames) {
  std::string data;
  size_t at = 0;
  while (at + 9 <= frames.size()) {
    size_t size = 0;
    for (int i = 0; i < 3; ++i) size = size << 8 | static_cast<uint8_t>(frames[at + i]);
    if (static_cast<uint8_t>(frames[at + 3]) == kData) data += frames.substr(at + 9, size);
    at += 9 + size;
  }
  return data;
}

class WireTest : public testing::Test {
 protected:
  WireTest()
      : server_({"--model_repository", DemoRepository(), "--max_receive_message_bytes", "1MiB",
                 "--memory_quota_bytes", "64MiB"}) {}

  void SetUp() override {
    ASSERT_TRUE(server_.WaitServing());
    const std::string& address = server_.address();
    ASSERT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port_));
  }

  void TearDown() override {
    EXPECT_TRUE(server_.WaitServing()) << "the server did not survive";
    EXPECT_LT(PeakRssMiB(), 400);
  }

  int64_t PeakRssMiB() const { return server_.peak_rss_bytes() >> 20; }

  // Sends, then reports whether the server closed the connection.
  bool Closes(const std::string& bytes) {
    Socket socket(port_);
    EXPECT_TRUE(socket.connected());
    socket.Send(bytes);
    bool closed = false;
    socket.Receive(5000, &closed);
    return closed;
  }

  // The DATA that answers one call on stream 1.
  std::string Answer(const std::vector<std::string>& pieces, int quiet_ms = 1000) {
    Socket socket(port_);
    socket.Send(Hello() + Frame(kHeaders, kEndHeaders, 1, CallHeaders()));
    std::string frames;
    for (const std::string& piece : pieces) frames += Frame(kData, 0, 1, piece);
    socket.Send(frames + Frame(kData, kEndStream, 1, ""));
    bool closed = false;
    return DataOf(socket.Receive(quiet_ms, &closed));
  }

  ServerProcess server_;
  int port_ = 0;
};

TEST_F(WireTest, OtherProtocolsAreClosed) {
  EXPECT_TRUE(Closes("GET / HTTP/1.1\r\nHost: x\r\n\r\n"));
  EXPECT_TRUE(Closes(std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11) +
                     std::string(512, '\x5a')));  // a TLS ClientHello
  std::mt19937 random(1);
  for (int i = 0; i < 20; ++i) {
    std::string noise(4096, '\0');
    for (char& c : noise) c = static_cast<char>(random());
    EXPECT_TRUE(Closes(noise)) << i;
  }
}

TEST_F(WireTest, RandomFramesAfterAGoodPrefaceDoNoHarm) {
  std::mt19937 random(2);
  for (int i = 0; i < 200; ++i) {
    std::string noise(random() % 300, '\0');
    for (char& c : noise) c = static_cast<char>(random());
    Socket socket(port_);
    socket.Send(Hello() + Frame(static_cast<uint8_t>(random() % 12), static_cast<uint8_t>(random()),
                                random() % 4, noise));
  }
  EXPECT_TRUE(Closes(Hello() + Frame(kContinuation, 0, 1, "x")));  // continues nothing
}

TEST_F(WireTest, HalfOpenConnectionsDoNotHoldOthersUp) {
  std::vector<std::unique_ptr<Socket>> sockets;
  for (int i = 0; i < 200; ++i) {
    sockets.push_back(std::make_unique<Socket>(port_));
    if (i % 2 == 0) sockets.back()->Send("PRI * HT");
  }
  EXPECT_TRUE(server_.WaitServing());
}

TEST_F(WireTest, OversizedMetadataIsRefused) {
  // 64 KiB in one header, over a HEADERS and four CONTINUATION frames.
  const std::string block = CallHeaders() + Header("x-large", std::string(65536, 'x'));
  std::string frames = Frame(kHeaders, kEndStream, 1, block.substr(0, 16000));
  for (size_t at = 16000; at < block.size(); at += 16000) {
    const bool last = at + 16000 >= block.size();
    frames += Frame(kContinuation, last ? kEndHeaders : 0, 1, block.substr(at, 16000));
  }
  Socket socket(port_);
  socket.Send(Hello() + frames);
  bool closed = false;
  EXPECT_EQ(DataOf(socket.Receive(500, &closed)), "");

  std::string many = CallHeaders();
  for (int i = 0; i < 1000; ++i) many += Header(absl::StrCat("x-", i), "v");
  many += Header("y-bin", "!not base64!");
  Socket another(port_);
  another.Send(Hello() + Frame(kHeaders, kEndHeaders | kEndStream, 1, many.substr(0, 16000)));
  EXPECT_EQ(DataOf(another.Receive(500, &closed)), "");
}

TEST_F(WireTest, MalformedMessagesGetNoAnswer) {
  std::string groups(100, '\x0b');
  for (const std::string& payload :
       {std::string("\x0a\xff"), std::string("\x0a\x7f\x01"), groups, std::string(2000, '\xff'),
        std::string("\x08\x01"), std::string("\x42\x02\xc3\x28")}) {
    const auto size = static_cast<uint32_t>(payload.size());
    EXPECT_EQ(Answer({Message(size, payload)}, 200), "");
    EXPECT_EQ(Answer({Message(size + 10, payload)}, 200), "");  // ends before it is whole
    EXPECT_EQ(Answer({Message(0xffffffffu, payload)}, 200), "");
  }
}

TEST_F(WireTest, ClaimedLengthsTakeNoMemory) {
  const int64_t before = PeakRssMiB();
  std::vector<std::unique_ptr<Socket>> sockets;
  for (int i = 0; i < 64; ++i) {
    sockets.push_back(std::make_unique<Socket>(port_));
    sockets.back()->Send(Hello() + Frame(kHeaders, kEndHeaders, 1, CallHeaders()) +
                         Frame(kData, 0, 1, Message(0x7fffffffu, std::string(1000, 'x'))));
  }
  EXPECT_TRUE(server_.WaitServing());
  EXPECT_LT(PeakRssMiB() - before, 100);
}

TEST_F(WireTest, OneBytePerFrameGivesTheSameAnswer) {
  v1::QuantizedMatmulRequest good;
  v1::PackedWeight* packed = good.mutable_packed();
  const auto fill = [](v1::Tensor* tensor, v1::DType dtype, int64_t rows, int64_t cols,
                       int64_t bytes, char byte) {
    tensor->set_dtype(dtype);
    tensor->add_shape(rows);
    tensor->add_shape(cols);
    tensor->set_raw(std::string(bytes, byte));
  };
  fill(packed->mutable_qweight(), v1::INT32, 32, 1, 128, '\x37');
  fill(packed->mutable_qzeros(), v1::INT32, 1, 1, 4, '\x52');
  fill(packed->mutable_scales(), v1::FP16, 1, 8, 16, '\x3a');
  fill(good.mutable_activations(), v1::FP16, 1, 32, 64, '\x3b');
  const std::string payload = good.SerializeAsString();
  const std::string whole = Message(static_cast<uint32_t>(payload.size()), payload);
  std::vector<std::string> bytes;
  for (char c : whole) bytes.push_back(std::string(1, c));

  v1::QuantizedMatmulResponse one, many;
  const std::string one_answer = Answer({whole}), many_answer = Answer(bytes);
  ASSERT_GT(one_answer.size(), 5u);
  ASSERT_GT(many_answer.size(), 5u);
  ASSERT_TRUE(one.ParseFromString(one_answer.substr(5)));
  ASSERT_TRUE(many.ParseFromString(many_answer.substr(5)));
  EXPECT_EQ(one.output().raw().size(), 16u);
  EXPECT_EQ(one.output().raw(), many.output().raw());
}

}  // namespace
}  // namespace awqd
