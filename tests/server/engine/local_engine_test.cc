// LocalEngine on the CPU backend: merged and lone requests, both memory models, faults, warm-up,
// memory.
#include "server/engine/local_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <future>
#include <random>
#include <set>
#include <thread>

#include "kernels/base/half.h"
#include "kernels/base/mutex.h"
#include "kernels/kernels.h"
#include "tests/testing/wrapped_device.h"

namespace awqd {
namespace {

using ::awqd::testing::WrappedDevice;

constexpr int64_t kK = 64;
constexpr int64_t kN = 24;

CanonicalWeight RandomWeight() {
  std::mt19937 random(3);
  CanonicalWeight w;
  w.k = kK;
  w.n = kN;
  w.scheme.group_size = 32;
  w.codes.resize(w.k * w.row_bytes());
  for (uint8_t& byte : w.codes) byte = random();
  w.zeros.resize(w.groups() * kN);
  for (uint8_t& zero : w.zeros) zero = random() % 16;
  w.scales.resize(w.groups() * kN * 2);
  for (int64_t i = 0; i < w.groups() * kN; ++i) {
    const uint16_t scale = FloatToHalf(0.01f + 0.0001f * (random() % 100));
    std::memcpy(&w.scales[i * 2], &scale, 2);
  }
  for (int64_t i = 0; i < kN; ++i) w.bias.push_back(0.5f * i);
  return w;
}

// What x @ W + bias must be, in double, with the weights that Dequantize returns.
std::vector<double> Expected(const CanonicalWeight& w, const std::vector<float>& x,
                             const std::vector<float>& bias) {
  const int64_t tokens = x.size() / kK;
  std::vector<double> y(tokens * kN);
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t n = 0; n < kN; ++n) {
      double sum = bias[n];
      for (int64_t k = 0; k < kK; ++k) {
        const int64_t group = k / w.scheme.group_size;
        const float value = (w.Code(k, n) - w.Zero(group, n)) * w.Scale(group, n);
        sum += x[m * kK + k] * static_cast<double>(HalfToFloat(FloatToHalf(value)));
      }
      y[m * kN + n] = sum;
    }
  }
  return y;
}

struct Answer {
  absl::Status status;
  Payload bytes;
  ExecutionReport report;
};

class LocalEngineTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    auto cpu = OpenDevice("cpu", {.cpu_threads = 2});
    ASSERT_TRUE(cpu.ok()) << cpu.status();
    device_ = std::make_unique<WrappedDevice>(*std::move(cpu), GetParam());
    auto weight = PrepareWeight(canonical_, device_->inner());
    ASSERT_TRUE(weight.ok()) << weight.status();
    weight_ = *std::move(weight);
    placed_ = Whole(weight_);
  }

  void Start(EngineOptions options = {}) {
    auto engine = MakeLocalEngine(device_.get(), options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }

  std::vector<float> RandomRows(int64_t tokens) {
    std::normal_distribution<float> normal;
    std::vector<float> x(tokens * kK);
    for (float& value : x) value = normal(random_);
    return x;
  }

  MatmulWork Work(const std::vector<float>& x) {
    MatmulWork work;
    work.weight = placed_;
    work.x = *engine_->staging().Get(x.size() * 4);
    if (!x.empty()) std::memcpy(work.x.data(), x.data(), x.size() * 4);
    work.x_dtype = work.out_dtype = DType::kFp32;
    work.tokens = x.size() / kK;
    return work;
  }

  template <typename AnyWork>
  std::future<Answer> Submit(AnyWork work, const SubmitOptions& options = {}) {
    auto promise = std::make_shared<std::promise<Answer>>();
    auto submitted = engine_->Submit(
        std::move(work), options,
        [promise](const absl::Status& status, Payload bytes, const ExecutionReport& report) {
          promise->set_value({status, std::move(bytes), report});
        });
    if (!submitted.ok()) promise->set_value({submitted.status(), {}, {}});
    return promise->get_future();
  }

  void ExpectProduct(const Answer& answer, const std::vector<float>& x,
                     const std::vector<float>& bias) {
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    const std::vector<double> expected = Expected(canonical_, x, bias);
    ASSERT_EQ(answer.bytes.size(), static_cast<int64_t>(expected.size()) * 4);
    for (size_t i = 0; i < expected.size(); ++i) {
      float got;
      std::memcpy(&got, answer.bytes.data() + i * 4, 4);
      ASSERT_NEAR(got, expected[i], 1e-4 * (1 + std::abs(expected[i]))) << "element " << i;
    }
  }

  const CanonicalWeight canonical_ = RandomWeight();
  std::mt19937 random_{11};
  std::unique_ptr<WrappedDevice> device_;
  std::shared_ptr<const DeviceWeight> weight_;
  std::shared_ptr<const PlacedWeight> placed_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(LocalEngineTest, MultipliesAndReports) {
  Start();
  const std::vector<float> x = RandomRows(3);
  const Answer answer = Submit(Work(x)).get();
  ExpectProduct(answer, x, canonical_.bias);
  EXPECT_EQ(answer.report.batch_tokens, 3);
  EXPECT_EQ(answer.report.batch_requests, 1);
  EXPECT_EQ(answer.report.path, Path::kFused);
  EXPECT_EQ(answer.report.device, "cpu");
  EXPECT_NE(FindKernel(answer.report.kernel), nullptr) << answer.report.kernel;
}

// The host copies nothing of a lone request: kernels or the device's copies read it where it lies.
TEST_P(LocalEngineTest, ALoneRequestIsNotCopiedByTheHost) {
  Start();
  const std::vector<float> x = RandomRows(300);
  ExpectProduct(Submit(Work(x)).get(), x, canonical_.bias);
  EXPECT_EQ(engine_->staging().stats().copied_bytes, 0);
}

// Merged requests leave in one copy to the device per large one and one for a run of small ones,
// and come back in one copy, of which each answer is a slice.
TEST_P(LocalEngineTest, ABatchIsGatheredOnceAndFetchedOnce) {
  constexpr int64_t kLarge = 300;  // tokens; 75 KiB
  EngineOptions options;
  options.batching.max_queue_delay = absl::Minutes(1);  // the last one fills the batch
  options.batching.max_batch_tokens = 3 + kLarge + 2;
  Start(options);
  std::vector<std::vector<float>> rows;
  std::vector<std::future<Answer>> answers;
  for (int64_t tokens : {int64_t{1}, int64_t{2}, kLarge, int64_t{1}, int64_t{1}}) {
    rows.push_back(RandomRows(tokens));
    answers.push_back(Submit(Work(rows.back())));
  }
  std::vector<Answer> got;
  for (auto& answer : answers) got.push_back(answer.get());
  for (size_t i = 0; i < got.size(); ++i) ExpectProduct(got[i], rows[i], canonical_.bias);
  ASSERT_EQ(got[0].report.batch_requests, 5);
  for (size_t i = 1; i < got.size(); ++i) {
    EXPECT_EQ(got[i].bytes.data(), got[i - 1].bytes.data() + got[i - 1].bytes.size());
  }
  const int64_t copied = engine_->staging().stats().copied_bytes;
  if (GetParam()) {
    EXPECT_EQ(copied, (5 + kLarge) * kK * 4) << "one kernel reads one run of rows";
  } else {
    EXPECT_EQ(copied, 5 * kK * 4) << "the small ones only";
    EXPECT_EQ(device_->copies_to_device(), 3);
    EXPECT_EQ(device_->copies_to_host(), 1);
  }
}

TEST_P(LocalEngineTest, PayloadsAndResultsReuseTheirBuffers) {
  Start();
  const std::vector<float> x = RandomRows(100);
  ExpectProduct(Submit(Work(x)).get(), x, canonical_.bias);
  const int64_t misses = engine_->staging().stats().misses;
  for (int i = 0; i < 50; ++i) ExpectProduct(Submit(Work(x)).get(), x, canonical_.bias);
  EXPECT_EQ(engine_->staging().stats().misses, misses);
  EXPECT_EQ(engine_->staging().stats().lent_bytes, 0);
}

TEST_P(LocalEngineTest, AResultMayOutliveTheEngine) {
  Start();
  const std::vector<float> x = RandomRows(2);
  const Answer answer = Submit(Work(x)).get();
  engine_.reset();
  ExpectProduct(answer, x, canonical_.bias);
}

// On the CPU what its caller promises to run is run there, when it is short; a GPU's lanes need
// their own threads.
TEST_P(LocalEngineTest, ShortRequestsRunOnTheThreadThatCallsRunQueued) {
  Start();
  const auto run = [this](bool caller_runs) {
    std::promise<std::thread::id> ran;
    const auto submitted =
        engine_->Submit(Work(RandomRows(1)), {.caller_runs = caller_runs},
                        [&ran](const absl::Status& status, const Payload&, const ExecutionReport&) {
                          EXPECT_TRUE(status.ok()) << status;
                          ran.set_value(std::this_thread::get_id());
                        });
    EXPECT_TRUE(submitted.ok()) << submitted.status();
    if (caller_runs) {
      EXPECT_FALSE(engine_->RunQueued()) << "nothing is left";
    }
    return ran.get_future().get();
  };
  const auto caller = std::this_thread::get_id();
  EXPECT_NE(run(false), caller);
  // The worker that has just answered still holds its lane and looks at the queue once more; what
  // comes before it sleeps is its own.
  bool mine = false;
  for (int tries = GetParam() ? 1000 : 10; tries > 0 && !mine; --tries) {
    absl::SleepFor(absl::Milliseconds(1));
    mine = run(true) == caller;
  }
  EXPECT_EQ(mine, GetParam());
}

TEST_P(LocalEngineTest, LongRequestsAreAWorkersWhoeverBringsThem) {
  Start();
  constexpr int64_t kLong = (int64_t{1} << 25) / (kK * kN) + 1;
  const auto caller = std::this_thread::get_id();
  std::promise<std::thread::id> product, block;
  ASSERT_TRUE(engine_
                  ->Submit(Work(RandomRows(kLong)), {.caller_runs = true},
                           [&](const absl::Status&, const Payload&, const ExecutionReport&) {
                             product.set_value(std::this_thread::get_id());
                           })
                  .ok());
  EXPECT_NE(product.get_future().get(), caller) << "without RunQueued";
  DequantizeWork work;
  work.weight = placed_;
  work.rows = kK;
  work.cols = kN;
  ASSERT_TRUE(engine_
                  ->Submit(std::move(work), {.caller_runs = true},
                           [&](const absl::Status&, const Payload&, const ExecutionReport&) {
                             block.set_value(std::this_thread::get_id());
                           })
                  .ok());
  EXPECT_NE(block.get_future().get(), caller);
}

TEST_P(LocalEngineTest, NoTokensGiveNoBytes) {
  Start();
  const Answer answer = Submit(Work({})).get();
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_TRUE(answer.bytes.empty());
}

TEST_P(LocalEngineTest, ABiasOfTheRequestReplacesTheWeights) {
  Start();
  const std::vector<float> x = RandomRows(2);
  MatmulWork work = Work(x);
  work.bias.assign(kN, -3.0f);
  ExpectProduct(Submit(std::move(work)).get(), x, std::vector<float>(kN, -3.0f));
}

// Requests pile up behind a long one and leave together; each gets its own rows back.
TEST_P(LocalEngineTest, MergesWhatGathersAndSplitsTheResult) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Milliseconds(100);
  options.batching.max_batch_tokens = 1 + 2 + 3 + 4;
  Start(options);
  std::vector<std::vector<float>> rows;
  std::vector<std::future<Answer>> answers;
  for (int64_t tokens : {1, 2, 3, 4}) {
    rows.push_back(RandomRows(tokens));
    answers.push_back(Submit(Work(rows.back())));
  }
  for (size_t i = 0; i < answers.size(); ++i) {
    const Answer answer = answers[i].get();
    ExpectProduct(answer, rows[i], canonical_.bias);
    EXPECT_EQ(answer.report.batch_tokens, 10);
    EXPECT_EQ(answer.report.batch_requests, 4);
  }
}

