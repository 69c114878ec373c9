// The memory of a load is known, and compared with the free memory, before it is allocated.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/kernels.h"
#include "server/model/placement.h"
#include "server/repository/model_store.h"
#include "tests/kernels/checkpoint/gguf_bytes.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::model {
namespace {

using ::awqd::testing::AwqConfig;
using ::awqd::testing::AwqLinear;
using ::awqd::testing::Merge;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TempDirectory;
using ::awqd::testing::WrappedDevice;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kMiB = 1 << 20;

std::unique_ptr<Device> Cpu() { return *OpenDevice("cpu", {.cpu_threads = 1}); }

class MemoryPlanTest : public ::testing::Test {
 protected:
  // Layouts pad, so neither weight is as large as its tensors.
  void WriteModel() {
    directory_.Write("m/config.json", AwqConfig(16));
    directory_.Write("m/model.safetensors", SafetensorsOf(Merge(AwqLinear("a", 48, 24, 16),
                                                                AwqLinear("b", 400, 136, 16))));
  }
  absl::StatusOr<MemoryPlan> Plan(const LoadTarget& target) {
    const auto root = RepositoryRoot::Open(directory_.path());
    const auto checkpoint = Checkpoint::Open(*root, "m");
    if (!checkpoint.ok()) return checkpoint.status();
    const std::atomic<bool> cancelled = false;
    return PlanLoad(*checkpoint, target, cancelled);
  }
  // Linears of K x 32768, all of K one group, with 4 bits, in a sparse file.
  void WriteSparse(int64_t k, int count = 1) {
    const int64_t n = 32768;
    int64_t end = 0;
    std::string header;
    const auto tensor = [&](absl::string_view name, absl::string_view dtype, int64_t rows,
                            int64_t cols, int64_t bytes) {
      absl::StrAppend(&header, header.empty() ? "{" : ",", "\"", name, "\":{\"dtype\":\"", dtype,
                      "\",\"shape\":[", rows, ",", cols, "],\"data_offsets\":[", end, ",",
                      end + bytes, "]}");
      end += bytes;
    };
    for (int i = 0; i < count; ++i) {
      tensor(absl::StrCat(i, ".qweight"), "I32", k, n / 8, k * n / 2);
      tensor(absl::StrCat(i, ".qzeros"), "I32", 1, n / 8, n / 2);
      tensor(absl::StrCat(i, ".scales"), "F16", 1, n, 2 * n);
    }
    header += "}";
    directory_.Write("m/config.json", AwqConfig(-1));
    directory_.Write("m/model.safetensors", awqd::testing::Safetensors(header, ""));
    const int64_t size = 8 + static_cast<int64_t>(header.size()) + end;
    ASSERT_EQ(truncate(directory_.At("m/model.safetensors").c_str(), size), 0);
  }

  TempDirectory directory_;
};

TEST_F(MemoryPlanTest, IsWhatTheLoadTakes) {
  WriteModel();
  const auto device = Cpu();
  const auto plan = Plan({.devices = {device.get()}, .readers = 1});
  ASSERT_TRUE(plan.ok()) << plan.status();
  repository::ModelStore store(directory_.path(), device.get());
  const auto model = store.Load("m");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(plan->device_bytes(), device->UsedBytes());
  // The raw tensors of the larger one, and their decoded form.
  const int64_t raw = 400 * 136 / 2 + 25 * 136 / 2 + 25 * 136 * 2;
  EXPECT_EQ(plan->working, raw + 400 * 136 / 2 + 25 * 136 + 25 * 136 * 2);
  EXPECT_EQ(plan->ToString(),
            absl::StrCat(FormatBytes(plan->device_bytes()), " on cpu and ",
                         FormatBytes(plan->working), " of host memory while it loads"));
}

TEST_F(MemoryPlanTest, OfTwoReaders) {
  WriteModel();
  const auto device = Cpu();
  const auto one = Plan({.devices = {device.get()}, .readers = 1});
  const auto two = Plan({.devices = {device.get()}});
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ(one->readers, 1);
  EXPECT_EQ(two->readers, 2);
  // The smaller one is decoded beside the larger one, and its reader's buffer may have held that.
  const int64_t raw = 400 * 136 / 2 + 25 * 136 / 2 + 25 * 136 * 2;
  EXPECT_EQ(two->working, one->working + raw + 48 * 24 / 2 + 3 * 24 + 3 * 24 * 2);
  EXPECT_EQ(two->weights, one->weights);
}

// Each takes 64 MiB in the file and as much decoded.
TEST_F(MemoryPlanTest, NoMoreReadersThanTheirMemoryIsFor) {
  WriteSparse(4096, 8);
  const auto device = Cpu();
  device->SetBudget(4096 * kMiB);
  const auto four = Plan({.devices = {device.get()}, .readers = 4});
  const auto eight = Plan({.devices = {device.get()}, .readers = 8});
  ASSERT_TRUE(four.ok() && eight.ok());
  EXPECT_EQ(four->readers, 4);
  EXPECT_EQ(eight->readers, 5);
  EXPECT_LE(eight->working, MemoryPlan::kMostWorkingBytes);
  // Two go without that bound.
  WriteSparse(16384, 8);
  const auto two = Plan({.devices = {device.get()}, .readers = 8});
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_EQ(two->readers, 2);
  EXPECT_GT(two->working, MemoryPlan::kMostWorkingBytes);
}

TEST_F(MemoryPlanTest, OneReaderWhereThereIsNoRoomForTwo) {
  WriteSparse(16384, 2);
  const auto device = Cpu();
  const auto free = [&](int64_t bytes) {
    device->SetBudget(bytes);
    return Plan({.devices = {device.get()}});
  };
  const auto two = free(4096 * kMiB);
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_EQ(two->readers, 2);
  const auto one = free(two->peak.at(device.get()) - 1);
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(one->readers, 1);
  EXPECT_LT(one->working, two->working);
}

TEST_F(MemoryPlanTest, OfSeveralDevices) {
  WriteModel();
  const auto one = *OpenDevice("cpu:0", {.cpu_threads = 1});
  const auto two = *OpenDevice("cpu:1", {.cpu_threads = 1});
  for (const Sharding sharding : {Sharding::kReplicas, Sharding::kColumns, Sharding::kExperts}) {
    const auto plan = Plan({{one.get(), two.get()}, sharding});
    ASSERT_TRUE(plan.ok()) << plan.status();
    repository::ModelStore store(directory_.path(), {one.get(), two.get()}, sharding);
    ASSERT_TRUE(store.Load("m").ok());
    EXPECT_EQ(plan->weights.at(one.get()), one->UsedBytes());
    EXPECT_EQ(plan->weights.at(two.get()), two->UsedBytes());
  }
}

// A weight for a device whose memory the host cannot access is packed on the host first.
TEST_F(MemoryPlanTest, OfACopyForTheDevice) {
  WriteModel();
  const auto near = Cpu();
  WrappedDevice far(Cpu(), /*host_addressable=*/false);
  const auto without = Plan({{near.get()}});
  const auto with = Plan({{&far}});
  ASSERT_TRUE(without.ok() && with.ok());
  EXPECT_GT(with->working, without->working);
  EXPECT_EQ(with->host_peak, with->working);
  EXPECT_EQ(without->host_peak, without->working + without->device_bytes());
}

TEST_F(MemoryPlanTest, OneByteTooFewIsRefusedBeforeAnythingIsAllocated) {
  WriteModel();
  WrappedDevice device(Cpu(), true);
  const int64_t bytes = Plan({{&device}})->device_bytes();
  repository::ModelStore store(directory_.path(), &device);
  device.SetBudget(bytes - 1);
  const absl::Status status = store.Load("m").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("model \"m\": needs ", bytes, " bytes on cpu, got ", bytes - 1,
                                     " free")));
  EXPECT_EQ(device.allocations(), 0);
}

