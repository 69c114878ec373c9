// Several CPU devices: replicas and columns give what one device gives, under load, cancellation,
// deadlines and faults.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/kernels.h"
#include "server/engine/dequantize_work.h"
#include "server/engine/local_engine.h"
#include "server/engine/matmul_work.h"
#include "server/engine/routing_engine.h"
#include "tests/testing/matchers.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::engine {
namespace {

using testing::RandomMatrix;
using testing::RandomWeight;
using testing::WeightSpec;
using testing::WrappedDevice;

struct Answer {
  absl::Status status;
  std::string bytes;
  ExecutionReport report;
};

// A LocalEngine over a device that can break. Weights live on what it wraps.
class BreakableEngine final : public Engine {
 public:
  BreakableEngine(int index, bool host_addressable, const EngineOptions& options)
      : device_(*OpenDevice(absl::StrCat("cpu:", index), {.cpu_threads = 1}), host_addressable),
        engine_(*MakeLocalEngine(&device_, options)) {}

  WrappedDevice& wrapped() { return device_; }

  using Engine::Submit;
  absl::StatusOr<TaskHandle> Submit(std::unique_ptr<Work>* work, const SubmitOptions& options,
                                    TaskDone done) override {
    return engine_->Submit(work, options, std::move(done));
  }
  absl::StatusOr<std::shared_ptr<const model::PlacedWeight>> Prepare(
      const CanonicalWeight& weight) override {
    Device* const devices[] = {&device_.inner()};
    return model::PlaceWeight(weight, devices, /*cut=*/false);
  }
  absl::Status WarmUp(const std::shared_ptr<const model::PlacedWeight>& weight) override {
    return engine_->WarmUp(weight);
  }
  StagingPool& staging() override { return engine_->staging(); }
  void Drain() override { engine_->Drain(); }
  const Device& device() const override { return inner_; }
  int64_t token_threshold() const override { return engine_->token_threshold(); }
  int64_t queued_tasks() const override { return engine_->queued_tasks(); }

 private:
  WrappedDevice device_;
  const Device& inner_ = device_.inner();
  std::unique_ptr<Engine> engine_;
};

// Some devices behind one engine.
class Machine {
 public:
  explicit Machine(int devices, bool host_addressable = true, const EngineOptions& options = {}) {
    std::vector<std::unique_ptr<Engine>> engines;
    for (int i = 0; i < devices; ++i) {
      auto member = std::make_unique<BreakableEngine>(i, host_addressable, options);
      members_.push_back(member.get());
      devices_.push_back(&member->wrapped().inner());
      engines.push_back(std::move(member));
    }
    engine_ = MakeRoutingEngine(std::move(engines));
  }

  std::shared_ptr<const model::PlacedWeight> Place(const CanonicalWeight& weight, bool cut) {
    auto placed = model::PlaceWeight(weight, devices_, cut);
    EXPECT_TRUE(placed.ok()) << placed.status();
    return *std::move(placed);
  }
  MatmulWork Product(std::shared_ptr<const model::PlacedWeight> weight,
                     const std::vector<uint8_t>& x, DType dtype) {
    MatmulWork work;
    work.rows = static_cast<int64_t>(x.size()) / SizeOf(dtype) / weight->shape.k;
    work.weight = std::move(weight);
    work.x_dtype = work.out_dtype = dtype;
    work.x = *engine_->staging().Get(static_cast<int64_t>(x.size()));
    if (!x.empty()) std::memcpy(work.x.data(), x.data(), x.size());
    return work;
  }
  template <typename AnyWork>
  std::future<Answer> Submit(AnyWork work, const SubmitOptions& options = {}) {
    auto promise = std::make_shared<std::promise<Answer>>();
    auto submitted = engine_->Submit(
        std::make_unique<AnyWork>(std::move(work)), options,
        [promise](const absl::Status& status, const Payload& bytes, const ExecutionReport& report) {
          promise->set_value({status, std::string(bytes.view()), report});
        });
    if (!submitted.ok()) promise->set_value({submitted.status(), "", {}});
    return promise->get_future();
  }
  template <typename AnyWork>
  Answer Run(AnyWork work) {
    return Submit(std::move(work)).get();
  }
  BreakableEngine& member(size_t index) { return *members_[index]; }
  Engine& engine() { return *engine_; }