TEST_P(LocalEngineTest, SeveralThreadsAnswerALargeBatch) {
  EngineOptions options;
  options.answer_threads = 1;
  options.batching.max_queue_delay = absl::Hours(1);  // until all 16 are there
  options.batching.max_batch_tokens = 16;
  Start(options);
  // Whoever answers first waits for the other thread.
  Mutex mu;
  CondVar met;
  std::set<std::thread::id> threads;
  std::vector<std::future<Answer>> answers;
  for (int i = 0; i < 16; ++i) {
    const std::vector<float> x = RandomRows(1);
    auto promise = std::make_shared<std::promise<Answer>>();
    answers.push_back(promise->get_future());
    const auto submitted = engine_->Submit(
        Work(x), {}, [&, promise](const absl::Status& status, Payload bytes, const auto& report) {
          {
            MutexLock lock(&mu);
            threads.insert(std::this_thread::get_id());
            met.NotifyAll();
            while (threads.size() < 2) met.Wait(&mu);
          }
          promise->set_value({status, std::move(bytes), report});
        });
    ASSERT_TRUE(submitted.ok()) << submitted.status();
  }
  for (std::future<Answer>& answer : answers) {
    const Answer got = answer.get();
    EXPECT_TRUE(got.status.ok()) << got.status;
    EXPECT_EQ(got.report.batch_requests, 16);
    EXPECT_EQ(got.bytes.size(), kN * 4);
  }
  EXPECT_EQ(threads.size(), 2u);
}

