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
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

constexpr int kQueue = 2;
constexpr int kBatch = 8;

// One call in flight. Destroying it cancels it and waits for its end.
class Pending {
 public:
  Pending(v1::QuantizedInference::Stub& stub, int64_t tokens, absl::Duration timeout)
      : request_(ProductOfZeros(tokens, 256)) {
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

class QueueTest : public ServerTest {
 protected:
  void SetUp() override {
    SyntheticAwq::Random(256, 64, 64, 1).Write(repository_ / "m");
    Start({"--max_queue_delay_us=60000000", "--max_queued_requests=" + std::to_string(kQueue),
           "--max_batch_tokens=" + std::to_string(kBatch)});
  }

  std::unique_ptr<Pending> Call(int64_t tokens, absl::Duration timeout = absl::Seconds(50)) {
    return std::make_unique<Pending>(*stub_, tokens, timeout);
  }

  // Whether the queue is empty: calls that fill every place and make a whole batch run at once only
  // then. While another call holds a place, one of them is refused.
  bool QueueIsEmpty() {
    Calls parts;
    for (int i = 0; i < kQueue; ++i) parts.push_back(Call(kBatch / kQueue));
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
      while (calls.size() <= kQueue) calls.push_back(Call(1, timeout));
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
      const auto call = Call(kBatch);
      if (call->Code() == grpc::RESOURCE_EXHAUSTED && absl::Now() < until) continue;
      EXPECT_EQ(call->Code(), grpc::OK);
      EXPECT_EQ(call->response().execution().batch_requests(), 1);
      return;
    }
  }
};

TEST_F(QueueTest, RefusesTheExcessAtOnceAndAnswersWhatItTook) {
  const Calls queued = FillQueue();
  ASSERT_EQ(queued.size(), kQueue);
  for (int i = 0; i < 20; ++i) {
    const absl::Time start = absl::Now();
    EXPECT_EQ(Call(1)->Code(), grpc::RESOURCE_EXHAUSTED);
    EXPECT_LT(absl::Now() - start, absl::Seconds(1));
  }
  EXPECT_TRUE(client_->IsServing("").value_or(false));
  server_->Signal(SIGTERM);
  for (const auto& call : queued) {
    EXPECT_EQ(call->Code(), grpc::OK);
    EXPECT_EQ(call->response().execution().batch_requests(), kQueue);
  }
  ExpectGoodEnd();
}

TEST_F(QueueTest, DeadlinesExpireInTheQueue) {
  for (int round = 0; round < 2; ++round) {
    const Calls queued = FillQueue(absl::Seconds(1));
    ASSERT_EQ(queued.size(), kQueue) << "round " << round;
    for (const auto& call : queued) EXPECT_EQ(call->Code(), grpc::DEADLINE_EXCEEDED);
  }
  ExpectServes();
  Stop();
}

TEST_F(QueueTest, CancelledCallsLeaveTheQueue) {
  for (int round = 0; round < 20; ++round) {
    const Calls queued = FillQueue();
    ASSERT_EQ(queued.size(), kQueue) << "round " << round;
    for (const auto& call : queued) call->Cancel();
    for (const auto& call : queued) EXPECT_EQ(call->Code(), grpc::CANCELLED);
  }
  ExpectServes();
  Stop();
}

TEST_F(QueueTest, KilledClientsLeaveTheQueue) {
  for (int i = 0; i <= kQueue; ++i) {
    const ExitReport report =
        server_->Awqctl({"matmul", "m", "layer", "--random", "1"}, absl::Milliseconds(800));
    EXPECT_FALSE(report.exited) << report.log;
  }
  EXPECT_EQ(FillQueue().size(), kQueue);
  ExpectServes();
  Stop();
}

}  // namespace
}  // namespace awqd
