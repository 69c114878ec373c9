// Message limits with bounded memory, and clients that vanish.
#include <stdlib.h>

#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int64_t kLimit = 1 << 20;

class LimitsTest : public ServerTest {
 protected:
  LimitsTest() { SyntheticAwq::Random(384, 256, 128, 1).Write(repository_ / "m"); }

  void StartUnlimited(std::vector<std::string> args) {
    Start(std::move(args));
    grpc::ChannelArguments unlimited;
    unlimited.SetMaxReceiveMessageSize(-1);
    stub_ = v1::QuantizedInference::NewStub(server_->NewChannel(unlimited));
  }

  // The allocator returns unused pages at once, so that resident memory is used memory.
  void StartMeasured(const std::vector<std::string>& args) {
    setenv("MALLOC_CONF", "dirty_decay_ms:0", 1);
    StartUnlimited(args);
    unsetenv("MALLOC_CONF");
  }

  // A legal product of exactly this many bytes on the wire; the id is padding.
  static v1::QuantizedMatmulRequest RequestOf(int64_t bytes) {
    v1::QuantizedMatmulRequest request = ProductOfZeros((bytes - 128) / 768, 384);
    while (static_cast<int64_t>(request.ByteSizeLong()) < bytes) {
      request.mutable_request_id()->push_back('x');
    }
    return request;
  }

  grpc::Status Send(int64_t bytes) {
    const v1::QuantizedMatmulRequest request = RequestOf(bytes);
    EXPECT_EQ(static_cast<int64_t>(request.ByteSizeLong()), bytes);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    context.set_wait_for_ready(true);
    v1::QuantizedMatmulResponse response;
    return stub_->QuantizedMatmul(&context, request, &response);
  }
};

TEST_F(LimitsTest, RefusesWhatPassesTheReceiveLimit) {
  // Twice the largest message, and the one before it, which may not be freed yet. With less, gRPC
  // closes connections instead (the next test).
  StartMeasured(
      {absl::StrCat("--max_receive_message_bytes=", kLimit), "--memory_quota_bytes=64MiB"});
  EXPECT_TRUE(Send(kLimit - 1).ok());
  const grpc::Status at = Send(kLimit);
  EXPECT_TRUE(at.ok()) << at.error_message();
  const int64_t before = server_->peak_rss_bytes();
  for (int i = 0; i < 40; ++i) {
    for (const int64_t bytes : {kLimit + 1, 10 * kLimit}) {
      const grpc::Status over = Send(bytes);
      EXPECT_EQ(over.error_code(), grpc::RESOURCE_EXHAUSTED) << over.error_message();
    }
  }
  // The library buffers a message before it refuses it: 11 MiB of the 440 that were sent, up to 35
  // under ThreadSanitizer, whose allocator keeps more.
  EXPECT_LT(server_->peak_rss_bytes() - before, 48 * kLimit);
  EXPECT_TRUE(Send(kLimit - 1).ok()) << "the next call works";
  Stop();
}

// gRPC frees memory by ending any calls, including small and innocent ones, as long as it holds
// bytes of a large one. Such a client may try again and is answered.
TEST_F(LimitsTest, AMemoryQuotaUsedUpEndsCallsAndNothingElse) {
  StartMeasured(
      {absl::StrCat("--max_receive_message_bytes=", kLimit), "--memory_quota_bytes=4MiB"});
  EXPECT_TRUE(Send(1024).ok());
  const int64_t before = server_->peak_rss_bytes();
  const auto small = [&] {
    const grpc::Status status = Send(1024);
    EXPECT_THAT(status.error_code(), AnyOf(grpc::OK, grpc::RESOURCE_EXHAUSTED, grpc::UNAVAILABLE))
        << status.error_message();
    return status;
  };
  std::atomic<bool> over = false;
  std::thread bystander([&] {
    while (!over) small();
  });
  for (int i = 0; i < 20; ++i) {
    const grpc::Status large = Send(10 * kLimit);
    EXPECT_THAT(large.error_code(), AnyOf(grpc::RESOURCE_EXHAUSTED, grpc::UNAVAILABLE))
        << large.error_message();
  }
  over = true;
  bystander.join();
  EXPECT_LT(server_->peak_rss_bytes() - before, 48 * kLimit);

  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  grpc::Status next = small();
  while (!next.ok() && absl::Now() < deadline) next = small();
  EXPECT_TRUE(next.ok()) << "ten seconds after the last large one: " << next.error_message();
  Stop();
}