TEST_P(LocalEngineTest, TheThresholdLooksAtTheMergedCount) {
  EngineOptions options;
  options.token_threshold = 4;
  options.batching.max_queue_delay = absl::Milliseconds(100);
  options.batching.max_batch_tokens = 4;
  Start(options);
  const std::vector<float> x = RandomRows(2);
  auto first = Submit(Work(x));
  auto second = Submit(Work(x));
  const Answer a = first.get(), b = second.get();
  ExpectProduct(a, x, canonical_.bias);
  ExpectProduct(b, x, canonical_.bias);
  EXPECT_EQ(a.report.path, Path::kDequantize);
  EXPECT_EQ(b.report.path, Path::kDequantize);
}

TEST_P(LocalEngineTest, AnAutomaticThresholdIsMeasuredOnceForAShape) {
  EngineOptions options;
  options.token_threshold = ThresholdTable::kAuto;
  Start(options);
  EXPECT_EQ(engine_->TokenThreshold(*weight_), ThresholdTable::kDefault) << "not measured yet";
  ASSERT_TRUE(engine_->WarmUp(placed_).ok());
  const int64_t measured = engine_->TokenThreshold(*weight_);
  EXPECT_GE(measured, 32);
  const int64_t allocations = device_->allocations();
  ASSERT_TRUE(engine_->WarmUp(placed_).ok());
  EXPECT_EQ(engine_->TokenThreshold(*weight_), measured);
  EXPECT_EQ(device_->allocations(), allocations) << "measured again";
  const std::vector<float> x = RandomRows(40);
  ExpectProduct(Submit(Work(x)).get(), x, canonical_.bias);
}

TEST_P(LocalEngineTest, AnAskedForPathIsTaken) {
  Start();
  const std::vector<float> x = RandomRows(2);
  MatmulWork work = Work(x);
  work.path = Path::kDequantize;
  const Answer answer = Submit(std::move(work)).get();
  ExpectProduct(answer, x, canonical_.bias);
  EXPECT_EQ(answer.report.path, Path::kDequantize);
}

