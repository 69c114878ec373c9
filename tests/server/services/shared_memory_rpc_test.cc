// Calls whose tensors are in shared memory, over a fake engine: the engine's view, the bytes that
// are written, refusals, and that objects are closed however a call ends.
#include "tests/server/services/rpc_fixture.h"
#include "tests/server/services/shared_object.h"

namespace awqd::services {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kInFlight = 8 << 20;

class SharedMemoryRpcTest : public RpcTest {
 protected:
  void Configure(Options* options) override {
    options->shared_memory = {.prefixes = {prefix_}, .max_open = 4};
    options->in_flight_bytes = kInFlight;
  }

  void TearDown() override {
    EXPECT_TRUE(NothingOpen());
    RpcTest::TearDown();
  }

  bool NothingOpen() {
    return Eventually(
        [&] { return server_->open_shared_ranges() == 0 && server_->in_flight_bytes() == 0; });
  }

  // `tokens` rows for "layer" (K = 128, N = 16), read from the object at byte 4096 and answered at
  // byte 0.
  v1::QuantizedMatmulRequest Shared(int64_t tokens) const {
    v1::QuantizedMatmulRequest request = GoodMatmul(tokens);
    *request.mutable_activations()->mutable_shared_memory() = object_.Range(4096, tokens * 256);
    *request.mutable_output_shared_memory() = object_.Range(0, 4096);
    return request;
  }

  void ExpectRefused(const v1::QuantizedMatmulRequest& request, grpc::StatusCode code,
                     const std::string& text) {
    v1::QuantizedMatmulResponse response;
    const grpc::Status status = Matmul(request, &response);
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(text));
    EXPECT_TRUE(NothingOpen());
  }

  grpc::Status Dequantize(const v1::DequantizeRequest& request, v1::DequantizeResponse* response) {
    grpc::ClientContext context;
    Deadline(&context);
    return stub_->Dequantize(&context, request, response);
  }

  const std::string prefix_ = "awqd-rpc-" + std::to_string(getpid()) + "-";
  SharedObject object_{prefix_ + "object", std::string(4 << 20, 'o')};
};

