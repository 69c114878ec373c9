// KV4's works have the bits of the kernels: on one device, on several, in steps, cancelled and
// expired.
#include "server/engine/kv4_work.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/kernels.h"
#include "server/engine/engine.h"
#include "tests/server/engine/puppets.h"
#include "tests/server/engine/several_devices_fixture.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::engine {
namespace {

using Answer = Machine::Answer;

constexpr Kv4Shape kShape = {11, 3, 33};

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

Payload Staged(Engine& engine, const std::string& bytes) {
  Payload out = *engine.staging().Get(static_cast<int64_t>(bytes.size()));
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

std::string Elements(const Kv4Shape& shape) {
  const std::vector<uint8_t> x =
      testing::RandomMatrix(shape.rows(), shape.head_dim, DType::kFp16, 5);
  return {x.begin(), x.end()};
}

Kv4StoreWork StoreOf(Engine& engine, const Kv4Shape& shape = kShape) {
  Kv4StoreWork work;
  work.shape = shape;
  work.x = Staged(engine, Elements(shape));
  return work;
}

struct Parts {
  std::string codes, scale, zero;
};

// The direct result of the kernels, without an engine.
Parts Expected(const Kv4Shape& shape) {
  const auto device = *OpenDevice("cpu", {.cpu_threads = 1});
  const std::string x = Elements(shape);
  Parts out = {std::string(shape.code_bytes(), '\0'), std::string(shape.rows() * 2, '\0'),
               std::string(shape.rows() * 2, '\0')};
  Kv4StoreArgs args = {.shape = shape, .x = x.data()};
  args.codes = reinterpret_cast<uint8_t*>(out.codes.data());
  args.scale = out.scale.data();
  args.zero = out.zero.data();
  EXPECT_TRUE(Kv4Store(args, *device, {}).ok());
  return out;
}

std::string Loaded(const Parts& parts, const Kv4Shape& shape, Kv4Form form) {
  const auto device = *OpenDevice("cpu", {.cpu_threads = 1});
  std::string out(shape.rows() * shape.head_dim * 2, '\0');
  Kv4LoadArgs args = {.shape = shape};
  args.codes = reinterpret_cast<const uint8_t*>(parts.codes.data());
  args.scale = parts.scale.data();
  args.zero = parts.zero.data();
  args.form = form;
  args.out = out.data();
  EXPECT_TRUE(Kv4Load(args, *device, {}).ok());
  return out;
}

Kv4LoadWork LoadOf(Engine& engine, const Parts& parts, Kv4Form form = Kv4Form::kExact) {
  Kv4LoadWork work;
  work.shape = kShape;
  work.codes = Staged(engine, parts.codes);
  work.scale = Staged(engine, parts.scale);
  work.zero = Staged(engine, parts.zero);
  work.form = form;
  return work;
}

void ExpectStored(const Answer& answer, const Kv4StoreWork& work) {
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  const Parts want = Expected(work.shape);
  ASSERT_EQ(answer.bytes.size(), static_cast<size_t>(work.result_bytes()));
  std::string all(work.result_bytes(), '\0');
  all.replace(0, want.codes.size(), want.codes);
  all.replace(work.scale_offset(), want.scale.size(), want.scale);
  all.replace(work.zero_offset(), want.zero.size(), want.zero);
  EXPECT_TRUE(answer.bytes == all);
}

// The parameter says whether the host can access the device's memory.
class Kv4WorkTest : public ::testing::TestWithParam<bool> {
 protected:
  void Start(const EngineOptions& options = {}) {
    device_ = std::make_unique<testing::WrappedDevice>(*OpenDevice("cpu", {.cpu_threads = 1}),
                                                       GetParam());
    engine_ = *MakeLocalEngine(device_.get(), options);
  }

  std::unique_ptr<testing::WrappedDevice> device_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(Kv4WorkTest, StoreAnswersCodesScalesAndZeros) {
  Start();
  const Kv4StoreWork work = StoreOf(*engine_);
  EXPECT_EQ(work.scale_offset() % 256, 0);
  EXPECT_EQ(work.zero_offset() % 256, 0);
  const Answer answer = SubmitTo(*engine_, work).get();
  ExpectStored(answer, work);
  EXPECT_EQ(answer.report.kernel, "cpu/kv4");
  EXPECT_EQ(answer.report.batch_tokens, kShape.tokens);
  EXPECT_EQ(device_->copies_to_device(), GetParam() ? 0 : 1);
  EXPECT_EQ(device_->copies_to_host(), 0) << "small results are written in place";
}

TEST_P(Kv4WorkTest, LoadAnswersElements) {
  Start();
  const Parts parts = Expected(kShape);
  for (Kv4Form form : {Kv4Form::kExact, Kv4Form::kFused}) {
    const Answer answer = SubmitTo(*engine_, LoadOf(*engine_, parts, form)).get();
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_TRUE(answer.bytes == Loaded(parts, kShape, form));
  }
}

TEST_P(Kv4WorkTest, MoreTokensThanALaneTakesRunInSteps) {
  EngineOptions options;
  options.batching.max_batch_tokens = 4;
  Start(options);
  const Kv4StoreWork work = StoreOf(*engine_);
  ExpectStored(SubmitTo(*engine_, work).get(), work);
  EXPECT_EQ(device_->copies_to_device(), GetParam() ? 0 : 3);
  if (!GetParam()) {
    EXPECT_GT(device_->copies_to_host(), 0) << "results that are not aligned";
  }
  const Parts parts = Expected(kShape);
  const Answer answer = SubmitTo(*engine_, LoadOf(*engine_, parts)).get();
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_TRUE(answer.bytes == Loaded(parts, kShape, Kv4Form::kExact));
}

TEST_P(Kv4WorkTest, GivenScalesAreNotAnswered) {
  EngineOptions options;
  options.batching.max_batch_tokens = 4;
  Start(options);
  Kv4StoreWork work = StoreOf(*engine_);
  work.per = Kv4Per::kHead;
  const std::string scale("\x00\x34\x00\x38\x00\x30", 6);  // 0.25, 0.5, 0.125
  const std::string zero("\x00\x47\x00\x48\x00\x40", 6);   // 7, 8, 2
  work.given_scale = Staged(*engine_, scale);
  work.given_zero = Staged(*engine_, zero);
  const std::string x = Elements(kShape);
  std::string want(kShape.code_bytes(), '\0');
  Kv4StoreArgs args = {.shape = kShape, .x = x.data(), .per = Kv4Per::kHead};
  args.codes = reinterpret_cast<uint8_t*>(want.data());
  args.given_scale = scale.data();
  args.given_zero = zero.data();
  ASSERT_TRUE(Kv4Store(args, device_->inner(), {}).ok());
  const Answer answer = SubmitTo(*engine_, work).get();
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_TRUE(answer.bytes == want);

  Kv4LoadWork load = LoadOf(*engine_, {want, scale, zero});
  load.per = Kv4Per::kHead;
  std::string elements(kShape.rows() * kShape.head_dim * 2, '\0');
  Kv4LoadArgs load_args = {.shape = kShape, .per = Kv4Per::kHead};
  load_args.codes = args.codes;
  load_args.scale = scale.data();
  load_args.zero = zero.data();
  load_args.out = elements.data();
  ASSERT_TRUE(Kv4Load(load_args, device_->inner(), {}).ok());
  EXPECT_TRUE(SubmitTo(*engine_, load).get().bytes == elements);
}

TEST_P(Kv4WorkTest, NoTokensHaveAnAnswer) {
  Start();
  const Answer stored = SubmitTo(*engine_, StoreOf(*engine_, {0, 3, 33})).get();
  EXPECT_TRUE(stored.status.ok()) << stored.status;
  EXPECT_EQ(stored.bytes, "");
  Kv4LoadWork load;
  load.shape = {0, 3, 33};
  EXPECT_TRUE(SubmitTo(*engine_, load).get().status.ok());
}

TEST_P(Kv4WorkTest, WhatTheKernelsRefuseIsTheAnswer) {
  Start();
  Kv4LoadWork work = LoadOf(*engine_, Expected(kShape), Kv4Form::kFused);
  work.out_dtype = DType::kFp32;
  const absl::Status status = SubmitTo(*engine_, work).get().status;
  engine_.reset();  // its threads hold the status too, and its counter is in a library that TSan
                    // cannot see
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("kv4 output dtype: got FP32"));
}

TEST_P(Kv4WorkTest, ShortOnesRunOnTheirCaller) {
  Start();
  const SubmitOptions caller = {.caller_runs = true};
  const Kv4StoreWork work = StoreOf(*engine_);
  auto answer = SubmitTo(*engine_, work, caller);
  while (engine_->RunQueued()) {
  }
  ExpectStored(answer.get(), work);
  Kv4StoreWork endless;
  endless.shape = {int64_t{1} << 40, 1 << 20, 64};
  EXPECT_EQ(endless.cost(), batching::Task::kUnknownCost);
}

TEST_P(Kv4WorkTest, ExpiredItNeverRuns) {
  Start();
  const SubmitOptions past = {.deadline = absl::Now() - absl::Seconds(1)};
  EXPECT_EQ(SubmitTo(*engine_, StoreOf(*engine_), past).get().status.code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(device_->copies_to_device(), 0);
  EXPECT_EQ(engine_->queued_tasks(), 0);
}

TEST_P(Kv4WorkTest, CancelledItNeverRuns) {
  Start();
  // The work waits in the queue for its caller, if callers run work.
  if (!engine_->callers_run()) GTEST_SKIP() << "it runs at once, on a worker";
  std::promise<Answer> answered;
  auto handle = engine_->Submit(
      std::make_unique<Kv4StoreWork>(StoreOf(*engine_)), {.caller_runs = true},
      [&](const absl::Status& status, const Payload& bytes, const ExecutionReport& report) {
        answered.set_value({status, std::string(bytes.view()), report});
      });
  ASSERT_TRUE(handle.ok()) << handle.status();
  handle->Cancel();
  while (engine_->RunQueued()) {
  }
  const Answer answer = answered.get_future().get();
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(answer.report.kernel, "");
  EXPECT_EQ(engine_->queued_tasks(), 0);
}

TEST_P(Kv4WorkTest, ABrokenDeviceTakesNone) {
  Start();
  auto work = StoreOf(*engine_);
  device_->Break();
  const absl::Status status = SubmitTo(*engine_, work).get().status;
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

INSTANTIATE_TEST_SUITE_P(Memory, Kv4WorkTest, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "shared" : "copied"; });

TEST(Kv4WorkOnThree, RunsOnAnyDevice) {
  Machine machine(3);
  std::set<std::string> devices;
  for (int i = 0; i < 3; ++i) {
    const Kv4StoreWork work = StoreOf(machine.engine());
    const Answer answer = machine.Run(work);
    ExpectStored(answer, work);
    devices.insert(answer.report.device);
  }
  EXPECT_THAT(devices, ::testing::ElementsAre("cpu:0", "cpu:1", "cpu:2"));
}

// Puppets: the test decides when a device answers.
class Kv4WorkRouting : public Puppets {
 protected:
  Kv4StoreWork Tokens(int64_t tokens) {
    Kv4StoreWork work;
    work.shape = {tokens, 1, 16};
    return work;
  }
};

TEST_F(Kv4WorkRouting, GoesToTheDeviceWithTheLeastLoad) {
  Start(3);
  const auto weight = Replicas(8);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(Submit(Product(weight, 100)).ok());
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(Submit(Tokens(10)).ok());
  std::multiset<size_t> accepted;
  for (const PuppetEngine* puppet : puppets_) accepted.insert(puppet->accepted());
  EXPECT_EQ(accepted, (std::multiset<size_t>{1, 1, 5}));
}

TEST_F(Kv4WorkRouting, CancelledItCountsNoLonger) {
  Start(2);
  const auto handle = Submit(Tokens(100));
  ASSERT_TRUE(handle.ok());
  const size_t first = puppets_[0]->accepted() == 1 ? 0 : 1;
  ASSERT_TRUE(Submit(Tokens(50)).ok());
  handle->Cancel();
  EXPECT_EQ(answer(0).status.code(), absl::StatusCode::kCancelled);
  ASSERT_TRUE(Submit(Tokens(10)).ok());
  EXPECT_EQ(puppets_[first]->accepted(), 2u);
}

}  // namespace
}  // namespace awqd::engine
