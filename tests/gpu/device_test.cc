// The CUDA device on a real GPU: memory, budget, streams, copies, faults. Skips without one.
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "kernels/backends.h"
#include "kernels/cuda/core/error.h"
#include "kernels/kernels.h"
#include "tests/gpu/faults.h"
#include "tests/testing/matchers.h"
#include "tests/testing/random_weight.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

class GpuDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto opened = OpenCudaDevice(0, 0);
    if (!opened.ok()) GTEST_SKIP() << opened.status().message();
    device_ = *std::move(opened);
    auto stream = device_->CreateStream();
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *std::move(stream);
  }

  Buffer Take(MemoryKind kind, int64_t bytes) {
    auto buffer = device_->Allocate(kind, bytes);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    return buffer.ok() ? *std::move(buffer) : Buffer();
  }
  Buffer TakeDevice(int64_t bytes) { return Take(MemoryKind::kDevice, bytes); }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

TEST_F(GpuDeviceTest, DescribesItself) {
  const DeviceInfo& info = device_->info();
  EXPECT_EQ(info.kind, DeviceKind::kCuda);
  EXPECT_EQ(info.id, "cuda:0");
  EXPECT_FALSE(info.name.empty());
  EXPECT_GE(info.arch, 80);
  EXPECT_GT(info.sm_count, 0);
  EXPECT_GT(info.l2_bytes, kMiB);
  EXPECT_GT(info.sm_clock_khz, 500'000);
  EXPECT_GT(info.memory_bytes_per_s, 200'000'000'000);
  EXPECT_GT(info.shared_bytes_per_block, 48 * 1024);
  EXPECT_GE(info.memory_bytes, device_->FreeBytes());
  EXPECT_FALSE(device_->host_addressable());
  EXPECT_TRUE(device_->healthy());
  RecordProperty("gpu", info.name);
}

TEST_F(GpuDeviceTest, MoreIndicesThanGpusIsRefused) {
  EXPECT_EQ(OpenCudaDevice(63, 0).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(GpuDeviceTest, CopiesComeBackThroughStagingAndPageableMemory) {
  const int64_t bytes = 5 * kMiB + 3;
  Buffer there = TakeDevice(bytes), staging = Take(MemoryKind::kStaging, bytes);
  ASSERT_EQ(reinterpret_cast<uintptr_t>(there.data()) % 256, 0u);
  const std::vector<uint8_t> sent =
      testing::RandomMatrix(1, CeilDiv(bytes, 2), DType::kFp16, /*seed=*/7);
  std::memcpy(staging.data(), sent.data(), bytes);
  ASSERT_TRUE(device_->CopyToDevice(there.data(), staging.data(), bytes, stream_->view()).ok());
  std::vector<uint8_t> back(bytes);
  ASSERT_TRUE(device_->CopyToHost(back.data(), there.data(), bytes, stream_->view()).ok());
  ASSERT_TRUE(stream_->Synchronize().ok());
  EXPECT_EQ(std::memcmp(back.data(), sent.data(), bytes), 0);
}

TEST_F(GpuDeviceTest, NothingRunsOnTheDefaultStream) {
  Buffer there = TakeDevice(256);
  int value = 0;
  EXPECT_EQ(device_->CopyToDevice(there.data(), &value, 4, {}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device_->CopyToHost(&value, there.data(), 4, {}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(testing::WriteAfterDelay(0, 1, static_cast<int*>(there.data()), {}).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(GpuDeviceTest, UsedBytesAreExactAndTheBudgetHolds) {
  EXPECT_EQ(device_->UsedBytes(), 0);
  device_->SetBudget(10 * kMiB);
  Buffer a = TakeDevice(6 * kMiB);
  EXPECT_EQ(device_->UsedBytes(), 6 * kMiB);
  EXPECT_EQ(device_->FreeBytes(), 4 * kMiB);
  const auto refused = device_->Allocate(MemoryKind::kDevice, 4 * kMiB + 1);
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("4194305"));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("4194304"));
  Buffer b = TakeDevice(4 * kMiB);
  EXPECT_EQ(device_->UsedBytes(), 10 * kMiB);
  a.Reset();
  EXPECT_EQ(device_->UsedBytes(), 4 * kMiB);
  // Staging is host memory: outside the budget.
  Buffer staging = Take(MemoryKind::kStaging, 64 * kMiB);
  EXPECT_EQ(device_->UsedBytes(), 4 * kMiB);
}

TEST_F(GpuDeviceTest, TooMuchIsRefusedAndTheDeviceGoesOn) {
  const auto refused = device_->Allocate(MemoryKind::kDevice, device_->info().memory_bytes * 2);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(device_->UsedBytes(), 0);
  EXPECT_TRUE(device_->healthy());
  EXPECT_EQ(device_->Allocate(MemoryKind::kDevice, -1).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(TakeDevice(kMiB));
}

TEST_F(GpuDeviceTest, FreedMemoryGoesBackToTheDriver) {
  TakeDevice(kMiB).Reset();  // triggers one-time allocations of the driver
  const int64_t before = device_->FreeBytes();
  std::vector<Buffer> many;
  for (int i = 0; i < 50; ++i) many.push_back(TakeDevice(17 * kMiB));
  EXPECT_LE(device_->FreeBytes(), before - 50 * 17 * kMiB);
  many.clear();
  EXPECT_EQ(device_->FreeBytes(), before);
  EXPECT_EQ(device_->UsedBytes(), 0);
}

TEST_F(GpuDeviceTest, AnUnloadedWeightLeavesNothing) {
  testing::WeightSpec spec;
  spec.k = 4096;
  spec.n = 4096;
  spec.bias = true;
  const HostWeight weight = testing::RandomWeight(spec);
  const auto once = [&] {
    auto prepared = PrepareWeight(weight, *device_);
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    EXPECT_EQ(device_->UsedBytes(), (*prepared)->bytes());
  };
  once();
  const int64_t before = device_->FreeBytes();
  for (int i = 0; i < 3; ++i) once();
  EXPECT_EQ(device_->FreeBytes(), before);
  EXPECT_EQ(device_->UsedBytes(), 0);
}

TEST_F(GpuDeviceTest, BuffersServeAnyStreamAtOnce) {
  auto other = device_->CreateStream();
  ASSERT_TRUE(other.ok());
  for (int i = 0; i < 20; ++i) {
    Buffer there = TakeDevice(4);
    Stream& stream = i % 2 == 0 ? *stream_ : **other;
    int got = 0;
    ASSERT_TRUE(
        testing::WriteAfterDelay(50, i, static_cast<int*>(there.data()), stream.view()).ok());
    ASSERT_TRUE(device_->CopyToHost(&got, there.data(), 4, stream.view()).ok());
    ASSERT_TRUE(stream.Synchronize().ok());
    EXPECT_EQ(got, i);
  }
}

TEST_F(GpuDeviceTest, SynchronizeWaitsOnlyForItsOwnStream) {
  auto other = device_->CreateStream();
  ASSERT_TRUE(other.ok());
  Buffer slow = TakeDevice(4), staging = Take(MemoryKind::kStaging, 8);
  auto* const seen = static_cast<volatile int*>(staging.data());
  seen[0] = 0;
  ASSERT_TRUE(
      testing::WriteAfterDelay(300'000, 1, static_cast<int*>(slow.data()), stream_->view()).ok());
  ASSERT_TRUE(device_->CopyToHost(staging.data(), slow.data(), 4, stream_->view()).ok());
  ASSERT_TRUE((*other)->Synchronize().ok());
  EXPECT_EQ(seen[0], 0);
  ASSERT_TRUE(stream_->Synchronize().ok());
  EXPECT_EQ(seen[0], 1);
}

TEST_F(GpuDeviceTest, SharedMemoryUpToTheOptInMaximum) {
  Buffer out = TakeDevice(4);
  int* const target = static_cast<int*>(out.data());
  for (const int64_t bytes : {int64_t{1024}, int64_t{64} * 1024, int64_t{50} * 1024,
                              device_->info().shared_bytes_per_block}) {
    ASSERT_TRUE(testing::LaunchWithSharedMemory(bytes, target, stream_->view()).ok()) << bytes;
    int sum = 0;
    ASSERT_TRUE(device_->CopyToHost(&sum, target, 4, stream_->view()).ok());
    ASSERT_TRUE(stream_->Synchronize().ok());
    EXPECT_EQ(sum, bytes);
  }
  EXPECT_FALSE(testing::LaunchWithSharedMemory(device_->info().shared_bytes_per_block + 1, target,
                                               stream_->view())
                   .ok());
  EXPECT_TRUE(device_->healthy());
}

TEST_F(GpuDeviceTest, ARefusedLaunchIsReportedAndForgotten) {
  const absl::Status refused = testing::LaunchTooManyThreads(stream_->view());
  EXPECT_EQ(refused.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("too many threads"));
  EXPECT_TRUE(device_->healthy());
  Buffer out = TakeDevice(4);
  EXPECT_TRUE(testing::WriteAfterDelay(0, 1, static_cast<int*>(out.data()), stream_->view()).ok());
  EXPECT_TRUE(stream_->Synchronize().ok());
}

TEST_F(GpuDeviceTest, ThreadsShareTheDevice) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([this, t] {
      auto stream = device_->CreateStream();
      ASSERT_TRUE(stream.ok()) << stream.status();
      for (int i = 0; i < 50; ++i) {
        auto buffer = device_->Allocate(MemoryKind::kDevice, 4096 * (t + 1));
        ASSERT_TRUE(buffer.ok()) << buffer.status();
        const int sent = t * 1000 + i;
        int got = -1;
        ASSERT_TRUE(device_->CopyToDevice(buffer->data(), &sent, 4, (*stream)->view()).ok());
        ASSERT_TRUE(device_->CopyToHost(&got, buffer->data(), 4, (*stream)->view()).ok());
        ASSERT_TRUE((*stream)->Synchronize().ok());
        EXPECT_EQ(got, sent);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(device_->UsedBytes(), 0);
}

// Runs in a child process, because the fault costs the process its device. Prints its findings;
// exit code 0 on success.
[[noreturn]] void FaultAndCheck() {
  auto device = OpenCudaDevice(0, 0);
  if (!device.ok()) std::exit(2);
  auto stream = (*device)->CreateStream();
  auto buffer = (*device)->Allocate(MemoryKind::kDevice, 1024);
  if (!stream.ok() || !buffer.ok() || !(*device)->healthy()) std::exit(3);
  if (!testing::EnqueueIllegalWrite((*stream)->view()).ok()) std::exit(4);
  const absl::Status fault = (*stream)->Synchronize();
  std::fprintf(stderr, "%s\n", fault.ToString().c_str());
  if (fault.code() != absl::StatusCode::kInternal) std::exit(5);
  if ((*device)->healthy()) std::exit(6);
  if ((*device)->Allocate(MemoryKind::kDevice, 1024).ok()) std::exit(7);
  if ((*device)->healthy()) std::exit(8);
  std::exit(0);  // destructors would run on a dead context
}

TEST_F(GpuDeviceTest, AStickyFaultIsInternalAndMarksTheDevice) {
  if (std::getenv("AWQD_TEST_NO_FAULTS") != nullptr) GTEST_SKIP() << "AWQD_TEST_NO_FAULTS is set";
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(FaultAndCheck(), ::testing::ExitedWithCode(0), "cudaErrorIllegalAddress");
}

}  // namespace
}  // namespace awqd
