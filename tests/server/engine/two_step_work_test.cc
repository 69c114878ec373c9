// A work of two steps that only this test knows: it merges, is partitioned, refused, cancelled and
// expires like any other, on engines that do not know it.
#include "tests/server/engine/two_step_work.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/half.h"
#include "server/engine/engine.h"
#include "tests/testing/find_kernel.h"
#include "tests/testing/matchers.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::engine {
namespace {

constexpr int64_t kK = 64, kMiddle = 96, kN = 40;

struct Answer {
  absl::Status status;
  std::string bytes;
  ExecutionReport report;
};

std::vector<float> Values(int64_t count, uint64_t seed) {
  const std::vector<uint8_t> bytes = testing::RandomMatrix(1, count, DType::kFp32, seed);
  std::vector<float> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(testing::GetElement(bytes, DType::kFp32, i));
  return out;
}

// x @ W + bias in double, with the weights that Dequantize returns.
std::vector<double> Product(const std::vector<double>& x, const HostWeight& w,
                            const std::vector<float>& bias) {
  const auto rows = static_cast<int64_t>(x.size()) / w.k;
  std::vector<double> y(rows * w.n);
  for (int64_t i = 0; i < rows * w.n; ++i) {
    const int64_t row = i / w.n, col = i % w.n;
    double sum = bias.empty() ? 0 : bias[col];
    for (int64_t k = 0; k < w.k; ++k) {
      const int64_t group = k / w.group_rows();
      const float value = (w.Code(k, col) - w.Zero(group, col)) * w.Scale(group, col);
      sum += x[row * w.k + k] * static_cast<double>(HalfToFloat(FloatToHalf(value)));
    }
    y[i] = sum;
  }
  return y;
}

template <typename AnyWork>
std::future<Answer> SubmitTo(Engine& engine, AnyWork work, const SubmitOptions& options = {}) {
  auto promise = std::make_shared<std::promise<Answer>>();
  auto submitted = engine.Submit(
      std::make_unique<AnyWork>(std::move(work)), options,
      [promise](const absl::Status& status, const Payload& bytes, const ExecutionReport& report) {
        promise->set_value({status, std::string(bytes.view()), report});
      });
  if (!submitted.ok()) promise->set_value({submitted.status(), "", {}});
  return promise->get_future();
}

Payload Staged(Engine& engine, const std::vector<float>& x) {
  Payload out = *engine.staging().Get(static_cast<int64_t>(x.size()) * 4);
  std::memcpy(out.data(), x.data(), x.size() * 4);
  return out;
}

class TwoStepWorkTest : public ::testing::TestWithParam<bool> {
 protected:
  // One device; the parameter says whether the host can access its memory.
  void StartOne(EngineOptions options = {}) {
    device_ = std::make_unique<testing::WrappedDevice>(*OpenDevice("cpu", {.cpu_threads = 1}),
                                                       GetParam());
    engine_ = *MakeLocalEngine(device_.get(), options);
    Device* const devices[] = {&device_->inner()};
    a_ = *model::PlaceWeight(canonical_a_, devices, model::Placing::kWhole);
    b_ = *model::PlaceWeight(canonical_b_, devices, model::Placing::kWhole);
  }
  // Three devices that hold A and B whole, or columns of them.
  void StartThree(bool cut_a, bool cut_b) {
    std::vector<std::unique_ptr<Engine>> engines;
    for (int i = 0; i < 3; ++i) {
      devices_.push_back(*OpenDevice(absl::StrCat("cpu:", i), {.cpu_threads = 1}));
      engines.push_back(*MakeLocalEngine(devices_.back().get(), {}));
    }
    engine_ = MakeRoutingEngine(std::move(engines));
    const std::vector<Device*> all = Devices();
    a_ = *model::PlaceWeight(canonical_a_, all,
                             cut_a ? model::Placing::kColumns : model::Placing::kWhole);
    b_ = *model::PlaceWeight(canonical_b_, all,
                             cut_b ? model::Placing::kColumns : model::Placing::kWhole);
  }
  std::vector<Device*> Devices() const {
    std::vector<Device*> out;
    for (const auto& device : devices_) out.push_back(device.get());
    return out;
  }

