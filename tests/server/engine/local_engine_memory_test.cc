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
  constexpr int64_t kLarge = 300;  // tokens; 75 KiB
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
