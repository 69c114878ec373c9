// Admission by bytes in flight: requests are refused before they are parsed, and bytes are released
// exactly once however a call ends.
#include "inference/grpc_service.grpc.pb.h"
#include "tests/server/services/raw_call.h"
#include "tests/server/services/rpc_fixture.h"
#include "tests/server/small_windows.h"
#include "tests/testing/repeated.h"

namespace awqd::services {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMostInFlight = 400 << 10;

class InFlightTest : public RpcTest {
 protected:
  void Configure(Options* options) override { options->in_flight_bytes = kMostInFlight; }

  bool NothingInFlight() {
    return Eventually([&] { return server_->in_flight_bytes() == 0; });
  }

  // A token has 256 bytes in the request and 32 in the answer.
  static v1::QuantizedMatmulRequest OfKiB(int64_t kib) { return GoodMatmul(kib * 4); }

  // A call in a thread of its own that the engine holds.
  struct Held {
    grpc::ClientContext context;
    v1::QuantizedMatmulResponse response;
    grpc::Status status;
    std::thread thread;
  };
  std::unique_ptr<Held> Hold(const v1::QuantizedMatmulRequest& request) {
    engine_.Hold(true);
    const size_t before = engine_.held();
    auto call = std::make_unique<Held>();
    Deadline(&call->context);
    call->thread = std::thread([this, request, held = call.get()] {
      held->status = stub_->QuantizedMatmul(&held->context, request, &held->response);
    });
    EXPECT_TRUE(Eventually([&] { return engine_.held() == before + 1; }));
    return call;
  }
};

TEST_F(InFlightTest, RefusesWhatWouldPassTheLimitAndGoesOnAfterwards) {
  const auto first = Hold(OfKiB(250));
  const int64_t held = server_->in_flight_bytes();
  EXPECT_GE(held, (250 << 10) + 1000 * 16 * 2) << "the request, and the answer that it will have";
  EXPECT_LT(held, kMostInFlight);
  v1::QuantizedMatmulResponse response;
  const grpc::Status refused = Matmul(OfKiB(250), &response);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("request: got 256"));
  EXPECT_THAT(refused.error_message(), HasSubstr("max_in_flight_bytes"));
  EXPECT_EQ(engine_.held(), 1u);
  EXPECT_TRUE(Eventually([&] { return server_->in_flight_bytes() == held; }));
  engine_.Answer();
  first->thread.join();
  EXPECT_TRUE(first->status.ok());
  ASSERT_TRUE(NothingInFlight());
  engine_.Hold(false);
  EXPECT_TRUE(Matmul(OfKiB(250), &response).ok());
}

TEST_F(InFlightTest, TheAnswerCountsBeforeItIsComputed) {
  v1::QuantizedMatmulRequest request = GoodMatmul(100);
  request.mutable_weight()->set_weight("wide");  // 25 KiB in, 800 KiB out
  v1::QuantizedMatmulResponse response;
  const grpc::Status status = Matmul(request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("output: got 819200 bytes"));
  EXPECT_EQ(engine_.submitted(), 0);
  EXPECT_TRUE(NothingInFlight());
  grpc::ClientContext context;
  v1::DequantizeRequest block = GoodDequantize();
  block.mutable_weight()->set_weight("wide");
  block.mutable_rows()->set_end(100);
  v1::DequantizeResponse dequantized;
  EXPECT_THAT(stub_->Dequantize(&context, block, &dequantized).error_message(),
              HasSubstr("output: got 819200 bytes"));
  EXPECT_TRUE(NothingInFlight());
}

TEST_F(InFlightTest, ARequestCountsAsItLiesInMemoryOnceItIsParsed) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  request.clear_weight();
  *request.mutable_packed() = GoodPacked();
  v1::Tensor& qweight = *request.mutable_packed()->mutable_qweight();
  Repeat(40000, int64_t{1},
         qweight.mutable_ints()->mutable_values());  // one byte each on the wire
  v1::QuantizedMatmulResponse response;
  const grpc::Status status = Matmul(request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("request, once it is parsed: got 64"));
  EXPECT_TRUE(NothingInFlight());
}