TEST_P(LocalEngineTest, ARequestLargerThanABatchIsSplit) {
  EngineOptions options;
  options.batching.max_batch_tokens = 4;
  Start(options);
  const std::vector<float> x = RandomRows(11);
  const Answer answer = Submit(Work(x)).get();
  ExpectProduct(answer, x, canonical_.bias);
  EXPECT_EQ(answer.report.batch_tokens, 11);
}

TEST_P(LocalEngineTest, NanInOneRequestLeavesItsBatchMatesAlone) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Milliseconds(100);
  options.batching.max_batch_tokens = 2;
  Start(options);
  const std::vector<float> good = RandomRows(1);
  std::vector<float> bad = RandomRows(1);
  bad[5] = std::nanf("");
  auto bad_answer = Submit(Work(bad));
  auto good_answer = Submit(Work(good));
  ExpectProduct(good_answer.get(), good, canonical_.bias);
  const Answer answer = bad_answer.get();
  float first;
  std::memcpy(&first, answer.bytes.data(), 4);
  EXPECT_TRUE(std::isnan(first));
}

TEST_P(LocalEngineTest, DequantizesABlock) {
  Start();
  DequantizeWork work;
  work.weight = placed_;
  work.out_dtype = DType::kFp16;
  work.row_begin = 30;
  work.rows = 5;
  work.col_begin = 3;
  work.cols = 7;
  const Answer answer = Submit(std::move(work)).get();
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  ASSERT_EQ(answer.bytes.size(), 5 * 7 * 2);
  for (int64_t i = 0; i < 35; ++i) {
    const int64_t row = 30 + i / 7, col = 3 + i % 7, group = row / 32;
    uint16_t got;
    std::memcpy(&got, answer.bytes.data() + i * 2, 2);
    const float value =
        (canonical_.Code(row, col) - canonical_.Zero(group, col)) * canonical_.Scale(group, col);
    EXPECT_EQ(got, FloatToHalf(value)) << row << ", " << col;
  }
  EXPECT_EQ(answer.report.batch_requests, 1);
}

