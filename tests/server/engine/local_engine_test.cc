// LocalEngine on the CPU backend: merged and lone requests, both memory models, faults, warm-up.
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <set>
#include <thread>

#include "kernels/base/mutex.h"
#include "kernels/exact.h"
#include "tests/server/engine/local_engine_on_cpu.h"
#include "tests/testing/find_kernel.h"

namespace awqd::engine {
namespace {

class LocalEngineTest : public LocalEngineOnCpu {};

TEST_P(LocalEngineTest, MultipliesAndReports) {
  Start();
  const std::vector<float> x = RandomRows(3);
  const Answer answer = Submit(Product(x)).get();
  ExpectProduct(answer, x, canonical_.bias);
  EXPECT_EQ(answer.report.batch_tokens, 3);
  EXPECT_EQ(answer.report.batch_requests, 1);
  EXPECT_EQ(answer.report.path, Path::kFused);
  EXPECT_EQ(answer.report.device, "cpu");
  EXPECT_NE(testing::FindKernel(answer.report.kernel), nullptr) << answer.report.kernel;
}

// The caller's thread runs a short request that the caller promised to run.
TEST_P(LocalEngineTest, ShortRequestsRunOnTheThreadThatCallsRunQueued) {
  Start();
  const auto run = [this](bool caller_runs) {
    std::promise<std::thread::id> ran;
    const auto submitted = engine_->Submit(
        std::make_unique<MatmulWork>(Product(RandomRows(1))), {.caller_runs = caller_runs},
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
  // The worker that has just answered still holds its lane and checks the queue once more, so it
  // takes requests that arrive before it sleeps.
  bool mine = false;
  for (int tries = 1000; tries > 0 && !mine; --tries) {
    absl::SleepFor(absl::Milliseconds(1));
    mine = run(true) == caller;
  }
  EXPECT_TRUE(mine);
}

TEST_P(LocalEngineTest, LongRequestsAreAWorkersWhoeverBringsThem) {
  Start();
  const auto caller = std::this_thread::get_id();
  std::promise<std::thread::id> product, block;
  if (GetParam()) {  // what is long for a GPU takes seconds here
    const int64_t kLong = (int64_t{1} << 25) / (kK * kN) + 1;
    ASSERT_TRUE(engine_
                    ->Submit(std::make_unique<MatmulWork>(Product(RandomRows(kLong))),
                             {.caller_runs = true},
                             [&](const absl::Status&, const Payload&, const ExecutionReport&) {
                               product.set_value(std::this_thread::get_id());
                             })
                    .ok());
    EXPECT_NE(product.get_future().get(), caller) << "without RunQueued";
  }
  DequantizeWork work;
  work.weight = placed_;
  work.rows = kK;
  work.cols = kN;
  ASSERT_TRUE(engine_
                  ->Submit(std::make_unique<DequantizeWork>(work), {.caller_runs = true},
                           [&](const absl::Status&, const Payload&, const ExecutionReport&) {
                             block.set_value(std::this_thread::get_id());
                           })
                  .ok());
  EXPECT_NE(block.get_future().get(), caller);
}

TEST_P(LocalEngineTest, NoTokensGiveNoBytes) {
  Start();
  const Answer answer = Submit(Product({})).get();
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_TRUE(answer.bytes.empty());
}

TEST_P(LocalEngineTest, ABiasOfTheRequestReplacesTheWeights) {
  Start();
  const std::vector<float> x = RandomRows(2);
  MatmulWork work = Product(x);
  work.bias.assign(kN, -3.0f);
  ExpectProduct(Submit(std::move(work)).get(), x, std::vector<float>(kN, -3.0f));
}

// Requests wait behind a long one and run together; each gets its own rows.
TEST_P(LocalEngineTest, MergesWhatGathersAndSplitsTheResult) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Milliseconds(100);
  options.batching.max_batch_tokens = 1 + 2 + 3 + 4;
  Start(options);
  std::vector<std::vector<float>> rows;
  std::vector<std::future<Answer>> answers;
  for (int64_t tokens : {1, 2, 3, 4}) {
    rows.push_back(RandomRows(tokens));
    answers.push_back(Submit(Product(rows.back())));
  }
  for (size_t i = 0; i < answers.size(); ++i) {
    const Answer answer = answers[i].get();
    ExpectProduct(answer, rows[i], canonical_.bias);
    EXPECT_EQ(answer.report.batch_tokens, 10);
    EXPECT_EQ(answer.report.batch_requests, 4);
  }
}

// Works of the same activation function run together, and apart from those of another.
TEST_P(LocalEngineTest, ActivationFunctionsAreAppliedAndKeptApart) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Milliseconds(100);
  options.batching.max_batch_tokens = 4;
  Start(options);
  const std::vector<float> x = RandomRows(2);
  const auto product = [&](ActivationFunction activation) {
    MatmulWork work = Product(x);
    work.activation = activation;
    return Submit(std::move(work));
  };
  std::vector<std::pair<ActivationFunction, std::future<Answer>>> answers;
  for (int i = 0; i < 2; ++i) {
    for (const auto activation : {ActivationFunction::kNone, ActivationFunction::kRelu,
                                  ActivationFunction::kSilu, ActivationFunction::kGelu}) {
      answers.emplace_back(activation, product(activation));
    }
  }
  const std::vector<double> sums = Expected(canonical_, x, canonical_.bias);
  for (auto& [activation, future] : answers) {
    const Answer answer = future.get();
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.report.batch_requests, 2);
    for (size_t i = 0; i < sums.size(); ++i) {
      const double sum = sums[i];
      const double expected = Apply(activation, sum);
      float got;
      std::memcpy(&got, answer.bytes.data() + i * 4, 4);
      ASSERT_NEAR(got, expected, 1e-4 * (1 + std::abs(sum))) << Name(activation) << " " << i;
    }
  }
}

// Every token of a batch has the scale of its own work.
TEST_P(LocalEngineTest, MergesQuantisedActivationsWithScalesOfTheirOwn) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Milliseconds(200);
  options.batching.max_batch_tokens = 6;
  Start(options);
  const auto work = [&](int64_t rows, std::vector<float> scales) {
    MatmulWork out = Product(RandomRows(rows));
    out.quantization = ActivationQuantization::kStatic;
    out.out_dtype = DType::kFp32;
    out.scales = std::move(scales);
    return out;
  };
  const MatmulWork works[] = {work(2, {0.5f}), work(1, {0.01f}), work(3, {1, 0.25f, 2})};
  std::vector<Payload> alone;
  for (const MatmulWork& one : works) {
    Answer answer = Submit(MatmulWork(one)).get();
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.report.kernel, "cpu/qmatmul_a8_scaled");
    alone.push_back(answer.bytes);
  }
  std::vector<std::future<Answer>> together;
  for (const MatmulWork& one : works) together.push_back(Submit(MatmulWork(one)));
  for (size_t i = 0; i < together.size(); ++i) {
    Answer answer = together[i].get();
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.report.batch_requests, 3);
    EXPECT_EQ(absl::string_view(answer.bytes.data(), answer.bytes.size()),
              absl::string_view(alone[i].data(), alone[i].size()));
  }
}