// The weight would fit, but not together with its raw and decoded tensors.
TEST_F(MemoryPlanTest, ALimitHoldsForThePeak) {
  WriteSparse(49152);
  const auto device = Cpu();
  device->SetBudget(1024 * kMiB);
  const absl::Status status = Plan({{device.get()}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(" bytes on cpu while it reads and decodes its weights"),
                    HasSubstr(absl::StrCat("got ", 1024 * kMiB, " free"))));
  // Twice 64 MiB, raw and decoded, are not counted.
  WriteSparse(4096);
  device->SetBudget(65 * kMiB);
  const auto small = Plan({{device.get()}});
  ASSERT_TRUE(small.ok()) << small.status();
  EXPECT_GT(small->working, 128 * kMiB);
}

// Scales of MXFP4 lie among the codes; if they are far apart, a GPU has another layout.
TEST_F(MemoryPlanTest, IsExactWhereScalesLieAmongCodes) {
  constexpr uint64_t kK = 256, kN = 64;
  constexpr uint64_t kBytes = kN * kK / 32 * 17;
  awqd::testing::GgufBytes file;
  file.tensors = {{"near.weight", {kK, kN}, 39, 0}, {"far.weight", {kK, kN}, 39, kBytes}};
  file.data = std::string(2 * kBytes, '\0');
  for (uint64_t block = 0; block < 2 * kBytes / 17; ++block) {
    const bool far = block >= kBytes / 17 && block % 2 == 1;
    file.data[block * 17] = static_cast<char>(far ? 80 : 127);  // the exponent
  }
  directory_.Write("m/model.gguf", file.File());
  WrappedDevice device(Cpu(), false);
  device.Pretend({.kind = DeviceKind::kCuda,
                  .id = "cuda:0",
                  .arch = 90,
                  .sm_count = 132,
                  .shared_bytes_per_block = 227 << 10});
  const auto plan = Plan({{&device}});
  if (plan.status().code() == absl::StatusCode::kUnimplemented) {
    GTEST_SKIP() << "this build has no kernels for GPUs";
  }
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto root = RepositoryRoot::Open(directory_.path());
  const auto checkpoint = Checkpoint::Open(*root, "m");
  std::vector<uint8_t> scratch;
  std::set<int64_t> sizes;
  int64_t total = 0;
  for (const LinearLocation& linear : checkpoint->linears()) {
    const auto bytes = PreparedBytes(*checkpoint->Read(linear, &scratch), device.info());
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    EXPECT_EQ(bytes->least, bytes->most) << "its scales are known";
    sizes.insert(bytes->most);
    total += bytes->most;
  }
  EXPECT_EQ(sizes.size(), 2u) << "or the test shows nothing";
  EXPECT_EQ(plan->device_bytes(), total);
}

TEST_F(MemoryPlanTest, IsCancelled) {
  WriteModel();
  const auto device = Cpu();
  const auto root = RepositoryRoot::Open(directory_.path());
  const auto checkpoint = Checkpoint::Open(*root, "m");
  const std::atomic<bool> cancelled = true;
  const LoadTarget target = {{device.get()}};
  EXPECT_EQ(PlanLoad(*checkpoint, target, cancelled).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace awqd::model