// The first answer fills the client's window; later ones wait behind it.
TEST_F(LimitsTest, RequestsOfAStreamThatNobodyReadsLeaveNothing) {
  constexpr int kPadded = 6, kFailing = 16;
  StartMeasured({});
  v1::QuantizedMatmulRequest first = RequestOf(8 * kLimit);
  first.clear_request_id();
  first.set_output_dtype(v1::FP32);
  v1::QuantizedMatmulRequest failing;
  failing.set_request_id(std::string(16 * kLimit, 'x'));
  v1::QuantizedMatmulRequest padded = RequestOf(1024);
  padded.clear_request_id();
  padded.GetReflection()->MutableUnknownFields(&padded)->AddLengthDelimited(
      1000, std::string(16 * kLimit, 'x'));
  [[maybe_unused]] const int64_t before = server_->peak_rss_bytes();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const auto stream = stub_->QuantizedMatmulStream(&context);
  ASSERT_TRUE(stream->Write(first));
  // Together they are less than a stream may hold, if they are not computed at once.
  for (int i = 0; i < kPadded; ++i) ASSERT_TRUE(stream->Write(padded));
  for (int i = 0; i < kFailing; ++i) ASSERT_TRUE(stream->Write(failing));
  ASSERT_TRUE(stream->WritesDone());
  v1::QuantizedMatmulResponse response;
  int failed = 0;
  for (int i = 0; i <= kPadded + kFailing; ++i) {
    ASSERT_TRUE(stream->Read(&response)) << i;
    if (!response.has_error()) continue;
    ++failed;
    EXPECT_EQ(response.error().code(), grpc::INVALID_ARGUMENT) << response.error().message();
    EXPECT_EQ(response.request_id(), "") << "too long to be echoed";
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(failed, kFailing);
#ifndef AWQD_THREAD_SANITIZER  // it keeps records of every address ever used, also of freed memory
  // The limit is for the 352 MiB that were sent.
  EXPECT_LT(server_->peak_rss_bytes() - before, 192 * kLimit);
#endif
  Stop();
}

// Eight bytes of memory for each byte on the wire, and twice that while the parser's array grows.
TEST_F(LimitsTest, AShapeOfMegabytesIsRefusedUnread) {
  constexpr int64_t kDimensions = 60 * kLimit;
  StartUnlimited({});
  v1::Tensor shape;
  shape.GetReflection()->MutableUnknownFields(&shape)->AddLengthDelimited(
      v1::Tensor::kShapeFieldNumber, std::string(kDimensions, '\x01'));
  v1::QuantizedMatmulRequest request = RequestOf(1024);
  request.clear_activations();
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(
      v1::QuantizedMatmulRequest::kActivationsFieldNumber, shape.SerializeAsString());
  [[maybe_unused]] const int64_t before = server_->peak_rss_bytes();
  for (int i = 0; i < 3; ++i) {
    grpc::ClientContext context;
    v1::QuantizedMatmulResponse response;
    const grpc::Status status = stub_->QuantizedMatmul(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("activations.shape: got 62914560 bytes"));
  }
#ifndef AWQD_THREAD_SANITIZER
  // The message itself, and the one before it, which may not be freed yet.
  EXPECT_LT(server_->peak_rss_bytes() - before, 3 * kDimensions);
#endif
  Stop();
}

TEST_F(LimitsTest, PointsToTheStreamWhereAnAnswerIsTooLong) {
  StartUnlimited({"--max_send_message_bytes=65536"});
  v1::DequantizeRequest request;
  request.mutable_weight()->set_model("m");
  request.mutable_weight()->set_weight("layer");
  grpc::ClientContext context;
  v1::DequantizeResponse response;
  const grpc::Status status = stub_->Dequantize(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("DequantizeStream"));
  const auto whole = client_->Dequantize({.weight = client::WeightName{"m", "layer"}});
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_THAT(whole->output.shape, ::testing::ElementsAre(384, 256));
  Stop();
}

TEST_F(LimitsTest, KilledClientsLeaveNothingBehind) {
  SyntheticAwq::Random(4096, 4096, 128, 2).Write(repository_ / "big");
  StartUnlimited({"--rpc_threads=4"});
  ASSERT_TRUE(client_->GetServerInfo().ok());
  const int before = server_->open_files();
  int killed = 0;
  for (int i = 0; i < 40; ++i) {
    const ExitReport report =
        server_->Awqctl({"dequantize", "big", "layer", "-o", repository_ / "out.safetensors"},
                        absl::Milliseconds(2 + i));
    killed += report.exited ? 0 : 1;
  }
  EXPECT_GT(killed, 5) << "none was caught in the act";
  EXPECT_LE(server_->OpenFilesAgain(before), before);
  const grpc::Status status = Send(1024);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_LT(Stop().took, absl::Seconds(5)) << "a thread of gRPC's polls for ten seconds";
}

}  // namespace
}  // namespace awqd