TEST_F(InFlightTest, IsGivenBackHoweverACallEnds) {
  v1::QuantizedMatmulResponse response;
  EXPECT_TRUE(Matmul(OfKiB(100), &response).ok());
  EXPECT_TRUE(NothingInFlight()) << "answered";
  v1::QuantizedMatmulRequest bad = OfKiB(100);
  bad.mutable_activations()->mutable_raw()->pop_back();
  EXPECT_FALSE(Matmul(bad, &response).ok());
  EXPECT_TRUE(NothingInFlight()) << "invalid";
  engine_.Refuse(absl::UnavailableError("draining"));
  EXPECT_FALSE(Matmul(OfKiB(100), &response).ok());
  EXPECT_TRUE(NothingInFlight()) << "refused by the engine";
  engine_.Refuse(absl::OkStatus());
  engine_.Fail(absl::InternalError("fault"));
  EXPECT_FALSE(Matmul(OfKiB(100), &response).ok());
  EXPECT_TRUE(NothingInFlight()) << "failed";
  engine_.Fail(absl::OkStatus());
  const auto cancelled = Hold(OfKiB(100));
  cancelled->context.TryCancel();
  cancelled->thread.join();
  EXPECT_GT(server_->in_flight_bytes(), 0) << "the engine still has it";
  ASSERT_TRUE(Eventually([&] { return engine_.cancels() == 1; }));
  engine_.Answer();
  EXPECT_TRUE(NothingInFlight()) << "cancelled";
}

TEST_F(InFlightTest, StreamsOfBlocksHoldOneChunk) {
  engine_.Hold(true);
  grpc::ClientContext context;
  Deadline(&context);
  v1::DequantizeRequest request = GoodDequantize();
  request.mutable_weight()->set_weight("wide");  // 1 MiB in chunks of 64 KiB
  const auto reader = stub_->DequantizeStream(&context, request);
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 1; }));
  EXPECT_GE(server_->in_flight_bytes(), 64 << 10);
  EXPECT_LT(server_->in_flight_bytes(), 65 << 10);
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  ASSERT_TRUE(Eventually([&] { return engine_.cancels() == 1; }));
  engine_.Answer();
  EXPECT_TRUE(NothingInFlight());
}

TEST_F(InFlightTest, ARequestOfAStreamIsRefusedAlone) {
  const auto other = Hold(OfKiB(250));
  grpc::ClientContext context;
  Deadline(&context);
  const auto stream = stub_->QuantizedMatmulStream(&context);
  v1::QuantizedMatmulRequest refused = OfKiB(250);
  refused.set_request_id("refused");
  stream->Write(refused);
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.request_id(), "refused");
  EXPECT_EQ(response.error().code(), static_cast<int>(grpc::StatusCode::RESOURCE_EXHAUSTED));
  EXPECT_THAT(response.error().message(), HasSubstr("max_in_flight_bytes"));
  engine_.Answer();
  other->thread.join();
  ASSERT_TRUE(NothingInFlight());
  engine_.Hold(false);
  stream->Write(OfKiB(250));
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_FALSE(response.has_error());
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(NothingInFlight());
}