TEST_F(SharedMemoryRpcTest, TheEngineSeesTheRangeAndTheAnswerLiesInTheOther) {
  std::string bytes(512, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7);
  object_.Set(4096, bytes);
  v1::QuantizedMatmulResponse response;
  const grpc::Status status = Matmul(Shared(2), &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(engine_.last_matmul().x.view(), bytes);
  EXPECT_EQ(response.output().dtype(), v1::FP16);
  EXPECT_EQ(response.output().shape(1), 16);
  EXPECT_EQ(response.output().shared_memory().name(), object_.name());
  EXPECT_EQ(response.output().shared_memory().offset(), 0);
  EXPECT_EQ(response.output().shared_memory().size(), 64);
  EXPECT_EQ(object_.Get(0, 65), std::string(64, '\0') + "o");
  EXPECT_EQ(response.execution().kernel(), "fake");
}

TEST_F(SharedMemoryRpcTest, EitherSideAlone) {
  v1::QuantizedMatmulRequest request = Shared(2);
  request.clear_output_shared_memory();
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(Matmul(request, &response).ok());
  EXPECT_EQ(response.output().raw().size(), 64u);
  request = GoodMatmul(2);
  *request.mutable_output_shared_memory() = object_.Range(0, 64);
  ASSERT_TRUE(Matmul(request, &response).ok());
  EXPECT_EQ(response.output().shared_memory().size(), 64);
  request.mutable_activations()->mutable_floats();  // typed in the request, bytes in the answer
  for (int i = 0; i < 256; ++i) request.mutable_activations()->mutable_floats()->add_values(1);
  ASSERT_TRUE(Matmul(request, &response).ok());
  EXPECT_EQ(response.output().shared_memory().size(), 64);
}

// Neither side is in a message: 2 MiB in and out exceed the message limit of 1 MiB, but count as
// bytes in flight.
TEST_F(SharedMemoryRpcTest, NoMessageLimitButTheBytesInFlight) {
  v1::QuantizedMatmulRequest request = Shared(8192);
  request.mutable_activations()->mutable_shared_memory()->set_offset(0);
  request.mutable_weight()->set_weight("wide");
  request.mutable_activations()->set_shape(0, 256);
  request.mutable_activations()->mutable_shared_memory()->set_size(256 * 256);
  *request.mutable_output_shared_memory() = object_.Range(0, 2 << 20);
  v1::QuantizedMatmulResponse response;
  const grpc::Status status = Matmul(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.output().shared_memory().size(), 2 << 20);
  EXPECT_EQ(object_.Get(0, 4), std::string(4, '\0'));
  object_.Truncate(16 << 20);
  ExpectRefused(
      [&] {
        v1::QuantizedMatmulRequest large = Shared(40000);  // 10 MiB in, 1.2 MiB out
        *large.mutable_output_shared_memory() = object_.Range(0, 4 << 20);
        return large;
      }(),
      grpc::StatusCode::RESOURCE_EXHAUSTED, "activations: got 10240000 bytes");
}

TEST_F(SharedMemoryRpcTest, DequantizeWritesAnyBlockThere) {
  v1::DequantizeRequest request = GoodDequantize();
  request.mutable_weight()->set_weight("wide");
  request.set_output_dtype(v1::FP32);  // 2 MiB
  *request.mutable_output_shared_memory() = object_.Range(100, (4 << 20) - 100);
  v1::DequantizeResponse response;
  const grpc::Status status = Dequantize(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.output().shared_memory().size(), 2 << 20);
  EXPECT_EQ(response.output().shared_memory().offset(), 100);
  EXPECT_EQ(object_.Get(99, 2), std::string("o\0", 2));
  EXPECT_EQ(object_.Get(100 + (2 << 20) - 1, 2), std::string("\0o", 2));
  request.mutable_output_shared_memory()->set_size((2 << 20) - 1);
  const grpc::Status small = Dequantize(request, &response);
  EXPECT_EQ(small.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(small.error_message(),
              HasSubstr("output_shared_memory.size: got 2097151, expected at least 2097152"));
  request.set_output_encoding(v1::VALUES);
  EXPECT_THAT(Dequantize(request, &response).error_message(), HasSubstr("output_encoding"));
  grpc::ClientContext context;
  v1::DequantizeChunk chunk;
  const auto stream = stub_->DequantizeStream(&context, [&] {
    request.clear_output_encoding();
    return request;
  }());
  EXPECT_FALSE(stream->Read(&chunk));
  EXPECT_THAT(stream->Finish().error_message(), HasSubstr("output_shared_memory: got a range"));
}

TEST_F(SharedMemoryRpcTest, ManyOnAStreamAndAFailureAlone) {
  grpc::ClientContext context;
  Deadline(&context);
  const auto stream = stub_->QuantizedMatmulStream(&context);
  for (int i = 0; i < 20; ++i) {
    v1::QuantizedMatmulRequest request = Shared(2);
    request.set_request_id(std::to_string(i));
    if (i == 7) request.mutable_activations()->mutable_shared_memory()->set_name(prefix_ + "none");
    ASSERT_TRUE(stream->Write(request));
    v1::QuantizedMatmulResponse response;
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.request_id(), std::to_string(i));
    EXPECT_EQ(response.has_error(), i == 7) << response.error().message();
    EXPECT_EQ(response.output().shared_memory().size(), i == 7 ? 0 : 64);
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(SharedMemoryRpcTest, RefusesWhatDoesNotFit) {
  const auto invalid = grpc::StatusCode::INVALID_ARGUMENT;
  v1::QuantizedMatmulRequest request = Shared(2);
  request.mutable_activations()->mutable_shared_memory()->set_size(511);
  ExpectRefused(request, invalid, "activations.shared_memory.size: got 511, expected 512");
  request = Shared(2);
  request.mutable_output_shared_memory()->set_size(63);
  ExpectRefused(request, invalid, "output_shared_memory.size: got 63, expected at least 64");
  request = Shared(2);
  request.set_output_encoding(v1::VALUES);
  ExpectRefused(request, invalid, "output_encoding");
  request = Shared(2);
  request.mutable_output_shared_memory()->set_name("x");
  ExpectRefused(request, invalid, "output_shared_memory.name");
  request = Shared(2);
  request.mutable_activations()->mutable_shared_memory()->set_offset(INT64_MAX);
  ExpectRefused(request, invalid, "activations.shared_memory: got offset 9223372036854775807");
  request = Shared(2);
  request.mutable_output_shared_memory()->set_offset(4 << 20);
  ExpectRefused(request, invalid, "output_shared_memory: got a range that cannot be used");
  request = Shared(2);
  *request.mutable_bias() = RawTensor(v1::FP16, {16}, 32);
  *request.mutable_bias()->mutable_shared_memory() = object_.Range(0, 32);
  ExpectRefused(request, invalid, "bias.shared_memory: got a range, expected contents in the");
  request = Shared(2);
  *request.mutable_packed() = GoodPacked();
  *request.mutable_packed()->mutable_scales()->mutable_shared_memory() = object_.Range(0, 32);
  ExpectRefused(request, invalid, "packed.scales.shared_memory: got a range");
  EXPECT_EQ(engine_.submitted(), 0);
  EXPECT_EQ(object_.Get(0, 4096), std::string(4096, 'o'));
}

// The last contents win, whichever field they are in.
TEST_F(SharedMemoryRpcTest, ARangeThatReplacesRawContents) {
  object_.Set(4096, std::string(256, 's'));
  v1::QuantizedMatmulRequest request = GoodMatmul(1);
  request.mutable_activations()->set_raw(std::string(1 << 16, 'r'));
  v1::Tensor later;
  *later.mutable_shared_memory() = object_.Range(4096, 256);
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(
      v1::QuantizedMatmulRequest::kActivationsFieldNumber, later.SerializeAsString());
  v1::QuantizedMatmulResponse response;
  const grpc::Status status = Matmul(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(engine_.last_matmul().x.view(), std::string(256, 's'));
}

class HeldTest : public SharedMemoryRpcTest {
 protected:
  // A call that the engine holds.
  void Start(const v1::QuantizedMatmulRequest& request) {
    engine_.Hold(true);
    Deadline(&context_);
    thread_ = std::thread(
        [this, request] { status_ = stub_->QuantizedMatmul(&context_, request, &response_); });
    ASSERT_TRUE(Eventually([&] { return engine_.held() == 1; }));
  }
  void Answer() {
    engine_.Answer();
    thread_.join();
  }

  grpc::ClientContext context_;
  v1::QuantizedMatmulResponse response_;
  grpc::Status status_;
  std::thread thread_;
};

TEST_F(HeldTest, ARunningRequestKeepsItsObject) {
  Start(Shared(2));
  EXPECT_EQ(server_->open_shared_ranges(), 1) << "the output; the input was read";
  object_.Unlink();
  const SharedObject other(object_.name(), std::string(8192, 'n'));
  Answer();
  EXPECT_TRUE(status_.ok()) << status_.error_message();
  EXPECT_EQ(object_.Get(0, 64), std::string(64, '\0'));
  EXPECT_EQ(other.Get(0, 64), std::string(64, 'n'));
}

TEST_F(HeldTest, ACancelledRequestIsNotWritten) {
  Start(Shared(2));
  context_.TryCancel();
  ASSERT_TRUE(Eventually([&] { return engine_.cancels() == 1; }));
  Answer();
  EXPECT_EQ(status_.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(NothingOpen());
  EXPECT_EQ(object_.Get(0, 64), std::string(64, 'o'));
}

TEST_F(HeldTest, AFailedRequestIsNotWritten) {
  engine_.Fail(absl::InternalError("fault"));
  Start(Shared(2));
  Answer();
  EXPECT_EQ(status_.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_TRUE(NothingOpen());
  EXPECT_EQ(object_.Get(0, 64), std::string(64, 'o'));
}

TEST_F(HeldTest, AnOutputCutShortMeanwhileIsWrittenOrRefusedAndNothingWorse) {
  Start(Shared(2));
  object_.Truncate(10);
  Answer();
  EXPECT_TRUE(status_.ok()) << status_.error_message();
  EXPECT_EQ(object_.size(), 64);
}

TEST_F(HeldTest, RangesInUseAreBounded) {
  engine_.Hold(true);
  grpc::ClientContext context;
  Deadline(&context);
  const auto stream = stub_->QuantizedMatmulStream(&context);
  for (int i = 0; i < 4; ++i) {
    v1::QuantizedMatmulRequest request = Shared(2);
    request.mutable_activations()->set_raw(std::string(512, '\0'));
    ASSERT_TRUE(stream->Write(request));
  }
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 4; }));
  EXPECT_EQ(server_->open_shared_ranges(), 4);
  v1::QuantizedMatmulResponse response;
  const grpc::Status status = Matmul(Shared(2), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  for (int i = 0; i < 4; ++i) engine_.Answer();
  stream->WritesDone();
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(NothingOpen());
}

TEST_F(SharedMemoryRpcTest, NoFileStaysOpen) {
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(Matmul(Shared(2), &response).ok());
  ASSERT_TRUE(NothingOpen());
  const int files = OpenFiles();
  v1::QuantizedMatmulRequest absent = Shared(2);
  absent.mutable_output_shared_memory()->set_name(prefix_ + "absent");
  for (int i = 0; i < 50; ++i) {
    EXPECT_TRUE(Matmul(Shared(2), &response).ok());
    EXPECT_FALSE(Matmul(absent, &response).ok());
  }
  ASSERT_TRUE(NothingOpen());
  EXPECT_EQ(OpenFiles(), files);
}

TEST_F(SharedMemoryRpcTest, TheServerSaysItsPrefix) {
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(v1::ServerInfo::NewStub(channel_)->GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.limits().shared_memory_prefix(), prefix_);
}

class NoSharedMemoryTest : public RpcTest {};

TEST_F(NoSharedMemoryTest, IsOffUnlessAskedFor) {
  const SharedObject object("awqd-off-" + std::to_string(getpid()), std::string(4096, 'o'));
  v1::QuantizedMatmulRequest request = GoodMatmul(2);
  *request.mutable_output_shared_memory() = object.Range(0, 4096);
  v1::QuantizedMatmulResponse response;
  grpc::Status status = Matmul(request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(status.error_message(), HasSubstr("--shared_memory_prefix"));
  request.clear_output_shared_memory();
  *request.mutable_activations()->mutable_shared_memory() = object.Range(0, 512);
  status = Matmul(request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  v1::DequantizeRequest block = GoodDequantize();
  *block.mutable_output_shared_memory() = object.Range(0, 4096);
  v1::DequantizeResponse dequantized;
  grpc::ClientContext context;
  EXPECT_EQ(stub_->Dequantize(&context, block, &dequantized).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  grpc::ClientContext asking;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(v1::ServerInfo::NewStub(channel_)->GetServerInfo(&asking, {}, &info).ok());
  EXPECT_EQ(info.limits().shared_memory_prefix(), "");
}

}  // namespace
}  // namespace awqd::services
