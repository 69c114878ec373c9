// QuantizedMatmul, Dequantize and DequantizeStream over a fake engine: answers, errors, deadlines,
// cancels.
#include "tests/server/services/rpc_fixture.h"

namespace awqd::services {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using InferenceTest = RpcTest;

TEST_F(InferenceTest, MatmulAnswersWithShapeExecutionAndId) {
  v1::QuantizedMatmulRequest request = GoodMatmul(3);
  request.set_request_id("me");
  request.set_priority(7);
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(Matmul(request, &response).ok());
  EXPECT_THAT(response.output().shape(), ElementsAre(3, 16));
  EXPECT_EQ(response.output().raw().size(), 3u * 16 * 2);
  EXPECT_EQ(response.execution().kernel(), "fake");
  EXPECT_EQ(response.execution().path(), v1::FUSED);
  EXPECT_EQ(response.execution().queue_us(), 3);
  EXPECT_EQ(response.request_id(), "me");
  EXPECT_EQ(engine_.last_options().priority, 7);
  EXPECT_EQ(engine_.last_matmul().rows, 3);
  EXPECT_LT(engine_.last_options().deadline, absl::Now() + absl::Seconds(11));
}

TEST_F(InferenceTest, InlineWeightIsPacked) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  *request.mutable_packed() = GoodPacked();
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(Matmul(request, &response).ok());
  EXPECT_EQ(engine_.last_matmul().weight->shape.n, 16);
  request.mutable_packed()->set_group_size(64);
  const grpc::Status status = Matmul(request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("packed.scales"));
}

TEST_F(InferenceTest, EmptyRequestsNameAField) {
  v1::QuantizedMatmulResponse matmul;
  const grpc::Status status = Matmul({}, &matmul);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("weight: got nothing"));
  grpc::ClientContext context;
  v1::DequantizeResponse dequantize;
  EXPECT_THAT(stub_->Dequantize(&context, {}, &dequantize).error_message(),
              HasSubstr("weight: got nothing"));
  grpc::ClientContext stream_context;
  const auto reader = stub_->DequantizeStream(&stream_context, {});
  v1::DequantizeChunk chunk;
  EXPECT_FALSE(reader->Read(&chunk));
  EXPECT_THAT(reader->Finish().error_message(), HasSubstr("weight: got nothing"));
}

TEST_F(InferenceTest, UnknownNamesAreNotFoundOrNotYetLoaded) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  request.mutable_weight()->set_model("other");
  v1::QuantizedMatmulResponse response;
  EXPECT_EQ(Matmul(request, &response).error_code(), grpc::StatusCode::NOT_FOUND);
  server_->SetStarting(true);
  EXPECT_EQ(Matmul(request, &response).error_code(), grpc::StatusCode::UNAVAILABLE);
  server_->SetStarting(false);
  request = GoodMatmul();
  request.mutable_weight()->set_weight("lair");
  EXPECT_EQ(Matmul(request, &response).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(InferenceTest, EngineErrorsKeepTheirCode) {
  v1::QuantizedMatmulResponse response;
  engine_.Refuse(absl::ResourceExhaustedError("queue: full"));
  EXPECT_EQ(Matmul(GoodMatmul(), &response).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  engine_.Refuse(absl::OkStatus());
  engine_.Fail(absl::InternalError("address 0x1234"));
  const grpc::Status status = Matmul(GoodMatmul(), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_THAT(status.error_message(), HasSubstr("error id"));
  EXPECT_THAT(status.error_message(), ::testing::Not(HasSubstr("0x1234")));
}

TEST_F(InferenceTest, CancelWithdrawsTheTaskAndTheCallEndsOnce) {
  engine_.Hold(true);
  grpc::ClientContext context;
  v1::QuantizedMatmulResponse response;
  grpc::Status status;
  std::thread call([&] { status = stub_->QuantizedMatmul(&context, GoodMatmul(), &response); });
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 1; }));
  context.TryCancel();
  call.join();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return engine_.cancels() == 1; }));
  engine_.Answer();  // the engine answers after the call was cancelled, and the call then ends
}

TEST_F(InferenceTest, DeadlineInTheQueueWithdrawsTheTask) {
  engine_.Hold(true);
  grpc::ClientContext context;
  Deadline(&context, 1000);  // long enough to reach the queue on a busy machine
  v1::DequantizeResponse response;
  const grpc::Status status = stub_->Dequantize(&context, GoodDequantize(), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([&] { return engine_.cancels() == 1; }));
  engine_.Answer();
}