TEST_F(InFlightTest, AnswersOfSmallCallsCountBeforeTheyAreEncoded) {
  std::vector<std::pair<std::string, int64_t>> linears;
  for (int i = 0; i < 900; ++i) linears.emplace_back(std::string(600, 'p') + std::to_string(i), 8);
  WriteTinyModel(root_ / "many", linears);
  ASSERT_TRUE(models_->Load("many").ok());
  v1::GetModelRequest request;  // a page of half a message
  request.set_name("many");
  v1::GetModelResponse page;
  grpc::ClientContext get_context;
  const grpc::Status get = repository_->GetModel(&get_context, request, &page);
  EXPECT_EQ(get.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(get.error_message(), HasSubstr("answer: got 5"));
  EXPECT_THAT(get.error_message(), HasSubstr("max_in_flight_bytes"));
  const auto oip = inference::GRPCInferenceService::NewStub(channel_);
  inference::RepositoryIndexResponse index;
  grpc::ClientContext index_context;
  const grpc::Status names = oip->RepositoryIndex(&index_context, {}, &index);
  EXPECT_EQ(names.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(names.error_message(), HasSubstr("answer: got 5"));
  EXPECT_TRUE(NothingInFlight());
}

TEST_F(InFlightTest, HealthIsAnsweredWhateverOthersHold) {
  const auto call = Hold(OfKiB(250));
  v1::GetServerInfoResponse info;
  grpc::ClientContext context;
  Deadline(&context);
  EXPECT_EQ(v1::ServerInfo::NewStub(channel_)->GetServerInfo(&context, {}, &info).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(RawCall(channel_, "/grpc.health.v1.Health/Check", "").ok());
  EXPECT_TRUE(RawCall(channel_, "/inference.GRPCInferenceService/ServerReady", "").ok());
  engine_.Answer();
  call->thread.join();
}

// [1, 4096]: 64 bytes of codes for each column, from half a byte in the request.
TEST_F(InFlightTest, AnInlineWeightCountsAsWhatItBecomes) {
  v1::QuantizedMatmulRequest request;
  v1::PackedWeight& packed = *request.mutable_packed();
  *packed.mutable_qweight() = RawTensor(v1::INT32, {1, 512}, 2048);
  *packed.mutable_qzeros() = RawTensor(v1::INT32, {1, 512}, 2048);
  *packed.mutable_scales() = RawTensor(v1::FP16, {1, 4096}, 8192);
  packed.set_group_size(-1);
  *request.mutable_activations() = RawTensor(v1::FP16, {1, 1}, 2);
  v1::QuantizedMatmulResponse response;
  const grpc::Status refused = Matmul(request, &response);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("packed: got 27"));
  EXPECT_THAT(refused.error_message(), HasSubstr("once prepared"));
  EXPECT_THAT(refused.error_message(), HasSubstr("twice the server's max_inline_weight_bytes"));
  EXPECT_EQ(engine_.prepares(), 0);
  packed.Clear();  // [1, 1024], which may be prepared
  *packed.mutable_qweight() = RawTensor(v1::INT32, {1, 128}, 512);
  *packed.mutable_qzeros() = RawTensor(v1::INT32, {1, 128}, 512);
  *packed.mutable_scales() = RawTensor(v1::FP16, {1, 1024}, 2048);
  packed.set_group_size(-1);
  const auto call = Hold(request);
  EXPECT_GT(server_->in_flight_bytes(), 64 << 10);
  EXPECT_LT(server_->in_flight_bytes(), 96 << 10);
  engine_.Answer();
  call->thread.join();
  EXPECT_TRUE(call->status.ok()) << call->status.error_message();
  EXPECT_TRUE(NothingInFlight());
}

// A small answer must not keep the results of a large batch in memory.
TEST_F(InFlightTest, AnAnswerThatSharesABufferCountsAllOfItOrIsCopied) {
  v1::QuantizedMatmulRequest request = GoodMatmul(10);
  request.mutable_weight()->set_weight("wide");  // 80 KiB out
  v1::QuantizedMatmulResponse response;
  const auto copied = [&] { return engine_.staging().stats().copied_bytes; };
  for (const auto& [others, copies] : {std::pair(64 << 10, 0), std::pair(1 << 20, 80 << 10)}) {
    engine_.ShareResults(others);
    const int64_t before = copied();
    ASSERT_TRUE(Matmul(request, &response).ok());
    EXPECT_EQ(copied() - before, 2560 + copies) << "the activations, and the answer";
  }
  EXPECT_TRUE(NothingInFlight());
}

class SlowReaderTest : public RpcTest {
 protected:
  void Configure(Options* options) override {
    options->stream_in_flight = 1000;
    options->stream_in_flight_bytes = 2 << 20;
  }
};

class FairShareTest : public RpcTest {
 protected:
  void Configure(Options* options) override { options->in_flight_bytes = 8 << 20; }

  std::shared_ptr<grpc::Channel> NewConnection() const {
    grpc::ChannelArguments apart = SmallWindows();
    apart.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), apart);
  }
};