// The request has more rows than a batch has tokens: each step has its own scales.
TEST_P(LocalEngineTest, ScalesOfALargeRequestAreSplitWithIt) {
  EngineOptions options;
  options.batching.max_batch_tokens = 2;
  Start(options);
  MatmulWork work = Product(RandomRows(5));
  work.quantization = ActivationQuantization::kStatic;
  work.out_dtype = DType::kFp32;
  work.scales = {0.5f, 0.01f, 1, 0.25f, 2};
  const Answer all = Submit(MatmulWork(work)).get();
  ASSERT_TRUE(all.status.ok()) << all.status;
  for (int64_t row = 0; row < work.rows; ++row) {
    MatmulWork one = work;
    one.rows = 1;
    one.x = work.x.Slice(row * kK * 4, kK * 4);
    one.scales = {work.scales[row]};
    const Answer answer = Submit(std::move(one)).get();
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(absl::string_view(answer.bytes.data(), kN * 4),
              absl::string_view(all.bytes.data() + row * kN * 4, kN * 4));
  }
}

TEST_P(LocalEngineTest, SeveralThreadsAnswerALargeBatch) {
  EngineOptions options;
  options.answer_threads = 1;
  options.batching.max_queue_delay = absl::Hours(1);  // until all 16 have arrived
  options.batching.max_batch_tokens = 16;
  Start(options);
  // The first callback waits for the other thread.
  Mutex mu;
  CondVar met;
  std::set<std::thread::id> threads;
  std::vector<std::future<Answer>> answers;
  for (int i = 0; i < 16; ++i) {
    const std::vector<float> x = RandomRows(1);
    auto promise = std::make_shared<std::promise<Answer>>();
    answers.push_back(promise->get_future());
    const auto submitted = engine_->Submit(
        std::make_unique<MatmulWork>(Product(x)), {},
        [&, promise](const absl::Status& status, Payload bytes, const auto& report) {
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
  auto first = Submit(Product(x));
  auto second = Submit(Product(x));
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
  ExpectProduct(Submit(Product(x)).get(), x, canonical_.bias);
}

TEST_P(LocalEngineTest, AnAskedForPathIsTaken) {
  Start();
  const std::vector<float> x = RandomRows(2);
  MatmulWork work = Product(x);
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
  const Answer answer = Submit(Product(x)).get();
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
  auto bad_answer = Submit(Product(bad));
  auto good_answer = Submit(Product(good));
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

// Blocks of a transform that are decoded several at a time, and those so long that only some
// columns are.
TEST_P(LocalEngineTest, DequantizesATransformedBlock) {
  Start();
  for (const int64_t size : {8, 16384}) {
    HostWeight w;
    w.k = 2 * size;
    w.n = 75;
    w.scheme = Symmetric(8, 0);
    w.codes.resize(w.k * w.n);
    for (uint8_t& code : w.codes) code = random_();
    for (int64_t i = 0; i < w.n; ++i) w.scales.insert(w.scales.end(), {0x00, 0x2c});  // 1 / 16
    for (int64_t i = 0; i < w.k; ++i) w.factor.push_back(static_cast<float>(1 + i % 3));
    w.hadamard = {size, 1 / std::sqrt(static_cast<float>(size))};
    std::vector<float> whole(w.k * w.n);
    for (int64_t i = 0; i < w.k * w.n; ++i) whole[i] = WeightValue(w, i / w.n, i % w.n);
    for (int64_t k = 0; k < w.k; k += size) TransformBlock(w.hadamard, &whole[k * w.n], w.n);
    const auto prepared = PrepareWeight(w, device_->inner());
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    DequantizeWork work;
    work.weight = model::MakeWhole(*prepared);
    work.out_dtype = DType::kFp32;
    work.row_begin = size - 3;
    work.rows = 7;
    work.col_begin = 1;
    work.cols = 70;
    const Answer answer = Submit(work).get();
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    ASSERT_EQ(answer.bytes.size(), 7 * 70 * 4);
    for (int64_t i = 0; i < 7 * 70; ++i) {
      const int64_t row = work.row_begin + i / 70, col = 1 + i % 70;
      float got;
      std::memcpy(&got, answer.bytes.data() + i * 4, 4);
      EXPECT_EQ(got, whole[row * w.n + col] * w.factor[row]) << size << " " << row << " " << col;
    }
  }
}

TEST_P(LocalEngineTest, ABrokenDeviceIsRefusedAtTheDoor) {
  Start();
  device_->Break();
  EXPECT_EQ(Submit(Product(RandomRows(1))).get().status.code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_P(LocalEngineTest, AFaultFailsTheWholeBatchWithOneErrorId) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Milliseconds(200);
  options.batching.max_batch_tokens = 3;
  std::promise<absl::Status> fault;
  options.on_device_fault = [&](const absl::Status& status) { fault.set_value(status); };
  Start(options);
  auto first = Submit(Product(RandomRows(1)));
  auto second = Submit(Product(RandomRows(1)));
  device_->Break();  // both are queued and wait for more requests
  const Answer a = first.get(), b = second.get();
  EXPECT_EQ(a.status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(a.status.GetPayload(kErrorIdPayload).has_value());
  EXPECT_EQ(a.status, b.status) << "one fault, one error id";
  EXPECT_EQ(fault.get_future().get().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Submit(Product(RandomRows(1))).get().status.code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_P(LocalEngineTest, CancelledAndExpiredRequestsNeverRun) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Hours(1);
  Start(options);
  auto promise = std::make_shared<std::promise<absl::Status>>();
  auto handle = engine_->Submit(std::make_unique<MatmulWork>(Product(RandomRows(1))), {},
                                [promise](const absl::Status& status, const Payload&,
                                          const ExecutionReport&) { promise->set_value(status); });
  ASSERT_TRUE(handle.ok());
  handle->Cancel();
  EXPECT_EQ(promise->get_future().get().code(), absl::StatusCode::kCancelled);
  handle->Cancel();  // without effect
  auto expired = Submit(Product(RandomRows(1)), {.deadline = absl::Now() + absl::Milliseconds(5)});
  EXPECT_EQ(expired.get().status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(engine_->queued_tasks(), 0);
}

TEST_P(LocalEngineTest, DrainAnswersWhatWasAcceptedAndRefusesTheRest) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Hours(1);
  Start(options);
  const std::vector<float> x = RandomRows(1);
  auto accepted = Submit(Product(x));
  engine_->Drain();
  ExpectProduct(accepted.get(), x, canonical_.bias);
  EXPECT_EQ(Submit(Product(x)).get().status.code(), absl::StatusCode::kUnavailable);
}

TEST_P(LocalEngineTest, WarmUpRunsThePlanWithoutWaitingForCompany) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Hours(1);
  Start(options);
  EXPECT_TRUE(engine_->WarmUp(placed_).ok());
  device_->Break();
  EXPECT_EQ(engine_->WarmUp(placed_).code(), absl::StatusCode::kInternal);
}

INSTANTIATE_TEST_SUITE_P(Memory, LocalEngineTest, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "shared" : "copied"; });

}  // namespace
}  // namespace awqd::engine