TEST_F(InferenceTest, ExpiredCallsNeverReachTheEngine) {
  grpc::ClientContext context;
  Deadline(&context, -1000);
  v1::QuantizedMatmulResponse response;
  EXPECT_EQ(stub_->QuantizedMatmul(&context, GoodMatmul(), &response).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(engine_.submitted(), 0);
}

TEST_F(InferenceTest, CancelAtAnyMomentLeavesTheServerWell) {
  for (int i = 0; i < 200; ++i) {
    grpc::ClientContext context;
    v1::QuantizedMatmulResponse response;
    std::thread cancel([&, i] {
      std::this_thread::sleep_for(std::chrono::microseconds(i * 10));
      context.TryCancel();
    });
    const grpc::Status status = stub_->QuantizedMatmul(&context, GoodMatmul(), &response);
    EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::CANCELLED)
        << status.error_message();
    cancel.join();
  }
  v1::QuantizedMatmulResponse response;
  EXPECT_TRUE(Matmul(GoodMatmul(), &response).ok());
}

TEST_F(InferenceTest, DequantizeAnswersABlock) {
  grpc::ClientContext context;
  v1::DequantizeRequest request = GoodDequantize();
  request.mutable_rows()->set_begin(100);
  request.set_output_dtype(v1::FP32);
  request.set_output_encoding(v1::VALUES);
  request.set_request_id("d");
  v1::DequantizeResponse response;
  ASSERT_TRUE(stub_->Dequantize(&context, request, &response).ok());
  EXPECT_THAT(response.output().shape(), ElementsAre(28, 16));
  EXPECT_EQ(response.output().floats().values_size(), 28 * 16);
  EXPECT_EQ(response.request_id(), "d");
}

TEST_F(InferenceTest, DequantizeBeyondTheMessageLimitHintsAtTheStream) {
  grpc::ClientContext context;
  v1::DequantizeRequest request = GoodDequantize();
  request.mutable_weight()->set_weight("wide");  // 128 x 4096 x 2 = the limit of 1 MiB
  v1::DequantizeResponse response;
  const grpc::Status status = stub_->Dequantize(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("DequantizeStream"));
  EXPECT_EQ(engine_.submitted(), 0);
}

TEST_F(InferenceTest, DequantizeStreamCoversEveryRowInOrder) {
  grpc::ClientContext context;
  Deadline(&context);
  v1::DequantizeRequest request = GoodDequantize();
  request.mutable_weight()->set_weight("wide");
  request.mutable_rows()->set_begin(3);
  const auto reader = stub_->DequantizeStream(&context, request);
  int64_t next = 3;
  int executions = 0;
  v1::DequantizeChunk chunk;
  while (reader->Read(&chunk)) {
    EXPECT_EQ(chunk.rows().begin(), next);
    next = chunk.rows().end();
    EXPECT_EQ(chunk.output().raw().size(),
              static_cast<size_t>(next - chunk.rows().begin()) * 4096 * 2);
    EXPECT_EQ(chunk.total_rows(), 125);
    EXPECT_EQ(chunk.columns().end(), 4096);
    EXPECT_EQ(chunk.has_execution(), next == 128);
    executions += chunk.has_execution();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(next, 128);
  EXPECT_EQ(executions, 1);
  EXPECT_EQ(chunk.execution().compute_us(), 4 * engine_.submitted());
}

TEST_F(InferenceTest, DequantizeStreamOfNoRowsIsOneEmptyChunk) {
  grpc::ClientContext context;
  v1::DequantizeRequest request = GoodDequantize();
  request.mutable_rows()->set_begin(128);
  const auto reader = stub_->DequantizeStream(&context, request);
  v1::DequantizeChunk chunk;
  ASSERT_TRUE(reader->Read(&chunk));
  EXPECT_TRUE(chunk.has_execution());
  EXPECT_THAT(chunk.output().shape(), ElementsAre(0, 16));
  EXPECT_FALSE(reader->Read(&chunk));
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(InferenceTest, DequantizeStreamStopsWhenCancelled) {
  engine_.Hold(true);
  grpc::ClientContext context;
  v1::DequantizeRequest request = GoodDequantize();
  request.mutable_weight()->set_weight("wide");
  const auto reader = stub_->DequantizeStream(&context, request);
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 1; }));
  engine_.Answer();
  v1::DequantizeChunk chunk;
  ASSERT_TRUE(reader->Read(&chunk));
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 1; }));
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  ASSERT_TRUE(Eventually([&] { return engine_.cancels() == 1; }));
  engine_.Answer();
  EXPECT_EQ(engine_.submitted(), 2);
}

