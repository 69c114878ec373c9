// Partitioning by columns: every border, every member of the weight, and the contents of a placed
// weight.
#include "server/model/placed_weight.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "kernels/exact.h"
#include "kernels/kernels.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/rendezvous.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::model {
namespace {

using ::awqd::testing::RandomWeight;
using ::awqd::testing::WeightSpec;
using ::testing::HasSubstr;

std::unique_ptr<Device> NewDevice() {
  auto device = OpenDevice("cpu", {.cpu_threads = 1});
  EXPECT_TRUE(device.ok()) << device.status();
  return *std::move(device);
}

TEST(CutColumnsTest, SpansFollowOneAnotherAndAreNearlyEven) {
  for (int64_t parts = 1; parts <= 8; ++parts) {
    for (int64_t n = 1; n <= 4200; n += n < 600 ? 1 : 37) {
      const std::vector<ColumnSpan> spans = SplitColumns(n, parts);
      ASSERT_EQ(static_cast<int64_t>(spans.size()), std::clamp<int64_t>(n / 8, 1, parts));
      int64_t next = 0, widest = 0;
      for (const ColumnSpan& span : spans) {
        ASSERT_EQ(span.begin, next) << n << " in " << parts;
        ASSERT_EQ(span.begin % 8, 0) << n << " in " << parts;
        ASSERT_GT(span.end, span.begin) << n << " in " << parts;
        widest = std::max(widest, span.end - span.begin);
        next = span.end;
      }
      ASSERT_EQ(next, n);
      // A step of 8 is always possible, so no device holds more than its part, that step and the
      // ragged rest.
      const auto count = static_cast<int64_t>(spans.size());
      ASSERT_LE(widest * count * 16, std::max(n * 17, 16 * (n + count * (8 + 7))))
          << n << " in " << parts;
    }
  }
}

TEST(CutColumnsTest, PrefersTheStepThatKernelsLike) {
  const auto borders = [](int64_t n, int64_t parts) {
    std::vector<int64_t> out;
    for (const ColumnSpan& span : SplitColumns(n, parts)) out.push_back(span.end);
    return out;
  };
  EXPECT_EQ(borders(28672, 2), (std::vector<int64_t>{14336, 28672}));
  EXPECT_EQ(borders(11008, 8),
            (std::vector<int64_t>{1280, 2688, 4096, 5504, 6784, 8192, 9600, 11008}));
  EXPECT_EQ(borders(1536, 8), (std::vector<int64_t>{192, 384, 576, 768, 960, 1152, 1344, 1536}));
  EXPECT_EQ(borders(24, 2), (std::vector<int64_t>{8, 24}));
  EXPECT_EQ(borders(8, 2), (std::vector<int64_t>{8}));
}

TEST(TakeColumnsTest, EveryMemberOfTheCutIsThatOfTheWhole) {
  for (int bits : {2, 3, 4, 8}) {
    for (int64_t n : {24, 200, 1000}) {
      WeightSpec spec{.k = 64, .n = n, .bias = true};
      spec.scheme = bits == 8 ? Symmetric(bits, 32) : Asymmetric(bits, 32);
      const HostWeight whole = RandomWeight(spec);
      for (const ColumnSpan& span : SplitColumns(n, 3)) {
        const HostWeight part = CopyColumns(whole, span);
        ASSERT_TRUE(Validate(part).ok()) << Validate(part);
        ASSERT_EQ(part.n, span.end - span.begin);
        for (int64_t col = 0; col < part.n; ++col) {
          const int64_t at = span.begin + col;
          ASSERT_EQ(part.bias[col], whole.bias[at]);
          for (int64_t row = 0; row < part.k; ++row) {
            ASSERT_EQ(part.Code(row, col), whole.Code(row, at)) << bits << " bits, n " << n;
          }
          for (int64_t group = 0; group < part.groups(); ++group) {
            ASSERT_EQ(part.Zero(group, col), whole.Zero(group, at));
            ASSERT_EQ(part.Scale(group, col), whole.Scale(group, at));
          }
        }
      }
    }
  }
}

TEST(CutMiddleTest, BordersAreMultiplesOf128) {
  const auto borders = [](int64_t n, int64_t parts) {
    std::vector<int64_t> out;
    for (const ColumnSpan& span : SplitMlp(n, parts)) out.push_back(span.end);
    return out;
  };
  EXPECT_EQ(borders(14336, 2), (std::vector<int64_t>{7168, 14336}));
  EXPECT_EQ(borders(2048, 3), (std::vector<int64_t>{640, 1280, 2048}));
  EXPECT_EQ(borders(300, 2), (std::vector<int64_t>{128, 300}));
  EXPECT_EQ(borders(768, 8), (std::vector<int64_t>{128, 256, 384, 512, 640, 768}));
  EXPECT_EQ(borders(100, 2), (std::vector<int64_t>{100}));
}

TEST(TakeRowsTest, EveryMemberOfTheCutIsThatOfTheWhole) {
  for (int bits : {2, 3, 4, 8}) {
    for (int64_t group : {0, 32, 128}) {
      WeightSpec spec{.k = 420, .n = 40, .bias = true};
      spec.scheme = bits == 8 ? Symmetric(bits, group) : Asymmetric(bits, group);
      const HostWeight whole = RandomWeight(spec);
      const std::vector<ColumnSpan> spans = SplitMlp(420, 3);
      ASSERT_TRUE(CanPartitionRows(whole, spans));
      for (const ColumnSpan& span : spans) {
        const HostWeight part = CopyRows(whole, span);
        ASSERT_TRUE(Validate(part).ok()) << Validate(part);
        ASSERT_EQ(part.k, span.end - span.begin);
        EXPECT_EQ(part.bias, span.begin == 0 ? whole.bias : std::vector<float>());
        for (int64_t row = 0; row < part.k; ++row) {
          const int64_t at = span.begin + row;
          const int64_t own = row / part.group_rows(), wholes = at / whole.group_rows();
          for (int64_t col = 0; col < part.n; ++col) {
            ASSERT_EQ(part.Code(row, col), whole.Code(at, col)) << bits << " bits, group " << group;
            ASSERT_EQ(part.Zero(own, col), whole.Zero(wholes, col));
            ASSERT_EQ(part.Scale(own, col), whole.Scale(wholes, col));
          }
        }
      }
    }
  }
}

TEST(TakeRowsTest, BlocksOfVectorCodesStayWhole) {
  const HostWeight whole =
      RandomWeight({.k = 768, .n = 24, .scheme = ParseScheme("iq2_s*c").value(), .bias = true});
  const auto expect_part = [&](const HostWeight& part, int64_t row, int64_t col) {
    ASSERT_TRUE(Validate(part).ok()) << Validate(part);
    for (int64_t i = 0; i < part.k * part.n; ++i) {
      const int64_t k = i / part.n, n = i % part.n;
      ASSERT_EQ(WeightValue(part, k, n), WeightValue(whole, row + k, col + n));
    }
  };
  expect_part(CopyColumns(whole, {8, 24}), 0, 8);
  expect_part(CopyRows(whole, {256, 768}), 256, 0);
  EXPECT_TRUE(CanPartitionRows(whole, {{0, 512}, {512, 768}}));
  EXPECT_FALSE(CanPartitionRows(whole, {{0, 384}, {384, 768}}));
  const HostWeight block =
      RandomWeight({.k = 256, .n = 24, .scheme = ParseScheme("iq2_s").value()});
  EXPECT_FALSE(CanPartitionRows(block, {{0, 128}, {128, 256}})) << "though it is one group";
}

TEST(TakeRowsTest, TransformedColumnsOfATrellisStayTogether) {
  const HostWeight whole =
      RandomWeight({.k = 32, .n = 384, .scheme = ParseScheme("trellis3mcg*c").value()});
  for (const ColumnSpan& span : SplitColumns(whole.n, 2, whole.scheme.block_cols)) {
    const HostWeight part = CopyColumns(whole, span);
    ASSERT_TRUE(Validate(part).ok()) << Validate(part);
    for (int64_t n = 0; n < part.n; ++n) {
      ASSERT_EQ(WeightValue(part, 17, n), WeightValue(whole, 17, span.begin + n));
    }
  }
  const HostWeight part = CopyRows(whole, {16, 32});
  for (int64_t n = 0; n < part.n; ++n) {
    ASSERT_EQ(WeightValue(part, 1, n), WeightValue(whole, 17, n));
  }
}

TEST(CanCutRowsTest, NotThroughAGroupNorWithAnOrderAFactorOrATransform) {
  const auto can = [](const WeightSpec& spec) {
    return CanPartitionRows(RandomWeight(spec), SplitMlp(spec.k, 2));
  };
  EXPECT_TRUE(can({.k = 512, .scheme = Asymmetric(4, 128)}));
  EXPECT_TRUE(can({.k = 512, .scheme = Asymmetric(4, 256)}));
  EXPECT_FALSE(can({.k = 768, .scheme = Asymmetric(4, 256)})) << "the border is 384";
  EXPECT_FALSE(can({.k = 512, .scheme = Asymmetric(4, 96)}));
  EXPECT_FALSE(can({.k = 512, .order = true}));
  EXPECT_FALSE(can({.k = 512, .factor = true}));
  EXPECT_FALSE(can({.k = 512, .hadamard = 32}));
  EXPECT_EQ(CopyColumns(RandomWeight({.k = 512, .hadamard = 32}), {8, 16}).hadamard.size, 32);
}

TEST(PlaceWeightTest, TheMiddleOfAnMlpLiesAlike) {
  const auto a = NewDevice(), b = NewDevice();
  Device* const devices[] = {a.get(), b.get()};
  const auto gate = PlaceWeight(RandomWeight({.k = 64, .n = 420}), devices, Placing::kMlpColumns);
  const auto down =
      PlaceWeight(RandomWeight({.k = 420, .n = 64, .scheme = Asymmetric(4, 32), .bias = true}),
                  devices, Placing::kMlpRows);
  ASSERT_TRUE(gate.ok() && down.ok()) << gate.status() << down.status();
  EXPECT_FALSE((*gate)->partitioned_at_rows());
  EXPECT_TRUE((*down)->partitioned_at_rows());
  EXPECT_TRUE((*down)->partitioned());
  EXPECT_TRUE((*down)->has_bias);
  for (size_t i = 0; i < 2; ++i) {
    const WeightPart &columns = (*gate)->parts[i], &rows = (*down)->parts[i];
    EXPECT_EQ(columns.col_begin, rows.row_begin);
    EXPECT_EQ(columns.col_end(), rows.row_end());
    EXPECT_EQ(rows.col_end(), 64);
    EXPECT_EQ(rows.weight->bias() != nullptr, i == 0);
  }
  // A weight with an order is partitioned by columns like any other.
  const auto ordered =
      PlaceWeight(RandomWeight({.k = 512, .n = 64, .order = true}), devices, Placing::kMlpRows);
  ASSERT_TRUE(ordered.ok()) << ordered.status();
  EXPECT_FALSE((*ordered)->partitioned_at_rows());
  EXPECT_TRUE((*ordered)->partitioned());
}

TEST(PlaceWeightTest, WholeOnEach) {
  const auto a = NewDevice(), b = NewDevice();
  Device* const devices[] = {a.get(), b.get()};
  const HostWeight weight = RandomWeight({.k = 128, .n = 256, .bias = true});
  auto placed = PlaceWeight(weight, devices, Placing::kWhole);
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_FALSE((*placed)->partitioned());
  EXPECT_TRUE((*placed)->has_bias);
  ASSERT_EQ((*placed)->parts.size(), 2u);
  EXPECT_EQ((*placed)->parts[0].weight->device, a.get());
  EXPECT_EQ((*placed)->parts[1].weight->device, b.get());
  EXPECT_EQ((*placed)->parts[1].weight->shape.n, 256);
  EXPECT_EQ((*placed)->bytes(), a->UsedBytes() + b->UsedBytes());
  placed = absl::CancelledError("");
  EXPECT_EQ(a->UsedBytes() + b->UsedBytes(), 0);
}

TEST(PlaceWeightTest, PackMemoryIsKeptFromWeightToWeight) {
  awqd::testing::WrappedDevice far(NewDevice(), /*host_addressable=*/false);
  Device* const devices[] = {&far};
  PackMemory memory;
  const HostWeight large = RandomWeight({.k = 256, .n = 256});
  const HostWeight small = RandomWeight({.k = 128, .n = 64, .bias = true});
  const uint8_t* kept = nullptr;
  for (const HostWeight* weight : {&large, &small, &large}) {
    const auto own = PlaceWeight(*weight, devices, Placing::kWhole);
    const auto placed = PlaceWeight(*weight, devices, Placing::kWhole, {}, &memory);
    ASSERT_TRUE(own.ok() && placed.ok()) << placed.status();
    ASSERT_EQ((*placed)->bytes(), (*own)->bytes());
    EXPECT_EQ(std::memcmp((*placed)->parts[0].weight->storage.data(),
                          (*own)->parts[0].weight->storage.data(), (*own)->bytes()),
              0);
    if (kept == nullptr) kept = memory.Get(far, (*placed)->bytes());
    EXPECT_EQ(memory.Get(far, 1), kept);
  }
  uint8_t* const larger = memory.Get(far, int64_t{1} << 20);
  std::memset(larger, 1, 1 << 20);
  EXPECT_EQ(memory.Get(far, 1), larger);
}

// Each waits for the other within its allocation.
TEST(PlaceWeightTest, DevicesAreFilledAtTheSameTime) {
  awqd::testing::Rendezvous rendezvous(2);
  std::vector<std::unique_ptr<awqd::testing::WrappedDevice>> own;
  std::vector<Device*> devices;
  for (int i = 0; i < 2; ++i) {
    own.push_back(std::make_unique<awqd::testing::WrappedDevice>(NewDevice(), false));
    own.back()->OnAllocate([&] { rendezvous.Meet(); });
    devices.push_back(own.back().get());
  }
  for (Placing placing : {Placing::kWhole, Placing::kColumns}) {
    ASSERT_TRUE(PlaceWeight(RandomWeight({.k = 128, .n = 256}), devices, placing).ok());
  }
  EXPECT_EQ(rendezvous.met(), 2);
}

TEST(PlaceWeightTest, CutAmongThem) {
  const auto a = NewDevice(), b = NewDevice();
  Device* const devices[] = {a.get(), b.get()};
  const HostWeight weight = RandomWeight({.k = 128, .n = 264, .bias = true});
  const auto placed = PlaceWeight(weight, devices, Placing::kColumns);
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_TRUE((*placed)->partitioned());
  EXPECT_EQ((*placed)->shape.n, 264);
  ASSERT_EQ((*placed)->parts.size(), 2u);
  EXPECT_EQ((*placed)->parts[0].col_begin, 0);
  EXPECT_EQ((*placed)->parts[1].col_begin, (*placed)->parts[0].col_end());
  EXPECT_EQ((*placed)->parts[1].col_end(), 264);
  EXPECT_LT(a->UsedBytes(), (*placed)->bytes() * 3 / 5);
}

TEST(PlaceWeightTest, TooNarrowToCutLivesOnTheFirst) {
  const auto a = NewDevice(), b = NewDevice();
  Device* const devices[] = {a.get(), b.get()};
  const auto placed = PlaceWeight(RandomWeight({.k = 128, .n = 8}), devices, Placing::kColumns);
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_FALSE((*placed)->partitioned());
  ASSERT_EQ((*placed)->parts.size(), 1u);
  EXPECT_EQ(b->UsedBytes(), 0);
}

TEST(PlaceWeightTest, ADeviceWithoutRoomFreesTheOthers) {
  const auto a = NewDevice(), b = NewDevice();
  Device* const devices[] = {a.get(), b.get()};
  b->SetBudget(1);
  for (bool cut : {false, true}) {
    const auto placed = PlaceWeight(RandomWeight({.k = 128, .n = 256}), devices,
                                    cut ? Placing::kColumns : Placing::kWhole);
    EXPECT_EQ(placed.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(placed.status().message()), HasSubstr("bytes on cpu, got 1 free"));
    EXPECT_EQ(a->UsedBytes() + b->UsedBytes(), 0);
  }
}

}  // namespace
}  // namespace awqd::model
