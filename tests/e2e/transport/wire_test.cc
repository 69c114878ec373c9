// Bytes that no gRPC client would send, over raw sockets: the server closes or refuses, stays
// alive, and needs little memory.
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "awqd/v1/inference.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/http2.h"
#include "tests/e2e/server_process.h"

namespace awqd {
namespace {

class WireTest : public ::testing::Test {
 protected:
  WireTest()
      : server_({"--model_repository", DemoRepository(), "--max_receive_message_bytes", "1MiB",
                 "--memory_quota_bytes", "64MiB"}) {}

  void SetUp() override {
    ASSERT_TRUE(server_.WaitServing());
    port_ = PortOf(server_.address());
  }

  void TearDown() override {
    EXPECT_TRUE(server_.WaitServing()) << "the server did not survive";
    EXPECT_LT(PeakRssMiB(), 400);
  }

  int64_t PeakRssMiB() const { return server_.peak_rss_bytes() >> 20; }

  // Sends the bytes, and returns whether the server closed the connection.
  bool Closes(const std::string& bytes) {
    Socket socket(port_);
    EXPECT_TRUE(socket.connected());
    socket.Send(bytes);
    bool closed = false;
    socket.Receive(5000, &closed);
    return closed;
  }

  // The DATA frames that answer one call on stream 1.
  std::string Answer(const std::vector<std::string>& pieces, int quiet_ms = 1000) {
    Socket socket(port_);
    socket.Send(Hello() + Frame(kHeaders, kEndHeaders, 1, CallHeaders()));
    std::string frames;
    for (const std::string& piece : pieces) frames += Frame(kData, 0, 1, piece);
    socket.Send(frames + Frame(kData, kEndStream, 1, ""));
    bool closed = false;
    return PayloadsOf(kData, socket.Receive(quiet_ms, &closed));
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

TEST_F(WireTest, TooManyPingsEndTheConnection) {
  std::string pings;
  for (int i = 0; i < 20; ++i) pings += Frame(kPing, 0, 0, std::string(8, 'p'));
  Socket socket(port_);
  socket.Send(Hello() + pings);
  bool closed = false;
  const std::string frames = socket.Receive(5000, &closed);
  EXPECT_TRUE(closed);
  const std::string goaway = PayloadsOf(kGoAway, frames);
  // Last stream, ENHANCE_YOUR_CALM (11), and the reason.
  ASSERT_GE(goaway.size(), 8u);
  EXPECT_EQ(goaway.substr(4, 4), std::string("\0\0\0\x0b", 4));
  EXPECT_THAT(goaway.substr(8), ::testing::HasSubstr("too_many_pings"));
}

TEST_F(WireTest, HeadersOfNoCallGetNoAnswer) {
  const std::string path = Header(":path", "/awqd.v1.QuantizedInference/QuantizedMatmul");
  const std::string common = Header(":scheme", "http") + Header(":authority", "localhost") +
                             Header("te", "trailers") + Header("content-type", "application/grpc");
  for (const std::string& headers :
       {common, Header(":method", "POST") + common, Header(":method", "GET") + path + common,
        Header(":method", "POST") + Header(":path", "no/slash") + common,
        Header(":method", "POST") + path + common + Header("grpc-timeout", "soon"),
        Header(":method", "POST") + path + common + Header("grpc-encoding", "bogus"),
        CallHeaders() + Header("Upper-Case", "x"), CallHeaders() + std::string("\x80")}) {
    Socket socket(port_);
    socket.Send(Hello() + Frame(kHeaders, kEndHeaders, 1, headers) +
                Frame(kData, kEndStream, 1, Message(0, "")));
    bool closed = false;
    EXPECT_EQ(PayloadsOf(kData, socket.Receive(300, &closed)), "");
  }
}

TEST_F(WireTest, UploadsThatBreakOffLeaveNothingBehind) {
  const int before = server_.open_files();
  for (int i = 0; i < 100; ++i) {
    Socket socket(port_);
    std::string upload = Hello() + Frame(kHeaders, kEndHeaders, 1, CallHeaders());
    for (int frame = 0; frame < 4; ++frame) {
      const std::string part(10000, 'x');
      upload += Frame(kData, 0, 1, frame == 0 ? Message(500000, part) : part);
    }
    socket.Send(upload.substr(0, 1 + i * upload.size() / 100));
    socket.Reset();
  }
  EXPECT_LE(server_.OpenFilesAgain(before), before);
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
  EXPECT_EQ(PayloadsOf(kData, socket.Receive(500, &closed)), "");

  std::string many = CallHeaders();
  for (int i = 0; i < 1000; ++i) many += Header(absl::StrCat("x-", i), "v");
  many += Header("y-bin", "!not base64!");
  Socket another(port_);
  another.Send(Hello() + Frame(kHeaders, kEndHeaders | kEndStream, 1, many.substr(0, 16000)));
  EXPECT_EQ(PayloadsOf(kData, another.Receive(500, &closed)), "");
}

TEST_F(WireTest, MalformedMessagesGetNoAnswer) {
  std::string groups(100, '\x0b');
  for (const std::string& payload :
       {std::string("\x0a\xff"), std::string("\x0a\x7f\x01"), groups, std::string(2000, '\xff'),
        std::string("\x08\x01"), std::string("\x42\x02\xc3\x28")}) {
    const auto size = static_cast<uint32_t>(payload.size());
    EXPECT_EQ(Answer({Message(size, payload)}, 200), "");
    EXPECT_EQ(Answer({Message(size + 10, payload)}, 200), "");  // ends before it is complete
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

TEST_F(WireTest, AnEndWithoutAMessageIsToldAsSuch) {
  Socket socket(port_);
  socket.Send(Hello() + Frame(kHeaders, kEndHeaders | kEndStream, 1, CallHeaders()));
  bool closed = false;
  const std::string trailers = PayloadsOf(kHeaders, socket.Receive(1000, &closed));
  EXPECT_THAT(trailers, ::testing::HasSubstr("request: got no message, expected one"));
}

TEST_F(WireTest, TheLongestTimeoutThatCanBeWrittenHasNotPassed) {
  Socket socket(port_);
  socket.Send(Hello() +
              Frame(kHeaders, kEndHeaders, 1, CallHeaders() + Header("grpc-timeout", "99999999H")) +
              Frame(kData, kEndStream, 1, Message(0, "")));
  bool closed = false;
  const std::string trailers = PayloadsOf(kHeaders, socket.Receive(1000, &closed));
  EXPECT_THAT(trailers, ::testing::HasSubstr("expected"));
  EXPECT_THAT(trailers, ::testing::Not(::testing::HasSubstr("deadline")));
}

}  // namespace
}  // namespace awqd