TEST_F(InferenceTest, HostileIdsAndNamesStayOnOneLogLine) {
  const std::string hostile = "x\n2026-01-01 E forged \x1b[31m";
  v1::QuantizedMatmulRequest request = GoodMatmul();
  request.set_request_id(hostile);
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(Matmul(request, &response).ok());
  EXPECT_EQ(response.request_id(), hostile);
  request.mutable_weight()->set_weight(std::string(500000, '\n'));
  const grpc::Status status = Matmul(request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_LT(status.error_message().size(), 300u);
}

TEST_F(InferenceTest, TheLoopRunsWhatItSubmitted) {
  engine_.Hold(true);
  engine_.CallersRun(true);
  v1::QuantizedMatmulResponse response;
  EXPECT_TRUE(Matmul(GoodMatmul(), &response).ok());
  EXPECT_TRUE(engine_.last_options().caller_runs);
  grpc::ClientContext context;
  const auto stream = stub_->QuantizedMatmulStream(&context);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(stream->Write(GoodMatmul()));
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_FALSE(response.has_error());
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_GE(engine_.run_queued(), 4);
}

TEST_F(InferenceTest, WhatAnotherThreadSubmitsIsForTheEnginesWorkers) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  *request.mutable_packed() = GoodPacked();  // packed on a thread of its own
  v1::QuantizedMatmulResponse response;
  EXPECT_TRUE(Matmul(request, &response).ok());
  EXPECT_FALSE(engine_.last_options().caller_runs);
}

// Races between threads: calls of every kind at once, with cancels and deadlines at
// any moment, on several threads of the loop.
class SeveralThreadsTest : public RpcTest {
  void Configure(Options* options) override { options->rpc_threads = 4; }
};

TEST_F(SeveralThreadsTest, CallsOfEveryKindAtOnce) {
  engine_.Hold(true);
  engine_.CallersRun(true);
  std::vector<std::thread> clients;
  for (int t = 0; t < 4; ++t) {
    clients.emplace_back([&, t] {
      for (int i = 0; i < 60; ++i) {
        grpc::ClientContext context;
        Deadline(&context, i % 5 == 4 ? 1 : 10000);
        v1::QuantizedMatmulResponse response;
        if ((i + t) % 2 == 0) {
          const grpc::Status status = stub_->QuantizedMatmul(&context, GoodMatmul(), &response);
          EXPECT_TRUE(status.ok() || i % 5 == 4) << status.error_message();
          continue;
        }
        const auto stream = stub_->QuantizedMatmulStream(&context);
        for (int n = 0; n < 3 && stream->Write(GoodMatmul()); ++n) stream->Read(&response);
        if (i % 3 == 0) context.TryCancel();
        stream->WritesDone();
        const grpc::Status status = stream->Finish();
        EXPECT_TRUE(status.ok() || i % 3 == 0 || i % 5 == 4) << status.error_message();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_TRUE(Eventually([&] { return server_->in_flight_bytes() == 0; }));
}

class OneLoopThreadTest : public RpcTest {
 protected:
  // With one thread, an answer proves that all earlier events were handled.
  void Configure(Options* options) override { options->rpc_threads = 1; }
};

TEST_F(OneLoopThreadTest, AnInlineWeightWhoseCallHasEndedIsNotPacked) {
  v1::QuantizedMatmulRequest product = GoodMatmul();
  *product.mutable_packed() = GoodPacked();
  v1::DequantizeRequest block;
  *block.mutable_packed() = GoodPacked();
  const auto pass = [&] {
    v1::QuantizedMatmulResponse response;
    EXPECT_TRUE(Matmul(GoodMatmul(), &response).ok());
  };
  engine_.HoldPrepare(true);
  v1::QuantizedMatmulResponse response;
  std::thread first([&] { EXPECT_TRUE(Matmul(product, &response).ok()); });
  ASSERT_TRUE(Eventually([&] { return engine_.prepares() == 1; }));
  const int64_t before = server_->in_flight_bytes();

  grpc::ClientContext contexts[2];
  std::thread second([&] {
    v1::QuantizedMatmulResponse none;
    EXPECT_EQ(stub_->QuantizedMatmul(&contexts[0], product, &none).error_code(),
              grpc::StatusCode::CANCELLED);
  });
  std::thread third([&] {
    v1::DequantizeResponse none;
    EXPECT_EQ(stub_->Dequantize(&contexts[1], block, &none).error_code(),
              grpc::StatusCode::CANCELLED);
  });
  const auto bytes = static_cast<int64_t>(product.ByteSizeLong() + block.ByteSizeLong());
  // The parsed messages count too.
  ASSERT_TRUE(Eventually([&] {
    return server_->admission()->drain()->in_flight() == 3 &&
           server_->in_flight_bytes() >= before + bytes;
  }));
  pass();
  for (grpc::ClientContext& context : contexts) context.TryCancel();
  second.join();
  third.join();
  pass();

  engine_.HoldPrepare(false);
  first.join();
  EXPECT_TRUE(Eventually([&] { return server_->in_flight_bytes() == 0; }));
  EXPECT_EQ(engine_.prepares(), 1);
}

}  // namespace
}  // namespace awqd::services