 private:
  std::vector<BreakableEngine*> members_;
  std::vector<Device*> devices_;
  std::unique_ptr<Engine> engine_;
};

WeightSpec RandomSpec(std::mt19937& random) {
  WeightSpec spec;
  spec.k = 32 * (1 + random() % 6);
  spec.n = 8 * (1 + random() % 60);
  spec.scheme.group_size = random() % 3 == 0 ? spec.k : 32;
  spec.bias = random() % 2 == 0;
  spec.seed = random();
  return spec;
}

double Difference(const Answer& got, const Answer& want, DType dtype) {
  const std::vector<uint8_t> bytes(got.bytes.begin(), got.bytes.end());
  const std::vector<uint8_t> expected(want.bytes.begin(), want.bytes.end());
  if (bytes.size() != expected.size()) return HUGE_VAL;
  std::vector<double> values;
  for (size_t i = 0; i < expected.size() / SizeOf(dtype); ++i) {
    values.push_back(testing::GetElement(expected, dtype, static_cast<int64_t>(i)));
  }
  return testing::FrobeniusError(bytes, dtype, values);
}

// What the order of k sums in FP32 can do, and the rounding of the result after it.
double Reordering(int64_t k, DType dtype) {
  const double rounding = dtype == DType::kFp16 ? 0x1p-11 : dtype == DType::kBf16 ? 0x1p-8 : 0;
  return static_cast<double>(k) * 0x1p-24 + rounding;
}

class SeveralDevicesTest : public ::testing::TestWithParam<bool> {};

// Bit for bit: ragged N, every dtype, both paths, a bias of the weight's or of the request's, 2 to
// 5 devices.
TEST_P(SeveralDevicesTest, ProductsAreThoseOfOneDevice) {
  std::mt19937 random(7);
  Machine one(1, GetParam());
  std::vector<std::unique_ptr<Machine>> machines;
  for (int devices = 2; devices <= 5; ++devices) {
    machines.push_back(std::make_unique<Machine>(devices, GetParam()));
  }
  for (int round = 0; round < 60; ++round) {
    const WeightSpec spec = RandomSpec(random);
    const CanonicalWeight weight = RandomWeight(spec);
    const int64_t tokens = round % 5 == 0 ? 40 : 1 + random() % 7;
    const DType dtype = std::vector{DType::kFp16, DType::kBf16, DType::kFp32}[random() % 3];
    const std::vector<uint8_t> x = RandomMatrix(tokens, spec.k, dtype, random());
    std::vector<float> bias;
    for (int64_t i = 0; i < spec.n && round % 3 == 0; ++i) bias.push_back(0.25f * i);
    for (Path path : {Path::kFused, Path::kDequantize}) {
      const auto run = [&](Machine& machine, bool cut) {
        MatmulWork work = machine.Product(machine.Place(weight, cut), x, dtype);
        work.bias = bias;
        work.path = path;
        return machine.Run(std::move(work));
      };
      const Answer expected = run(one, false);
      ASSERT_TRUE(expected.status.ok()) << expected.status;
      for (const auto& machine : machines) {
        for (bool cut : {false, true}) {
          const Answer answer = run(*machine, cut);
          ASSERT_TRUE(answer.status.ok()) << answer.status;
          const bool same = answer.bytes == expected.bytes;
          // A dense product of fewer columns may be summed in another order.
          const bool near = cut && path == Path::kDequantize &&
                            Difference(answer, expected, dtype) <= Reordering(spec.k, dtype);
          ASSERT_TRUE(same || near)
              << "k " << spec.k << ", n " << spec.n << ", tokens " << tokens << ", "
              << machine->engine().devices().size() << " devices, cut " << cut << ", " << Name(path)
              << ": " << Difference(answer, expected, dtype);
          EXPECT_EQ(answer.report.path, path);
        }
      }
    }
  }
}

TEST_P(SeveralDevicesTest, BlocksAcrossBordersHaveTheBitsOfOneDevice) {
  std::mt19937 random(8);
  Machine one(1, GetParam()), three(3, GetParam());
  for (int round = 0; round < 40; ++round) {
    const WeightSpec spec = RandomSpec(random);
    const CanonicalWeight weight = RandomWeight(spec);
    DequantizeWork work;
    work.out_dtype = std::vector{DType::kFp16, DType::kBf16, DType::kFp32}[random() % 3];
    const auto expected_weight = one.Place(weight, false);
    for (bool cut : {false, true}) {
      const auto placed = three.Place(weight, cut);
      for (int block = 0; block < 10; ++block) {
        work.row_begin = random() % spec.k;
        work.rows = random() % (spec.k - work.row_begin + 1);
        work.col_begin = random() % spec.n;
        work.cols = random() % (spec.n - work.col_begin + 1);
        work.weight = expected_weight;
        const Answer expected = one.Run(work);
        ASSERT_TRUE(expected.status.ok()) << expected.status;
        work.weight = placed;
        const Answer answer = three.Run(work);
        ASSERT_TRUE(answer.status.ok()) << answer.status;
        ASSERT_TRUE(answer.bytes == expected.bytes)
            << "n " << spec.n << ", columns " << work.col_begin << " + " << work.cols;
      }
    }
  }
}

TEST_P(SeveralDevicesTest, ColumnsReportEveryDeviceAndWarmUp) {
  EngineOptions options;
  options.token_threshold = ThresholdTable::kAuto;
  Machine machine(2, GetParam(), options);
  const auto weight = machine.Place(RandomWeight({.k = 64, .n = 256}), true);
  ASSERT_TRUE(machine.engine().WarmUp(weight).ok());
  const auto x = RandomMatrix(2, 64, DType::kFp16, 1);
  const Answer answer = machine.Run(machine.Product(weight, x, DType::kFp16));
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.report.device, "cpu:0,cpu:1");
  EXPECT_NE(FindKernel(answer.report.kernel), nullptr) << answer.report.kernel;
}

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