// Each connection asks for 10 MB of answers and reads none of it.
TEST_F(FairShareTest, FiveConnectionsThatDoNotReadLeaveRoomForOthers) {
  struct Greedy {
    grpc::ClientContext context;
    std::unique_ptr<
        grpc::ClientReaderWriter<v1::QuantizedMatmulRequest, v1::QuantizedMatmulResponse>>
        stream;
  };
  v1::QuantizedMatmulRequest request = GoodMatmul(100);
  request.mutable_weight()->set_weight("wide");  // 25 KiB in, 800 KiB out
  std::vector<std::unique_ptr<v1::QuantizedInference::Stub>> stubs;
  std::vector<std::unique_ptr<Greedy>> greedy;
  for (int connection = 0; connection < 5; ++connection) {
    stubs.push_back(v1::QuantizedInference::NewStub(NewConnection()));
    for (int i = 0; i < 3; ++i) {
      greedy.push_back(std::make_unique<Greedy>());
      greedy.back()->stream = stubs.back()->QuantizedMatmulStream(&greedy.back()->context);
      for (int times = 0; times < 4; ++times) ASSERT_TRUE(greedy.back()->stream->Write(request));
    }
  }
  const auto bystander = v1::QuantizedInference::NewStub(NewConnection());
  for (int i = 0; i < 50; ++i) {
    grpc::ClientContext context;
    Deadline(&context);
    v1::QuantizedMatmulResponse response;
    const grpc::Status status = bystander->QuantizedMatmul(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_GT(server_->in_flight_bytes(), 4 << 20) << "they hold all that they may";
  for (const auto& call : greedy) call->context.TryCancel();
  greedy.clear();
  EXPECT_TRUE(Eventually([&] { return server_->in_flight_bytes() == 0; }));
}

class SendTimeoutTest : public RpcTest {
 protected:
  void Configure(Options* options) override { options->transport.send_timeout = absl::Seconds(1); }
  grpc::ChannelArguments ChannelArguments() override { return SmallWindows(); }
};

TEST_F(SendTimeoutTest, BytesOfAnAnswerThatNobodyTakesAreGivenBack) {
  grpc::ClientContext context;
  const auto stream = stub_->QuantizedMatmulStream(&context);
  v1::QuantizedMatmulRequest request = GoodMatmul(100);
  request.mutable_weight()->set_weight("wide");  // 800 KiB out
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(Eventually([&] { return engine_.submitted() == 3; }));
  EXPECT_TRUE(Eventually([&] { return server_->in_flight_bytes() == 0; }));
  v1::QuantizedMatmulResponse response;
  EXPECT_FALSE(stream->Read(&response)) << "what came of the first answer is no message";
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Matmul(request, &response).ok()) << "the connection goes on";
}

// The client sends requests of 25 KiB, and never reads the answers of 800 KiB.
TEST_F(SlowReaderTest, AClientThatDoesNotReadIsNotReadEither) {
  grpc::ClientContext context;
  const auto stream = stub_->QuantizedMatmulStream(&context);
  v1::QuantizedMatmulRequest request = GoodMatmul(100);
  request.mutable_weight()->set_weight("wide");
  std::thread writer([&] {
    for (int i = 0; i < 400 && stream->Write(request); ++i) {
    }
  });
  ASSERT_TRUE(Eventually([&] { return engine_.submitted() >= 3; }));
  int64_t most = 0;
  for (int i = 0; i < 100; ++i) {
    most = std::max(most, server_->in_flight_bytes());
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
  // One request beyond the bound is admitted, because its size is unknown before it is read.
  EXPECT_LE(most, (2 << 20) + (1 << 20));
  EXPECT_LT(engine_.submitted(), 100);
  context.TryCancel();
  writer.join();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return server_->in_flight_bytes() == 0; }));
  EXPECT_TRUE(Eventually([&] { return engine_.staging().stats().lent_bytes < (1 << 20); }));
}

}  // namespace
}  // namespace awqd::services
