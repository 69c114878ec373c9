// The memory of a LocalEngine: copies, reuse, allocations, release, and memory that outlives the
// engine.
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "tests/server/engine/local_engine_on_cpu.h"

namespace awqd::engine {
namespace {

class LocalEngineMemoryTest : public LocalEngineOnCpu {};

// The host does not copy a lone request: kernels or the device's copies read its payload in place.
TEST_P(LocalEngineMemoryTest, ALoneRequestIsNotCopiedByTheHost) {
  Start();
  const std::vector<float> x = RandomRows(300);
  ExpectProduct(Submit(Product(x)).get(), x, canonical_.bias);
  EXPECT_EQ(engine_->staging().stats().copied_bytes, 0);
}

// A batch needs one copy to the device for each large request and one for each run of small ones.
// Its result needs one copy, of which each answer is a slice.
TEST_P(LocalEngineMemoryTest, ABatchIsGatheredOnceAndFetchedOnce) {
  constexpr int64_t kLarge = 700;  // tokens; 175 KiB, and a result that is copied
  EngineOptions options;
  options.batching.max_queue_delay = absl::Minutes(1);  // the last one fills the batch
  options.batching.max_batch_tokens = 3 + kLarge + 2;
  Start(options);
  std::vector<std::vector<float>> rows;
  std::vector<std::future<Answer>> answers;
  for (int64_t tokens : {int64_t{1}, int64_t{2}, kLarge, int64_t{1}, int64_t{1}}) {
    rows.push_back(RandomRows(tokens));
    answers.push_back(Submit(Product(rows.back())));
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

// Kernels write a small result straight to staging memory; a large one is copied there.
TEST_P(LocalEngineMemoryTest, ALargeResultIsCopied) {
  Start();
  const std::vector<float> few = RandomRows(1), many = RandomRows((64 << 10) / (kN * 4) + 1);
  ExpectProduct(Submit(Product(few)).get(), few, canonical_.bias);
  EXPECT_EQ(device_->copies_to_host(), 0);
  ExpectProduct(Submit(Product(many)).get(), many, canonical_.bias);
  EXPECT_EQ(device_->copies_to_host(), GetParam() ? 0 : 1);
}

// Memory of a device that a caller shares, which the host sees here as well.
class LocalEngineDeviceMemoryTest : public LocalEngineMemoryTest {
 protected:
  // `bytes` from byte `offset` of a buffer on, with a guard on either side.
  Payload Shared(int64_t bytes, int64_t offset) {
    auto buffer =
        std::make_shared<Buffer>(*device_->Allocate(MemoryKind::kDevice, bytes + 2 * kGuard));
    char* const data = static_cast<char*>(buffer->data());
    std::memset(data, 0x5a, bytes + 2 * kGuard);
    return Payload(std::move(buffer), data + offset, bytes, device_.get());
  }
  MatmulWork SharedProduct(const std::vector<float>& x, int64_t offset) {
    MatmulWork work = Product(x);
    const Payload host = work.x;
    work.x = Shared(host.size(), offset);
    std::memcpy(work.x.data(), host.data(), host.size());
    work.output = Shared(work.result_bytes(), offset);
    return work;
  }
  static void ExpectUntouchedAround(const Payload& output) {
    for (int64_t i = 1; i <= 64; ++i) {
      ASSERT_EQ(output.data()[-i], 0x5a) << i << " before";
      ASSERT_EQ(output.data()[output.size() + i - 1], 0x5a) << i << " behind";
    }
  }
  static constexpr int64_t kGuard = 512;  // aligned as kernels want it
};

// Kernels read and write aligned memory in place; other memory is copied on the device.
TEST_P(LocalEngineDeviceMemoryTest, ALoneProductIsNotCopiedByWayOfTheHost) {
  Start();
  for (const int64_t offset : {kGuard, kGuard + 8}) {
    for (const int64_t tokens : {1, 900}) {
      const std::vector<float> x = RandomRows(tokens);
      MatmulWork work = SharedProduct(x, offset);
      const Payload output = work.output;
      const int64_t copies = device_->copies_of_pieces();
      const Answer answer = Submit(std::move(work)).get();
      ExpectProduct(answer, x, canonical_.bias);
      EXPECT_EQ(answer.bytes.data(), output.data());
      EXPECT_EQ(answer.bytes.device(), device_.get());
      ExpectUntouchedAround(output);
      EXPECT_EQ(device_->copies_of_pieces() - copies, offset == kGuard ? 0 : 2);
    }
  }
  EXPECT_EQ(device_->copies_to_device(), 0);
  EXPECT_EQ(device_->copies_to_host(), 0);
  EXPECT_EQ(engine_->staging().stats().copied_bytes, 0);
}

// Each caller of a batch has its rows where it wants them.
TEST_P(LocalEngineDeviceMemoryTest, ABatchTakesFromAndGivesToEachCallersMemory) {
  EngineOptions options;
  options.batching.max_queue_delay = absl::Minutes(1);  // the last one fills the batch
  options.batching.max_batch_tokens = 1 + 2 + 700 + 3 + 1;
  Start(options);
  std::vector<std::vector<float>> rows;
  std::vector<Payload> outputs;
  std::vector<std::future<Answer>> answers;
  for (const int64_t tokens : {1, 2, 700, 3, 1}) {
    rows.push_back(RandomRows(tokens));
    const bool shared = tokens != 2;
    MatmulWork work =
        shared ? SharedProduct(rows.back(), kGuard + tokens % 16) : Product(rows.back());
    outputs.push_back(work.output);
    answers.push_back(Submit(std::move(work)));
  }
  for (size_t i = 0; i < answers.size(); ++i) {
    const Answer answer = answers[i].get();
    ExpectProduct(answer, rows[i], canonical_.bias);
    EXPECT_EQ(answer.report.batch_requests, 5);
    EXPECT_EQ(answer.bytes.device(), outputs[i].device());
    if (outputs[i].device() != nullptr) {
      EXPECT_EQ(answer.bytes.data(), outputs[i].data());
      ExpectUntouchedAround(outputs[i]);
    }
  }
  EXPECT_EQ(engine_->staging().stats().copied_bytes, 2 * kK * 4) << "of the one in staging memory";
}

TEST_P(LocalEngineDeviceMemoryTest, AFailureGivesNothing) {
  Start();
  MatmulWork work = SharedProduct(RandomRows(2), kGuard);
  const Payload output = work.output;
  device_->Break();
  const Answer answer = Submit(std::move(work)).get();
  EXPECT_FALSE(answer.status.ok());
  EXPECT_EQ(answer.bytes.data(), nullptr);
  EXPECT_EQ(output.data()[0], 0x5a);
}

INSTANTIATE_TEST_SUITE_P(OfItsOwn, LocalEngineDeviceMemoryTest, ::testing::Values(false));

TEST_P(LocalEngineMemoryTest, PayloadsAndResultsReuseTheirBuffers) {
  Start();
  const std::vector<float> x = RandomRows(100);
  ExpectProduct(Submit(Product(x)).get(), x, canonical_.bias);
  const int64_t misses = engine_->staging().stats().misses;
  for (int i = 0; i < 50; ++i) ExpectProduct(Submit(Product(x)).get(), x, canonical_.bias);
  EXPECT_EQ(engine_->staging().stats().misses, misses);
  EXPECT_EQ(engine_->staging().stats().lent_bytes, 0);
}

TEST_P(LocalEngineMemoryTest, AResultMayOutliveTheEngine) {
  Start();
  const std::vector<float> x = RandomRows(2);
  const Answer answer = Submit(Product(x)).get();
  engine_.reset();
  ExpectProduct(answer, x, canonical_.bias);
}

TEST_P(LocalEngineMemoryTest, AfterTheFirstRequestALaneAllocatesNothing) {
  EngineOptions options;
  options.lanes = 1;
  Start(options);
  const std::vector<float> x = RandomRows(8);
  ExpectProduct(Submit(Product(x)).get(), x, canonical_.bias);
  const int64_t before = device_->allocations();
  for (int i = 0; i < 20; ++i) ExpectProduct(Submit(Product(x)).get(), x, canonical_.bias);
  EXPECT_EQ(device_->allocations(), before);
}

TEST_P(LocalEngineMemoryTest, AtRestSomePinnedMemoryStays) {
  Start();
  {
    const Payload large = *engine_->staging().Get(int64_t{40} << 20);
    const Payload small = *engine_->staging().Get(4096);
  }
  engine_->FreeKeptMemory();
  // Memory that the device can access itself is ordinary memory.
  EXPECT_EQ(engine_->staging().stats().kept_bytes, GetParam() ? 0 : 4096);
}

TEST_P(LocalEngineMemoryTest, GivesKeptMemoryBackAndGoesOn) {
  Start();
  const std::vector<float> x = RandomRows(2);
  MatmulWork work = Product(x);
  work.path = Path::kDequantize;  // the path with a workspace
  const int64_t lent = engine_->staging().stats().lent_bytes;
  Submit(work).wait();
  const int64_t in_use = device_->UsedBytes();
  // The worker that answered may hold its lane and the result for a moment longer. On a device
  // whose memory the host cannot access, the workspace and a few pinned buffers stay.
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

TEST_P(LocalEngineMemoryTest, AfterWarmUpNoRequestAllocates) {
  EngineOptions options;
  options.batching.max_batch_tokens = 300;
  Start(options);
  ASSERT_TRUE(engine_->WarmUp(placed_).ok());
  MatmulWork work = Product(RandomRows(300));
  const int64_t before = device_->allocations();
  work.x = work.x.Slice(0, 300 * kK * 2);
  work.x_dtype = work.out_dtype = DType::kFp16;
  for (Path path : {Path::kFused, Path::kDequantize}) {
    work.path = path;
    ASSERT_TRUE(Submit(work).get().status.ok());
  }
  // If the host cannot access the device's memory, warm-up has sized every buffer; on the CPU it
  // runs one token only.
  if (!GetParam()) {
    EXPECT_EQ(device_->allocations(), before);
  }
}

TEST_P(LocalEngineMemoryTest, AHandleMayOutliveTheEngine) {
  Start();
  const std::vector<float> x = RandomRows(1);
  std::promise<void> done;
  auto handle = engine_->Submit(
      std::make_unique<MatmulWork>(Product(x)), {},
      [&](const absl::Status&, const Payload&, const ExecutionReport&) { done.set_value(); });
  ASSERT_TRUE(handle.ok());
  done.get_future().get();
  engine_.reset();
  handle->Cancel();
}

INSTANTIATE_TEST_SUITE_P(Memory, LocalEngineMemoryTest, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "shared" : "copied"; });

}  // namespace
}  // namespace awqd::engine
