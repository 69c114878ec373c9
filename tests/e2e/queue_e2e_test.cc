// Calls that wait in the real server's queue: refused, expired, cancelled, killed.
//
// A batch of kBatch tokens starts at once and a smaller one waits a minute for more, so that calls
// of one token stay queued until the test ends their wait.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <list>
#include <memory>

#include "absl/time/clock.h"
#include "awqd/v1/inference.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/synthetic_awq.h"

namespace awqd {
namespace {

constexpr int kQueue = 2;
constexpr int kBatch = 8;

v1::QuantizedMatmulRequest Request(int64_t tokens) {
  v1::QuantizedMatmulRequest request;
  request.mutable_weight()->set_model("m");
  request.mutable_weight()->set_weight("layer");
  request.mutable_activations()->set_dtype(v1::FP16);
  request.mutable_activations()->add_shape(tokens);
  request.mutable_activations()->add_shape(256);
  request.mutable_activations()->set_raw(std::string(tokens * 512, '\0'));
  return request;
}

// One call in flight. Destroying it cancels it and waits for its end.
class Pending {
 public:
  Pending(v1::QuantizedInference::Stub& stub, int64_t tokens, absl::Duration timeout)
      : request_(Request(tokens)) {
    context_.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
    stub.async()->QuantizedMatmul(&context_, &request_, &response_,
                                  [this](grpc::Status status) { ended_.set_value(status); });
  }
  ~Pending() {
    context_.TryCancel();
    status_.wait();
  }

  bool done() const {
    return status_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  grpc::StatusCode Code() const { return status_.get().error_code(); }
  const v1::QuantizedMatmulResponse& response() const { return response_; }
  void Cancel() { context_.TryCancel(); }

 private:
  grpc::ClientContext context_;
  const v1::QuantizedMatmulRequest request_;
  v1::QuantizedMatmulResponse response_;
  std::promise<grpc::Status> ended_;
  const std::shared_future<grpc::Status> status_ = ended_.get_future().share();
};
using Calls = std::list<std::unique_ptr<Pending>>;

class QueueTest : public testing::Test {
 protected:
  void SetUp() override {
    SyntheticAwq::Random(256, 64, 64, 1).Write(repository_ / "m");
    server_ = std::make_unique<ServerProcess>(std::vector<std::string>{
        "--model_repository=" + repository_.path(), "--max_queue_delay_us=60000000",
        "--max_queued_requests=" + std::to_string(kQueue),
        "--max_batch_tokens=" + std::to_string(kBatch)});
    ASSERT_TRUE(server_->WaitServing()) << server_->log();
    stub_ = v1::QuantizedInference::NewStub(
        grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
  }

  std::unique_ptr<Pending> Start(int64_t tokens, absl::Duration timeout = absl::Seconds(50)) {
    return std::make_unique<Pending>(*stub_, tokens, timeout);
  }

  // Whether the queue is empty: calls that fill every place and make a whole batch run at once only
  // then. While another call holds a place, one of them is refused.
  bool QueueIsEmpty() {
    Calls parts;
    for (int i = 0; i < kQueue; ++i) parts.push_back(Start(kBatch / kQueue));
    for (size_t ok = 0; ok < parts.size(); absl::SleepFor(absl::Milliseconds(1))) {
      ok = 0;
      for (const auto& part : parts) {
        if (!part->done()) continue;
        if (part->Code() != grpc::OK) return false;
        ++ok;
      }
    }
    return true;
  }

  // Queues calls of one token and nothing else: if there is one call more than fits, exactly one is
  // refused on an empty queue. Fewer than kQueue means that a place was lost.
  Calls FillQueue(absl::Duration timeout = absl::Seconds(50)) {
    for (const absl::Time until = absl::Now() + absl::Seconds(20); absl::Now() < until;) {
      if (!QueueIsEmpty()) continue;
      Calls calls;
      while (calls.size() <= kQueue) calls.push_back(Start(1, timeout));
      const auto is_done = [](const std::unique_ptr<Pending>& call) { return call->done(); };
      auto ended = calls.end();
      while (ended == calls.end()) {
        absl::SleepFor(absl::Milliseconds(1));
        ended = std::find_if(calls.begin(), calls.end(), is_done);
      }
      // Any other code is of a deadline that passed before all had arrived.
      if ((*ended)->Code() != grpc::RESOURCE_EXHAUSTED) continue;
      calls.erase(ended);
      return calls;
    }
    return {};
  }

  // A whole batch runs at once, as soon as the queue has room for it.
  void ExpectServes() {
    for (const absl::Time until = absl::Now() + absl::Seconds(20);;) {
      const auto call = Start(kBatch);
      if (call->Code() == grpc::RESOURCE_EXHAUSTED && absl::Now() < until) continue;
      EXPECT_EQ(call->Code(), grpc::OK);
      EXPECT_EQ(call->response().execution().batch_requests(), 1);
      return;
    }
  }

  TempFolder repository_;
  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<v1::QuantizedInference::Stub> stub_;
};

TEST_F(QueueTest, RefusesTheExcessAtOnceAndAnswersWhatItTook) {
  const Calls queued = FillQueue();
  ASSERT_EQ(queued.size(), kQueue);
  for (int i = 0; i < 20; ++i) {
    const absl::Time start = absl::Now();
    EXPECT_EQ(Start(1)->Code(), grpc::RESOURCE_EXHAUSTED);
    EXPECT_LT(absl::Now() - start, absl::Seconds(1));
  }
  EXPECT_TRUE(server_->NewClient()->IsServing("").value_or(false));
  server_->Signal(SIGTERM);
  for (const auto& call : queued) {
    EXPECT_EQ(call->Code(), grpc::OK);
    EXPECT_EQ(call->response().execution().batch_requests(), kQueue);
  }
  const ExitReport report = server_->Wait();
  EXPECT_EQ(report.code, 0) << report.log;
}

TEST_F(QueueTest, DeadlinesExpireInTheQueue) {
  for (int round = 0; round < 2; ++round) {
    const Calls queued = FillQueue(absl::Seconds(1));
    ASSERT_EQ(queued.size(), kQueue) << "round " << round;
    for (const auto& call : queued) EXPECT_EQ(call->Code(), grpc::DEADLINE_EXCEEDED);
  }
  ExpectServes();
  EXPECT_EQ(server_->Stop().code, 0);
}

TEST_F(QueueTest, CancelledCallsLeaveTheQueue) {
  for (int round = 0; round < 20; ++round) {
    const Calls queued = FillQueue();
    ASSERT_EQ(queued.size(), kQueue) << "round " << round;
    for (const auto& call : queued) call->Cancel();
    for (const auto& call : queued) EXPECT_EQ(call->Code(), grpc::CANCELLED);
  }
  ExpectServes();
  EXPECT_EQ(server_->Stop().code, 0);
}

TEST_F(QueueTest, KilledClientsLeaveTheQueue) {
  for (int i = 0; i <= kQueue; ++i) {
    const ExitReport report =
        RunProgram(BinaryPath("awqctl"),
                   {"--address", server_->address(), "matmul", "m", "layer", "--random", "1"},
                   absl::Milliseconds(800));
    EXPECT_FALSE(report.exited) << report.log;
  }
  EXPECT_EQ(FillQueue().size(), kQueue);
  ExpectServes();
  EXPECT_EQ(server_->Stop().code, 0);
}

}  // namespace
}  // namespace awqd