TEST_P(SeveralDevicesTest, AnInlineWeightRunsOnOneOfThem) {
  Machine machine(3, GetParam());
  const CanonicalWeight weight = RandomWeight({.k = 64, .n = 72, .bias = true});
  const auto prepared = machine.engine().Prepare(weight);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  const auto x = RandomMatrix(2, 64, DType::kFp16, 1);
  const Answer expected =
      machine.Run(machine.Product(machine.Place(weight, true), x, DType::kFp16));
  const Answer answer = machine.Run(machine.Product(*prepared, x, DType::kFp16));
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.bytes, expected.bytes);
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
// exactly once, and what succeeds is right.
TEST_P(SeveralDevicesTest, EveryRequestEndsOnceAndRightUnderLoad) {
  EngineOptions options;
  options.lanes = 2;
  options.batching.max_queued_tasks = 24;
  constexpr int kThreads = 4, kRequests = 150;
  std::atomic<int> accepted{0}, refused{0}, good{0}, ended{0}, wrong{0};
  {
    Machine machine(3, GetParam(), options);
    const CanonicalWeight canonical = RandomWeight({.k = 64, .n = 200, .bias = true});
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

INSTANTIATE_TEST_SUITE_P(Memory, SeveralDevicesTest, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "shared" : "copied"; });

}  // namespace
}  // namespace awqd::engine
