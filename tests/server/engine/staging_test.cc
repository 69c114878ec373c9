// StagingPool: reuse, size classes, the limit on kept memory, payloads that outlive their pool.
#include "server/engine/staging.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::engine {
namespace {

using ::awqd::testing::WrappedDevice;

constexpr int64_t kMiB = int64_t{1} << 20;

class StagingTest : public ::testing::Test {
 protected:
  StagingTest()
      : device_(*OpenDevice("cpu", {.cpu_threads = 1}), true),
        pool_(std::make_unique<StagingPool>(&device_, 8 * kMiB)) {}

  Payload Get(int64_t bytes) {
    absl::StatusOr<Payload> payload = pool_->Get(bytes);
    EXPECT_TRUE(payload.ok()) << payload.status();
    return payload.ok() ? *std::move(payload) : Payload();
  }

  WrappedDevice device_;
  std::unique_ptr<StagingPool> pool_;
};

TEST_F(StagingTest, GivesWhatWasAskedForAligned) {
  for (int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{4096}, int64_t{4097}, 3 * kMiB + 5}) {
    const Payload payload = Get(bytes);
    ASSERT_NE(payload.data(), nullptr);
    EXPECT_EQ(payload.size(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(payload.data()) % 256, 0u);
    if (bytes > 0) std::memset(payload.data(), 1, bytes);
    EXPECT_LE(pool_->stats().lent_bytes, std::max<int64_t>(4096, bytes * 5 / 4));
  }
}

TEST_F(StagingTest, ReusesWhatWasReturned) {
  const char* first = Get(kMiB).data();
  EXPECT_EQ(Get(kMiB - 100).data(), first);
  EXPECT_EQ(Get(kMiB / 2 + 1).data(), first) << "up to twice as large will do";
  EXPECT_EQ(pool_->stats().misses, 1);
  EXPECT_NE(Get(kMiB / 4).data(), first) << "more than twice is a waste";
  EXPECT_EQ(pool_->stats().misses, 2);
  EXPECT_EQ(device_.allocations(), 2);
}

TEST_F(StagingTest, TheLastSliceReturnsTheBuffer) {
  Payload whole = Get(kMiB);
  std::memset(whole.data(), 7, whole.size());
  Payload slice = whole.Slice(kMiB - 3, 3);
  whole = Payload();
  EXPECT_EQ(slice.view(), "\7\7\7");
  EXPECT_GE(pool_->stats().lent_bytes, kMiB);
  EXPECT_EQ(pool_->stats().kept_bytes, 0);
  slice = Payload();
  EXPECT_EQ(pool_->stats().lent_bytes, 0);
  EXPECT_GE(pool_->stats().kept_bytes, kMiB);
}

TEST_F(StagingTest, KeepsNoMoreThanItsBoundAndTheMostRecentlyUsed) {
  std::vector<Payload> out;
  for (int i = 0; i < 6; ++i) out.push_back(Get(2 * kMiB));
  const char* last = out.back().data();
  for (Payload& payload : out) payload = Payload();
  EXPECT_EQ(pool_->stats().kept_bytes, 8 * kMiB);
  EXPECT_EQ(Get(2 * kMiB).data(), last);
  Get(4 * kMiB);  // its return evicts two of the old ones
  EXPECT_EQ(pool_->stats().kept_bytes, 8 * kMiB);
  Get(16 * kMiB);  // too large to be kept, evicts nothing
  EXPECT_EQ(pool_->stats().kept_bytes, 8 * kMiB);
  EXPECT_EQ(pool_->stats().lent_bytes, 0);
}

TEST_F(StagingTest, FreesWhatIsKeptAndNothingInUse) {
  const Payload in_use = Get(kMiB);
  std::memset(in_use.data(), 7, kMiB);
  Get(2 * kMiB);
  Get(100);
  EXPECT_GT(pool_->stats().kept_bytes, 2 * kMiB);
  pool_->FreeKept();
  EXPECT_EQ(pool_->stats().kept_bytes, 0);
  EXPECT_EQ(pool_->stats().lent_bytes, kMiB);
  EXPECT_EQ(in_use.view(), std::string(kMiB, '\7'));
  const int64_t misses = pool_->stats().misses;
  Get(100);
  Get(100);
  EXPECT_EQ(pool_->stats().misses, misses + 1) << "it keeps again";
}

TEST_F(StagingTest, AtRestItKeepsTheSmallest) {
  { const Payload large = Get(2 * kMiB), middle = Get(kMiB), small = Get(4096), other = Get(100); }
  pool_->FreeKept(kMiB + 8192);
  EXPECT_EQ(pool_->stats().kept_bytes, kMiB + 8192);
  pool_->FreeKept(kMiB);
  EXPECT_EQ(pool_->stats().kept_bytes, 8192);
  const int64_t misses = pool_->stats().misses;
  const Payload small = Get(4096), other = Get(4096);
  EXPECT_EQ(pool_->stats().misses, misses);
  pool_->FreeKept(kMiB);
  EXPECT_EQ(pool_->stats().lent_bytes, 8192) << "what is lent is not touched";
}

TEST_F(StagingTest, RefusesWhatCannotBe) {
  EXPECT_EQ(pool_->Get(int64_t{1} << 50).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool_->Get(INT64_MAX).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool_->stats().lent_bytes, 0);
}

TEST_F(StagingTest, APayloadOutlivesThePool) {
  const Payload payload = Get(100);
  pool_.reset();
  std::memset(payload.data(), 1, 100);
  EXPECT_EQ(payload.view(), std::string(100, '\1'));
}

TEST_F(StagingTest, AnyThreadMayTakeAndReturn) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 500; ++i) {
        if (i % 100 == t) pool_->FreeKept();
        const Payload payload = *pool_->Get(1000 * (1 + (i * 7 + t) % 50));
        std::memset(payload.data(), t, payload.size());
        ASSERT_EQ(payload.data()[payload.size() - 1], t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool_->stats().lent_bytes, 0);
}

}  // namespace
}  // namespace awqd::engine