  TwoStepWork Work(const std::vector<float>& x) {
    TwoStepWork work;
    work.both = {a_, b_};
    work.x = Staged(*engine_, x);
    work.rows = static_cast<int64_t>(x.size()) / kK;
    work.runs = &runs_;
    return work;
  }

  void ExpectRight(const Answer& answer, const std::vector<float>& x,
                   const std::vector<float>& a = {}, const std::vector<float>& b = {}) {
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    const std::vector<double> middle =
        Product(std::vector<double>(x.begin(), x.end()), canonical_a_, a);
    const std::vector<double> expected = Product(middle, canonical_b_, b);
    const std::vector<uint8_t> got(answer.bytes.begin(), answer.bytes.end());
    ASSERT_EQ(got.size(), expected.size() * 4);
    // The tolerance of this many sums in FP32.
    EXPECT_LE(testing::FrobeniusError(got, DType::kFp32, expected), (kK + kMiddle) * 0x1p-24);
  }

  const HostWeight canonical_a_ = testing::RandomWeight({.k = kK, .n = kMiddle, .seed = 1});
  const HostWeight canonical_b_ = testing::RandomWeight({.k = kMiddle, .n = kN, .seed = 2});
  std::atomic<int> runs_{0};
  std::unique_ptr<testing::WrappedDevice> device_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::shared_ptr<const model::PlacedWeight> a_, b_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(TwoStepWorkTest, WhatLiesBetweenTheStepsStaysOnTheDevice) {
  StartOne();
  const std::vector<float> x = Values(3 * kK, 5);
  const Answer answer = SubmitTo(*engine_, Work(x)).get();
  ExpectRight(answer, x);
  EXPECT_EQ(answer.report.batch_tokens, 3);
  EXPECT_NE(testing::FindKernel(answer.report.kernel), nullptr) << answer.report.kernel;
  EXPECT_EQ(device_->copies_to_device(), GetParam() ? 0 : 1);
  EXPECT_EQ(device_->copies_to_host(), 0) << "a small result is written in place";
}

TEST_P(TwoStepWorkTest, WhatGathersRunsOnceForAll) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Minutes(1);  // the last one fills the batch
  options.batching.max_batch_tokens = 6;
  StartOne(options);
  std::vector<std::vector<float>> rows;
  std::vector<std::future<Answer>> answers;
  for (int64_t tokens : {1, 2, 3}) {
    rows.push_back(Values(tokens * kK, tokens));
    answers.push_back(SubmitTo(*engine_, Work(rows.back())));
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    const Answer answer = answers[i].get();
    ExpectRight(answer, rows[i]);
    EXPECT_EQ(answer.report.batch_requests, 3);
  }
  EXPECT_EQ(runs_, 1);
  EXPECT_EQ(device_->copies_to_host(), 0) << "a small result is written in place";
}

// Both name the same weight and element types, but have different operations.
TEST_P(TwoStepWorkTest, NeverMergesWithAnotherOperation) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Hours(1);
  StartOne(options);
  const std::vector<float> x = Values(kK, 7);
  MatmulWork product;
  product.weight = a_;
  product.x = Staged(*engine_, x);
  product.x_dtype = product.out_dtype = DType::kFp32;
  product.rows = 1;
  ASSERT_EQ(product.merge_key(), Work(x).merge_key());
  auto one = SubmitTo(*engine_, std::move(product));
  auto two = SubmitTo(*engine_, Work(x));
  engine_->Hurry();
  const Answer answer = one.get();
  EXPECT_EQ(answer.report.batch_requests, 1);
  EXPECT_EQ(answer.bytes.size(), kMiddle * 4);
  ExpectRight(two.get(), x);
}

TEST_P(TwoStepWorkTest, EveryStepHasItsOwnUpload) {
  EngineOptions options;
  options.lanes = 1;  // each lane has buffers of its own, and any of several may run a request
  StartOne(options);
  for (int64_t tokens : {1, 40, 2}) {  // the lane's buffers grow between them
    const std::vector<float> x = Values(tokens * kK, 9);
    TwoStepWork work = Work(x);
    work.a = Values(kMiddle, 10);
    work.b = Values(kN, 11);
    const std::vector<float> a = work.a, b = work.b;
    ExpectRight(SubmitTo(*engine_, std::move(work)).get(), x, a, b);
  }
  const int64_t before = device_->allocations();
  const std::vector<float> x = Values(8 * kK, 12);
  TwoStepWork work = Work(x);
  work.a = Values(kMiddle, 10);
  ExpectRight(SubmitTo(*engine_, work).get(), x, work.a);
  // Host memory for the payload and the result may come from larger or smaller size classes.
  EXPECT_LE(device_->allocations() - before, 2) << "a lane's buffers are there already";
}