TEST_P(LocalEngineTest, ABrokenDeviceIsRefusedAtTheDoor) {
  Start();
  device_->Break();
  EXPECT_EQ(Submit(Work(RandomRows(1))).get().status.code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(LocalEngineTest, AFaultFailsTheWholeBatchWithOneErrorId) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Milliseconds(200);
  options.batching.max_batch_tokens = 3;
  std::promise<absl::Status> fault;
  options.on_device_fault = [&](const absl::Status& status) { fault.set_value(status); };
  Start(options);
  auto first = Submit(Work(RandomRows(1)));
  auto second = Submit(Work(RandomRows(1)));
  device_->Break();  // both are queued and wait for company
  const Answer a = first.get(), b = second.get();
  EXPECT_EQ(a.status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(a.status.GetPayload(kErrorIdPayload).has_value());
  EXPECT_EQ(a.status, b.status) << "one fault, one error id";
  EXPECT_EQ(fault.get_future().get().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Submit(Work(RandomRows(1))).get().status.code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(LocalEngineTest, CancelledAndExpiredRequestsNeverRun) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Hours(1);
  Start(options);
  auto promise = std::make_shared<std::promise<absl::Status>>();
  auto handle = engine_->Submit(Work(RandomRows(1)), {},
                                [promise](const absl::Status& status, const Payload&,
                                          const ExecutionReport&) { promise->set_value(status); });
  ASSERT_TRUE(handle.ok());
  handle->Cancel();
  EXPECT_EQ(promise->get_future().get().code(), absl::StatusCode::kCancelled);
  handle->Cancel();  // harmless
  auto expired = Submit(Work(RandomRows(1)), {.deadline = absl::Now() + absl::Milliseconds(5)});
  EXPECT_EQ(expired.get().status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(engine_->queued_tasks(), 0);
}

TEST_P(LocalEngineTest, DrainAnswersWhatWasAcceptedAndRefusesTheRest) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Hours(1);
  Start(options);
  const std::vector<float> x = RandomRows(1);
  auto accepted = Submit(Work(x));
  engine_->Drain();
  ExpectProduct(accepted.get(), x, canonical_.bias);
  EXPECT_EQ(Submit(Work(x)).get().status.code(), absl::StatusCode::kUnavailable);
}

TEST_P(LocalEngineTest, AfterTheFirstRequestALaneAllocatesNothing) {
  EngineOptions options;
  options.lanes = 1;
  Start(options);
  const std::vector<float> x = RandomRows(8);
  ExpectProduct(Submit(Work(x)).get(), x, canonical_.bias);
  const int64_t before = device_->allocations();
  for (int i = 0; i < 20; ++i) ExpectProduct(Submit(Work(x)).get(), x, canonical_.bias);
  EXPECT_EQ(device_->allocations(), before);
}

TEST_P(LocalEngineTest, AtRestSomePinnedMemoryStays) {
  Start();
  {
    const Payload large = *engine_->staging().Get(int64_t{40} << 20);
    const Payload small = *engine_->staging().Get(4096);
  }
  engine_->FreeKeptMemory();
  // What a device reaches by itself is ordinary memory.
  EXPECT_EQ(engine_->staging().stats().kept_bytes, GetParam() ? 0 : 4096);
}

TEST_P(LocalEngineTest, GivesKeptMemoryBackAndGoesOn) {
  Start();
  const std::vector<float> x = RandomRows(2);
  MatmulWork work = Work(x);
  work.path = Path::kDequantize;  // the path with a workspace
  const int64_t lent = engine_->staging().stats().lent_bytes;
  Submit(work).wait();
  const int64_t in_use = device_->UsedBytes();
  // The worker that answered may hold its lane and the result for a moment longer. Of a device out
  // of the host's reach the workspace stays, and so do a few pinned buffers.
  const auto is_free = [&] {
    engine_->FreeKeptMemory();
    const StagingStats stats = engine_->staging().stats();
    return stats.lent_bytes == lent && (stats.kept_bytes == 0) == GetParam() &&
           (device_->UsedBytes() < in_use) == GetParam();
  };
  for (const absl::Time until = absl::Now() + absl::Seconds(20);
       !is_free() && absl::Now() < until;) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(is_free()) << "all but the request's own";
  ExpectProduct(Submit(work).get(), x, canonical_.bias);
}

TEST_P(LocalEngineTest, WarmUpRunsThePlanWithoutWaitingForCompany) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Hours(1);
  Start(options);
  EXPECT_TRUE(engine_->WarmUp(placed_).ok());
  device_->Break();
  EXPECT_EQ(engine_->WarmUp(placed_).code(), absl::StatusCode::kInternal);
}

TEST_P(LocalEngineTest, AfterWarmUpNoRequestAllocates) {
  EngineOptions options;
  options.batching.max_batch_tokens = 300;
  Start(options);
  ASSERT_TRUE(engine_->WarmUp(placed_).ok());
  MatmulWork work = Work(RandomRows(300));
  const int64_t before = device_->allocations();
  work.x = work.x.Slice(0, 300 * kK * 2);
  work.x_dtype = work.out_dtype = DType::kFp16;
  for (Path path : {Path::kFused, Path::kDequantize}) {
    work.path = path;
    ASSERT_TRUE(Submit(work).get().status.ok());
  }
  // With the device out of reach every buffer is one that warm-up sized; on the CPU it runs one
  // token only.
  if (!GetParam()) {
    EXPECT_EQ(device_->allocations(), before);
  }
}

TEST_P(LocalEngineTest, AHandleMayOutliveTheEngine) {
  Start();
  const std::vector<float> x = RandomRows(1);
  std::promise<void> done;
  auto handle = engine_->Submit(
      Work(x), {},
      [&](const absl::Status&, const Payload&, const ExecutionReport&) { done.set_value(); });
  ASSERT_TRUE(handle.ok());
  done.get_future().get();
  engine_.reset();
  handle->Cancel();
}

INSTANTIATE_TEST_SUITE_P(Memory, LocalEngineTest, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "shared" : "copied"; });

}  // namespace
}  // namespace awqd
