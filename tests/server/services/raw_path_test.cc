// The raw path end to end over a fake engine: the number of copies of payloads, and the reuse of
// buffers.
#include <cstring>
#include <string>

#include "tests/server/services/rpc_fixture.h"

namespace awqd::services {
namespace {

class RawPathTest : public RpcTest {
 protected:
  void Configure(Options* options) override {
    options->transport.max_receive_message_bytes = options->transport.max_send_message_bytes =
        16 << 20;
  }

  // [tokens, 128] against "wide", N = 4096.
  static v1::QuantizedMatmulRequest Wide(int64_t tokens) {
    v1::QuantizedMatmulRequest request = GoodMatmul(tokens);
    request.mutable_weight()->set_weight("wide");
    return request;
  }

  // gRPC releases an answer shortly after the client has it. The fake engine keeps its last
  // request.
  bool Settled() {
    return Eventually([&] {
      return server_->in_flight_bytes() == 0 && engine_.staging().stats().lent_bytes < 512 << 10;
    });
  }

  void Call(const v1::QuantizedMatmulRequest& request) {
    v1::QuantizedMatmulResponse response;
    const grpc::Status status = Matmul(request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_EQ(response.output().raw().size(), request.activations().raw().size() / 256 * 4096 * 2);
  }
};

TEST_F(RawPathTest, ALargePayloadIsCopiedOnceAndItsAnswerNever) {
  const v1::QuantizedMatmulRequest request = Wide(1024);  // 256 KiB in, 8 MiB out
  for (int i = 0; i < 3; ++i) {
    Call(request);
    ASSERT_TRUE(Settled());
  }
  const engine::StagingStats before = engine_.staging().stats();
  constexpr int kCalls = 20;
  for (int i = 0; i < kCalls; ++i) {
    Call(request);
    ASSERT_TRUE(Settled());
  }
  const engine::StagingStats after = engine_.staging().stats();
  EXPECT_EQ(after.copied_bytes - before.copied_bytes, kCalls * 1024 * 256);
  EXPECT_EQ(after.misses, before.misses);
}

TEST_F(RawPathTest, TheEngineSeesExactlyTheBytesThatWereSent) {
  v1::QuantizedMatmulRequest request = Wide(300);
  std::string* raw = request.mutable_activations()->mutable_raw();
  for (size_t i = 0; i < raw->size(); ++i) (*raw)[i] = static_cast<char>(i * 7 + i / 251);
  Call(request);
  EXPECT_EQ(engine_.last_matmul().x.view(), *raw);
}

TEST_F(RawPathTest, ValuesAreStagedToo) {
  v1::QuantizedMatmulRequest request = GoodMatmul(1);
  v1::Tensor* x = request.mutable_activations();
  for (int i = 0; i < 128; ++i) x->mutable_floats()->add_values(1);
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(Matmul(request, &response).ok());
  EXPECT_EQ(response.output().floats().values_size(), 16);
  std::string ones;
  for (int i = 0; i < 128; ++i) ones += std::string("\0\x3c", 2);
  EXPECT_EQ(engine_.last_matmul().x.view(), ones);
}

// The last member of a oneof wins. An earlier one must not be staged, and must not overrun a buffer
// of the winner's size.
TEST_F(RawPathTest, ValuesThatReplaceRawContentsAreStagedInstead) {
  v1::QuantizedMatmulRequest request = GoodMatmul(1);
  request.mutable_activations()->set_raw(std::string(1 << 20, '\x7f'));
  v1::Tensor later;
  for (int i = 0; i < 128; ++i) later.mutable_floats()->add_values(1);
  // Unknown fields are written last, and merged into the field when they are parsed.
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(
      v1::QuantizedMatmulRequest::kActivationsFieldNumber, later.SerializeAsString());
  v1::QuantizedMatmulResponse response;
  const grpc::Status status = Matmul(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  std::string ones;
  for (int i = 0; i < 128; ++i) ones += std::string("\0\x3c", 2);
  EXPECT_EQ(engine_.last_matmul().x.view(), ones);
}

TEST_F(RawPathTest, BuffersComeBackWhenCallsFail) {
  for (int i = 0; i < 3; ++i) {
    Call(Wide(64));
    ASSERT_TRUE(Settled());
  }
  const int64_t lent = engine_.staging().stats().lent_bytes;
  const int64_t misses = engine_.staging().stats().misses;
  v1::QuantizedMatmulResponse response;
  engine_.Fail(absl::InternalError("fault"));
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(Matmul(Wide(64), &response).ok());
  engine_.Fail(absl::OkStatus());
  engine_.Refuse(absl::ResourceExhaustedError("full"));
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(Matmul(Wide(64), &response).ok());
  EXPECT_TRUE(Eventually([&] { return engine_.staging().stats().lent_bytes == lent; }));
  EXPECT_EQ(engine_.staging().stats().misses, misses);
}

TEST_F(RawPathTest, ADequantizedBlockIsSentFromItsBuffer) {
  v1::DequantizeRequest request = GoodDequantize();
  request.mutable_weight()->set_weight("wide");
  for (int i = 0; i < 5; ++i) {
    grpc::ClientContext context;
    v1::DequantizeResponse response;
    ASSERT_TRUE(stub_->Dequantize(&context, request, &response).ok());
    EXPECT_EQ(response.output().raw().size(), 128u * 4096 * 2);
    ASSERT_TRUE(Settled());
  }
  EXPECT_EQ(engine_.staging().stats().copied_bytes, 0);
  EXPECT_EQ(engine_.staging().stats().misses, 1);
}

}  // namespace
}  // namespace awqd::services