TEST_P(TwoStepWorkTest, CancelledAndExpiredItNeverRuns) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Hours(1);
  StartOne(options);
  std::promise<absl::Status> cancelled;
  auto handle = engine_->Submit(std::make_unique<TwoStepWork>(Work(Values(kK, 1))), {},
                                [&](const absl::Status& status, const Payload&,
                                    const ExecutionReport&) { cancelled.set_value(status); });
  ASSERT_TRUE(handle.ok()) << handle.status();
  handle->Cancel();
  EXPECT_EQ(cancelled.get_future().get().code(), absl::StatusCode::kCancelled);
  const SubmitOptions soon = {.deadline = absl::Now() + absl::Milliseconds(5)};
  EXPECT_EQ(SubmitTo(*engine_, Work(Values(kK, 1)), soon).get().status.code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(runs_, 0);
  EXPECT_EQ(engine_->queued_tasks(), 0);
}

TEST_P(TwoStepWorkTest, AFaultHasAnErrorId) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Hours(1);
  StartOne(options);
  auto answer = SubmitTo(*engine_, Work(Values(kK, 1)));
  device_->Break();
  engine_->Hurry();
  const absl::Status status = answer.get().status;
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_TRUE(status.GetPayload(kErrorIdPayload).has_value());
}

INSTANTIATE_TEST_SUITE_P(Memory, TwoStepWorkTest, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "shared" : "copied"; });

class TwoStepWorkOnThree : public TwoStepWorkTest {};

TEST_P(TwoStepWorkOnThree, RunsOnAnyReplica) {
  StartThree(/*cut_a=*/false, /*cut_b=*/false);
  const std::vector<float> x = Values(2 * kK, 3);
  std::set<std::string> devices;
  for (int i = 0; i < 3; ++i) {
    const Answer answer = SubmitTo(*engine_, Work(x)).get();
    ExpectRight(answer, x);
    devices.insert(answer.report.device);
  }
  EXPECT_THAT(devices, ::testing::ElementsAre("cpu:0", "cpu:1", "cpu:2"));
}

TEST_P(TwoStepWorkOnThree, CutsItselfAtTheColumnsOfItsLastWeight) {
  StartThree(/*cut_a=*/false, /*cut_b=*/true);
  const std::vector<float> x = Values(2 * kK, 3);
  TwoStepWork work = Work(x);
  work.a = Values(kMiddle, 10);
  work.b = Values(kN, 11);
  const Answer answer = SubmitTo(*engine_, work).get();
  ExpectRight(answer, x, work.a, work.b);
  EXPECT_EQ(answer.report.device, "cpu:0,cpu:1,cpu:2");
  EXPECT_EQ(runs_, 3);
}

TEST_P(TwoStepWorkOnThree, RefusesAWeightThatItNeedsWhole) {
  StartThree(/*cut_a=*/true, /*cut_b=*/true);
  const absl::Status status = SubmitTo(*engine_, Work(Values(kK, 3))).get().status;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("TwoStep: got a weight whose columns are cut "
                                                     "among cpu:0,cpu:1,cpu:2, expected whole"));
}

TEST_P(TwoStepWorkOnThree, RefusesWeightsThatLieApart) {
  StartThree(/*cut_a=*/false, /*cut_b=*/false);
  Device* const last[] = {Devices()[2]};
  b_ = *model::PlaceWeight(canonical_b_, last, model::Placing::kWhole);
  const absl::Status status = SubmitTo(*engine_, Work(Values(kK, 3))).get().status;
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(),
              ::testing::HasSubstr("got weights on cpu:0,cpu:1,cpu:2 and on cpu:2"));
}

INSTANTIATE_TEST_SUITE_P(Memory, TwoStepWorkOnThree, ::testing::Values(true),
                         [](const auto&) { return "shared"; });

}  // namespace
}  // namespace awqd::engine
