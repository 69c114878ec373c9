// Several CPU devices under load, cancellation, deadlines and faults, and objects that outlive
// them.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "server/engine/matmul_work.h"
#include "tests/server/engine/several_devices_fixture.h"
#include "tests/testing/random_weight.h"

namespace awqd::engine {
namespace {

using Answer = Machine::Answer;
using testing::RandomMatrix;
using testing::RandomWeight;

TEST_P(SeveralDevicesTest, KeptMemoryOfEveryDeviceGoesBack) {
  Machine machine(3, GetParam());
  for (size_t i = 0; i < 3; ++i) {
    machine.member(i).staging().Get(1000).value();
    EXPECT_GT(machine.member(i).staging().stats().kept_bytes, 0);
  }
  machine.engine().FreeKeptMemory();
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(machine.member(i).staging().stats().kept_bytes, 0) << i;
  }
}

TEST_P(SeveralDevicesTest, ABrokenDeviceFailsRequestsOnColumnsOnceEach) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Milliseconds(100);
  options.batching.max_batch_tokens = 2;
  Machine machine(3, GetParam(), options);
  const auto weight = machine.Place(RandomWeight({.k = 64, .n = 264}), true);
  const auto x = RandomMatrix(1, 64, DType::kFp16, 1);
  auto first = machine.Submit(machine.Product(weight, x, DType::kFp16));
  machine.member(1).wrapped().Break();
  machine.member(2).wrapped().Break();  // two faults are still one error for the request
  const Answer answer = first.get();
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kInternal) << answer.status;
  EXPECT_TRUE(answer.status.GetPayload(kErrorIdPayload).has_value());
  EXPECT_TRUE(answer.bytes.empty());
  EXPECT_EQ(machine.Run(machine.Product(weight, x, DType::kFp16)).status.code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(machine.engine().queued_tasks(), 0);
}

TEST_P(SeveralDevicesTest, ReplicasOutliveOneBrokenDevice) {
  Machine machine(2, GetParam());
  const auto weight = machine.Place(RandomWeight({.k = 64, .n = 64}), false);
  const auto x = RandomMatrix(1, 64, DType::kFp16, 1);
  machine.member(0).wrapped().Break();
  for (int i = 0; i < 6; ++i) {
    const Answer answer = machine.Run(machine.Product(weight, x, DType::kFp16));
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.report.device, "cpu:1");
  }
}

TEST_P(SeveralDevicesTest, AnswersMayOutliveTheEngine) {
  Payload kept;
  {
    Machine machine(2, GetParam());
    const auto weight = machine.Place(RandomWeight({.k = 64, .n = 64}), true);
    const auto x = RandomMatrix(3, 64, DType::kFp16, 1);
    std::promise<void> answered;
    const auto handle = machine.engine().Submit(
        std::make_unique<MatmulWork>(machine.Product(weight, x, DType::kFp16)), {},
        [&](const absl::Status& status, Payload bytes, const ExecutionReport&) {
          EXPECT_TRUE(status.ok()) << status;
          kept = std::move(bytes);
          answered.set_value();
        });
    ASSERT_TRUE(handle.ok());
    answered.get_future().get();
  }
  EXPECT_EQ(kept.size(), 3 * 64 * 2);
}

// Many threads at once, some cancelling, some with deadlines that pass: every request is answered
// exactly once, and successful answers are right.
TEST_P(SeveralDevicesTest, EveryRequestEndsOnceAndRightUnderLoad) {
  EngineOptions options;
  options.lanes = 2;
  options.batching.max_queued_tasks = 24;
  constexpr int kThreads = 4, kRequests = 150;
  std::atomic<int> accepted{0}, refused{0}, good{0}, ended{0}, wrong{0};
  {
    Machine machine(3, GetParam(), options);
    const HostWeight canonical = RandomWeight({.k = 64, .n = 200, .bias = true});
    const std::vector<std::shared_ptr<const model::PlacedWeight>> weights = {
        machine.Place(canonical, true), machine.Place(canonical, false)};
    const auto x = RandomMatrix(2, 64, DType::kFp32, 5);
    const std::string expected = machine.Run(machine.Product(weights[1], x, DType::kFp32)).bytes;
    const auto drive = [&](int seed) {
      std::mt19937 random(seed);
      for (int i = 0; i < kRequests; ++i) {
        SubmitOptions submit = {.priority = static_cast<int>(random() % 2)};
        if (random() % 4 == 0) submit.deadline = absl::Now() + absl::Microseconds(random() % 300);
        const auto handle = machine.engine().Submit(
            std::make_unique<MatmulWork>(machine.Product(weights[random() % 2], x, DType::kFp32)),
            submit, [&](const absl::Status& status, const Payload& bytes, const ExecutionReport&) {
              ++ended;
              if (status.ok() && bytes.view() == expected) {
                ++good;
              } else if (!absl::IsCancelled(status) && !absl::IsDeadlineExceeded(status)) {
                ++wrong;
              }
            });
        (handle.ok() ? accepted : refused) += 1;
        if (!handle.ok() && !absl::IsResourceExhausted(handle.status())) ++wrong;
        if (handle.ok() && random() % 5 == 0) handle->Cancel();
      }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) threads.emplace_back(drive, i);
    for (std::thread& thread : threads) thread.join();
    machine.engine().Drain();
  }
  EXPECT_EQ(accepted + refused, kThreads * kRequests);
  EXPECT_EQ(ended, accepted);
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(good, 0);
}

}  // namespace
}  // namespace awqd::engine
