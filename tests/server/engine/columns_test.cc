// Columns on several devices: the parts of each device, how answers are reassembled, and every
// order of their ends, with engines that the test controls.
#include <gtest/gtest.h>

#include "absl/strings/cord.h"
#include "tests/server/engine/puppets.h"

namespace awqd::engine {
namespace {

class ColumnsTest : public Puppets {
 protected:
  // Tokens are FP16, so a column is two bytes of the answer.
  static std::string Row(std::initializer_list<std::pair<char, int>> columns) {
    std::string out;
    for (const auto& [fill, count] : columns) out += std::string(2 * count, fill);
    return out;
  }
};

TEST_F(ColumnsTest, TheLastPartAnswersWithColumnsInOrder) {
  Start(3);
  ASSERT_TRUE(Submit(Product(Columns({8, 16, 24}), 2), {.priority = 3}).ok());
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_EQ(puppets_[i]->accepted(), 1u);
    EXPECT_EQ(puppets_[i]->held(0).matmul().part, i);
    EXPECT_EQ(puppets_[i]->held(0).options.priority, 3);
  }
  EXPECT_EQ(puppets_[0]->held(0).matmul().x.data(), puppets_[2]->held(0).matmul().x.data())
      << "the parts share one payload";
  puppets_[2]->Answer(0, absl::OkStatus(), 'c');
  puppets_[0]->Answer(0, absl::OkStatus(), 'a');
  EXPECT_EQ(answer(0).times, 0);
  puppets_[1]->Answer(0, absl::OkStatus(), 'b');
  EXPECT_EQ(answer(0).times, 1);
  EXPECT_TRUE(answer(0).status.ok());
  const std::string row = Row({{'a', 8}, {'b', 16}, {'c', 24}});
  EXPECT_EQ(answer(0).bytes, row + row);
}

TEST_F(ColumnsTest, TheReportTellsOfAllParts) {
  Start(2);
  ASSERT_TRUE(Submit(Product(Columns({8, 8}), 1)).ok());
  puppets_[1]->Answer(0, absl::OkStatus(), 'b',
                      {.path = Path::kDequantize,
                       .kernel = "two",
                       .device = "cpu:1",
                       .batch_tokens = 4,
                       .batch_requests = 3,
                       .queue_us = 5,
                       .compute_us = 90});
  puppets_[0]->Answer(0, absl::OkStatus(), 'a',
                      {.path = Path::kFused,
                       .kernel = "one",
                       .device = "cpu:0",
                       .batch_tokens = 9,
                       .batch_requests = 2,
                       .queue_us = 7,
                       .compute_us = 80});
  const ExecutionReport& report = answer(0).report;
  EXPECT_EQ(report.path, Path::kDequantize);
  EXPECT_EQ(report.kernel, "one,two");
  EXPECT_EQ(report.device, "cpu:0,cpu:1");
  EXPECT_EQ(report.batch_tokens, 9);
  EXPECT_EQ(report.batch_requests, 3);
  EXPECT_EQ(report.queue_us, 7);
  EXPECT_EQ(report.compute_us, 90);
  ASSERT_TRUE(Submit(Product(Columns({8, 8}), 1)).ok());
  for (PuppetEngine* puppet : puppets_) {
    puppet->Answer(1, absl::OkStatus(), 'a', {.kernel = "same", .device = "cpu:x"});
  }
  EXPECT_EQ(answer(1).report.kernel, "same");
  EXPECT_EQ(answer(1).report.path, Path::kFused);
}

TEST_F(ColumnsTest, NoTokensGiveNoBytes) {
  Start(2);
  ASSERT_TRUE(Submit(Product(Columns({8, 8}), 0)).ok());
  for (PuppetEngine* puppet : puppets_) puppet->Answer(0, absl::OkStatus());
  EXPECT_EQ(answer(0).times, 1);
  EXPECT_TRUE(answer(0).status.ok());
  EXPECT_TRUE(answer(0).bytes.empty());
}

TEST_F(ColumnsTest, ABiasOfTheRequestIsCut) {
  Start(2);
  MatmulWork work = Product(Columns({8, 16}), 1);
  for (int i = 0; i < 24; ++i) work.bias.push_back(static_cast<float>(i));
  const std::vector<float> bias = work.bias;
  ASSERT_TRUE(Submit(std::move(work)).ok());
  EXPECT_EQ(puppets_[0]->held(0).matmul().bias, std::vector<float>(bias.begin(), bias.begin() + 8));
  EXPECT_EQ(puppets_[1]->held(0).matmul().bias, std::vector<float>(bias.begin() + 8, bias.end()));
}

TEST_F(ColumnsTest, AFaultOnOneDeviceFailsTheRequestWithItsErrorId) {
  Start(3);
  ASSERT_TRUE(Submit(Product(Columns({8, 8, 8}), 1)).ok());
  puppets_[0]->Start(0);
  absl::Status fault = absl::InternalError("illegal address");
  fault.SetPayload(kErrorIdPayload, absl::Cord("id-1"));
  puppets_[1]->Answer(0, fault);
  EXPECT_EQ(puppets_[2]->waiting(), 0u) << "what had not started is withdrawn";
  EXPECT_EQ(answer(0).times, 0) << "a part is still running";
  absl::Status second = absl::InternalError("another");
  second.SetPayload(kErrorIdPayload, absl::Cord("id-2"));
  puppets_[0]->Answer(0, second);
  EXPECT_EQ(answer(0).times, 1);
  EXPECT_EQ(answer(0).status, fault) << "one error id, that of the first fault";
  EXPECT_TRUE(answer(0).bytes.empty());
}

TEST_F(ColumnsTest, AFaultInsideSubmitWithdrawsPartsThatAreAcceptedLater) {
  Start(2);
  puppets_[0]->AnswerAtOnce(absl::InternalError("fault"));
  ASSERT_TRUE(Submit(Product(Columns({8, 8}), 1)).ok());
  EXPECT_EQ(puppets_[1]->accepted(), 1u);
  EXPECT_EQ(puppets_[1]->waiting(), 0u);
  EXPECT_EQ(answer(0).times, 1);
  EXPECT_EQ(answer(0).status.code(), absl::StatusCode::kInternal);
}

TEST_F(ColumnsTest, ARefusedPartRefusesTheRequest) {
  Start(3);
  const auto weight = Columns({8, 8, 8});
  puppets_[2]->Refuse(absl::ResourceExhaustedError("queue full"));
  EXPECT_EQ(Submit(Product(weight, 1)).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(puppets_[0]->waiting() + puppets_[1]->waiting(), 0u);
  // A part that already runs ends without effect.
  puppets_[0]->AnswerAtOnce(absl::OkStatus());
  EXPECT_FALSE(Submit(Product(weight, 1)).ok());
  puppets_[0]->AnswerAtOnce(absl::InternalError("fault"));
  EXPECT_FALSE(Submit(Product(weight, 1)).ok());
  EXPECT_EQ(answer(0).times + answer(1).times + answer(2).times, 0);
  // The request no longer counts anywhere.
  puppets_[0]->AnswerAtOnce(std::nullopt);
  puppets_[2]->Refuse(absl::OkStatus());
  const auto replicas = Replicas(8);
  std::vector<size_t> before;
  for (PuppetEngine* puppet : puppets_) before.push_back(puppet->accepted());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Submit(Product(replicas, 1)).ok());
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(puppets_[i]->accepted(), before[i] + 1);
}

TEST_F(ColumnsTest, CancellingWithdrawsEveryPart) {
  Start(2);
  const auto handle = Submit(Product(Columns({8, 8}), 1));
  ASSERT_TRUE(handle.ok());
  handle->Cancel();
  EXPECT_EQ(answer(0).times, 1);
  EXPECT_EQ(answer(0).status.code(), absl::StatusCode::kCancelled);
  handle->Cancel();  // has no effect
  EXPECT_EQ(answer(0).times, 1);
}

TEST_F(ColumnsTest, CancellingWhileAPartRunsAnswersWhenItEnds) {
  Start(2);
  const auto handle = Submit(Product(Columns({8, 8}), 1));
  ASSERT_TRUE(handle.ok());
  puppets_[0]->Start(0);
  handle->Cancel();
  EXPECT_EQ(puppets_[1]->waiting(), 0u);
  EXPECT_EQ(answer(0).times, 0);
  puppets_[0]->Answer(0, absl::OkStatus(), 'a');
  EXPECT_EQ(answer(0).times, 1);
  EXPECT_EQ(answer(0).status.code(), absl::StatusCode::kCancelled);
}

TEST_F(ColumnsTest, CancellingAfterTheEndIsHarmless) {
  Start(2);
  const auto handle = Submit(Product(Columns({8, 8}), 1));
  ASSERT_TRUE(handle.ok());
  for (PuppetEngine* puppet : puppets_) puppet->Answer(0, absl::OkStatus());
  handle->Cancel();
  EXPECT_EQ(answer(0).times, 1);
  EXPECT_TRUE(answer(0).status.ok());
}

TEST_F(ColumnsTest, AnExpiredPartExpiresTheRequest) {
  Start(2);
  const absl::Time deadline = absl::UnixEpoch() + absl::Hours(1);
  ASSERT_TRUE(Submit(Product(Columns({8, 8}), 1), {.deadline = deadline}).ok());
  for (PuppetEngine* puppet : puppets_) EXPECT_EQ(puppet->held(0).options.deadline, deadline);
  puppets_[0]->Answer(0, absl::OkStatus(), 'a');
  puppets_[1]->Answer(0, absl::DeadlineExceededError("in the queue"));
  EXPECT_EQ(answer(0).times, 1);
  EXPECT_EQ(answer(0).status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ColumnsTest, ABlockGoesToTheDevicesThatHoldIt) {
  Start(3);
  const auto weight = Columns({8, 16, 24});
  const auto submit = [&](int64_t begin, int64_t cols) {
    DequantizeWork block;
    block.weight = weight;
    block.row_begin = 3;
    block.rows = 2;
    block.col_begin = begin;
    block.cols = cols;
    ASSERT_TRUE(Submit(block).ok());
  };
  const auto held = [&](size_t device, size_t index) {
    return puppets_[device]->held(index).dequantize();
  };
  submit(10, 5);  // within the second
  EXPECT_EQ(held(1, 0).col_begin, 2);
  EXPECT_EQ(held(1, 0).cols, 5);
  EXPECT_EQ(held(1, 0).row_begin, 3);
  puppets_[1]->Answer(0, absl::OkStatus(), 'b');
  EXPECT_EQ(answer(0).bytes, Row({{'b', 5}}) + Row({{'b', 5}}));
  EXPECT_EQ(puppets_[0]->accepted() + puppets_[2]->accepted(), 0u);
  submit(7, 18);  // the last of the first, all of the second, the first of the third
  EXPECT_EQ(held(0, 0).col_begin, 7);
  EXPECT_EQ(held(0, 0).cols, 1);
  EXPECT_EQ(held(1, 1).col_begin, 0);
  EXPECT_EQ(held(1, 1).cols, 16);
  EXPECT_EQ(held(2, 0).col_begin, 0);
  EXPECT_EQ(held(2, 0).cols, 1);
  puppets_[0]->Answer(0, absl::OkStatus(), 'a');
  puppets_[1]->Answer(1, absl::OkStatus(), 'b');
  puppets_[2]->Answer(0, absl::OkStatus(), 'c');
  const std::string row = Row({{'a', 1}, {'b', 16}, {'c', 1}});
  EXPECT_EQ(answer(1).bytes, row + row);
  submit(8, 16);  // exactly the second
  EXPECT_EQ(held(1, 2).col_begin, 0);
  EXPECT_EQ(held(1, 2).cols, 16);
  submit(20, 0);  // no columns, but still an answer
  puppets_[0]->Answer(1, absl::OkStatus());
  EXPECT_EQ(answer(3).times, 1);
  EXPECT_TRUE(answer(3).bytes.empty());
}

}  // namespace
}  // namespace awqd::engine
