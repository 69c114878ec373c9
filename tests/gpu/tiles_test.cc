// Every compiled tile of the persistent product, at counts of tokens around its edges, against the
// oracle. Tiles that keep the order of sums are also compared bit for bit with the sm80 row, which
// has the same order. Conformance tests the tiles that are chosen. Skips without a GPU of that
// architecture.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/backends.h"
#include "kernels/base/float8.h"
#include "kernels/base/math.h"
#include "kernels/cpu/reference.h"
#include "kernels/cuda/common/fixed_order.h"
#include "kernels/cuda/common/integers.h"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/kernels.h"
#include "kernels/plan/plan.h"
#include "tests/testing/find_kernel.h"
#include "tests/testing/guarded_buffer.h"
#include "tests/testing/matchers.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/test_device.h"

namespace awqd {
namespace {

using cuda::PersistentTile;
using testing::GuardedBuffer;

// Enough tokens for three of the widest tiles.
constexpr int64_t kMostTokens = 2 * 256 + 5;

// Four and eight k-ranges of K, of even and uneven length; N and, in two shapes, K that fill no
// tile; scales once per record, twice and four times, because kernels are compiled for one, two and
// more.
struct Shape {
  int64_t k, n;
  const char* scheme;
};
constexpr Shape kShapes[] = {{1024, 456, "w4g128z"},
                             {1024, 456, "w4g64z"},
                             {1376, 456, "w4g32z"},
                             {2048, 456, "w4g128z"},
                             {2048, 456, "w4g64z"},
                             {2720, 456, "w4g32z"},
                             {1024, 456, "w8cs"},
                             {1024, 456, "w8g128z"},
                             {1024, 456, "e2m1g16+e4m3*t"},
                             {1376, 456, "e2m1g32+e8m0"},
                             {1024, 456, "e4m3c+fp32"},
                             {1024, 456, "w8g32z"},
                             {1024, 456, "e4m3b128x128+fp32"},
                             {1376, 456, "e4m3g32+fp32"},
                             {1024, 456, "t4g64+fp32"},
                             {1024, 456, "w1g128z"},
                             {1376, 456, "w1g32z"},
                             {1024, 456, "w2g128z"},
                             {1376, 456, "w2g16s"},
                             {1024, 456, "w3g128z"},
                             {1376, 456, "w3g32z"},
                             {1024, 456, "w5g128z"},
                             {1376, 456, "w5g32s"},
                             {1024, 456, "w6g128z"},
                             {1376, 456, "w6g64z"},
                             {1376, 456, "w2g16o:fp32+fp32"},
                             {1376, 456, "w3g16s+fp32"},
                             {1376, 456, "w4g32o:fp32+fp32"},
                             {1376, 456, "w5g32r"},
                             {1376, 456, "w6g16s+fp32"},
                             {1376, 456, "w8g64o"},
                             {1024, 456, "w4cs"}};

WeightShape ShapeOf(const Shape& shape) {
  return {shape.k, shape.n, ParseScheme(shape.scheme).value()};
}

// The common properties of a list's tiles.
struct Codes {
  const char* name;
  CodeKind kind;
  int bits;
  bool real_zeros = false;
  bool one_group = false;  // of 4 bits
};
constexpr Codes kFourBits = {"w4", CodeKind::kUnsigned, 4};
constexpr Codes kFourBitsOfOneGroup = {"w4c", CodeKind::kUnsigned, 4, false, true};
constexpr Codes kEightBits = {"w8", CodeKind::kUnsigned, 8};
// Every tile that is compiled for these serves all their kinds of records.
constexpr Codes kOthers[] = {{"e2m1", CodeKind::kE2m1, 4},
                             {"e4m3", CodeKind::kE4m3, 8},
                             {"t4", CodeKind::kTable, 4},
                             {"w1", CodeKind::kUnsigned, 1},
                             {"w2", CodeKind::kUnsigned, 2},
                             {"w3", CodeKind::kUnsigned, 3},
                             {"w5", CodeKind::kUnsigned, 5},
                             {"w6", CodeKind::kUnsigned, 6},
                             {"w2_real", CodeKind::kUnsigned, 2, true},
                             {"w3_real", CodeKind::kUnsigned, 3, true},
                             {"w4_real", CodeKind::kUnsigned, 4, true},
                             {"w5_real", CodeKind::kUnsigned, 5, true},
                             {"w6_real", CodeKind::kUnsigned, 6, true},
                             {"w8_real", CodeKind::kUnsigned, 8, true}};

std::vector<int> ShapesOf(Codes codes) {
  std::vector<int> out;
  for (int shape = 0; shape < static_cast<int>(std::size(kShapes)); ++shape) {
    const WeightShape of = ShapeOf(kShapes[shape]);
    const bool one_group = of.scheme.bits == 4 && of.group_rows() == of.k;
    if (of.scheme.code == codes.kind && of.scheme.bits == codes.bits &&
        mma16::HasRealZeros(of) == codes.real_zeros && one_group == codes.one_group) {
      out.push_back(shape);
    }
  }
  return out;
}

// The shape for which every tile of such codes is compiled.
WeightShape Commonest(Codes codes) { return ShapeOf(kShapes[ShapesOf(codes).front()]); }

class Problem {
 public:
  Problem(Device& device, const Shape& shape, DType dtype) : device_(device), dtype_(dtype) {
    const HostWeight canonical = testing::RandomWeight(
        {.k = shape.k, .n = shape.n, .scheme = ParseScheme(shape.scheme).value(), .bias = true});
    weight_ = testing::PrepareFor(cuda::PersistentA16Row(), canonical, device).value();
    const auto x = testing::RandomMatrix(kMostTokens, shape.k, dtype, 7);
    if (dtype == DType::kInt8) {
      UseIntegers(canonical, x);
      return;
    }
    if (dtype == DType::kE4m3) {
      UseFloat8(canonical);
      return;
    }
    want_ = ReferenceProduct(
        canonical, {.x = {x.data(), dtype, kMostTokens, shape.k}, .bias = canonical.bias.data()});
    x_ = GuardedBuffer::Create(device, static_cast<int64_t>(x.size())).value();
    EXPECT_TRUE(x_->Fill(x).ok());
    const KernelRow& ordered = *testing::FindKernel("sm80/qmatmul_a16");
    ordered_ = Run(
        kMostTokens, ordered,
        [&](const MatmulArgs& args, StreamView stream) { return ordered.matmul(args, stream); },
        DType::kFp32);
  }

  const WeightShape& shape() const { return weight_->shape; }

  // Whether the tile's row serves such a weight.
  bool Serves(const KernelRow& row) const { return WhyNot(row, shape(), device_.info()).empty(); }

  // Whether the tile is compiled for such a weight, and accepts it. Parts that keep k-ranges apart
  // in registers serve one number of k-ranges, in global memory every number; all other tiles run
  // with four.
  bool Suits(const PersistentTile& tile, bool fixed_order) const {
    const auto tiles =
        fixed_order ? cuda::FixedOrderTiles(shape()) : cuda::PersistentTiles(shape(), dtype_);
    if (std::count(tiles.begin(), tiles.end(), tile) == 0) return false;
    const int k_ranges = cuda::ChooseFixedOrder(shape(), device_.info()).count();
    if (tile.accumulators == 0) return true;
    return k_ranges == (tile.accumulators == 1 ? 4 : tile.splits * tile.slices * tile.accumulators);
  }

  // y [m, N] of `product`, written to `out`. `blocks`: tokens have scales for each 128 of K.
  template <class Product>
  std::vector<uint8_t> Run(int64_t m, const KernelRow& row, Product product, DType out,
                           bool blocks = false) {
    auto y = GuardedBuffer::Create(device_, m * shape().n * SizeOf(out)).value();
    auto workspace =
        GuardedBuffer::CreateScratch(device_, row.workspace_bytes == nullptr
                                                  ? 0
                                                  : row.workspace_bytes(shape(), device_.info(), m))
            .value();
    auto stream = device_.CreateStream().value();
    const MatmulArgs args = {.weight = weight_.get(),
                             .x = {x_->data(), dtype_, m, shape().k},
                             .y = {y.data(), out, m, shape().n},
                             .bias = weight_->bias(),
                             .workspace = workspace.data(),
                             .x_stride = stride_,
                             .x_scale = blocks    ? static_cast<const float*>(block_scales_->data())
                                        : scales_ ? static_cast<const float*>(scales_->data())
                                                  : nullptr,
                             .x_scale_stride = blocks ? kScaleStride : 0};
    const absl::Status ran = product(args, stream->view());
    EXPECT_TRUE(ran.ok()) << ran;
    EXPECT_TRUE(stream->Synchronize().ok());
    EXPECT_TRUE(y.CheckBands().ok() && workspace.CheckBands().ok());
    return y.Read().value();
  }

  std::vector<double> Want(int64_t m, bool blocks = false) const {
    const std::vector<double>& want = blocks ? want_of_blocks_ : want_;
    return {want.begin(), want.begin() + m * shape().n};
  }
  std::vector<uint8_t> Ordered(int64_t m) const {
    return {ordered_.begin(), ordered_.begin() + m * shape().n * 4};
  }

 private:
  static constexpr int64_t kScaleStride = RoundUp(kMostTokens, int64_t{4});

  static GuardedBuffer Uploaded(Device& device, const void* data, size_t bytes) {
    auto out = GuardedBuffer::Create(device, static_cast<int64_t>(bytes)).value();
    const auto* const first = static_cast<const uint8_t*>(data);
    EXPECT_TRUE(out.Fill({first, first + bytes}).ok());
    return out;
  }

  // Bytes of tokens in the order that the prologue leaves.
  void StageBytes(const uint8_t* x, int64_t k) {
    stride_ = RoundUp(k, cuda::kIntegerBlock);
    std::vector<uint8_t> staged(kMostTokens * stride_);
    for (int64_t m = 0; m < kMostTokens; ++m) {
      for (int64_t at = 0; at < stride_; ++at) {
        const int place = static_cast<int>(at % cuda::kIntegerRun);
        const int64_t from = at - place + cuda::IntegerSource(place);
        if (from < k) staged[m * stride_ + at] = x[m * k + from];
      }
    }
    x_ = Uploaded(device_, staged.data(), staged.size());
  }

  void UseIntegers(const HostWeight& canonical, const std::vector<uint8_t>& x) {
    std::vector<int8_t> q(x.size());
    std::memcpy(q.data(), x.data(), q.size());
    StageBytes(x.data(), canonical.k);
    std::vector<float> scales;
    for (int64_t m = 0; m < kMostTokens; ++m) scales.push_back(0.01f + 0.001f * (m % 5));
    want_ = ReferenceProduct(canonical, {.q = q.data(),
                                         .scale = scales.data(),
                                         .tokens = kMostTokens,
                                         .bias = canonical.bias.data()});
    scales_ = Uploaded(device_, scales.data(), scales.size() * 4);
  }

  // E4M3 tokens with a scale each, and with one for each 128 of K.
  void UseFloat8(const HostWeight& canonical) {
    const int64_t k = canonical.k, blocks = CeilDiv(k, cuda::kIntegerBlock);
    const auto x = testing::RandomMatrix(kMostTokens, k, DType::kFp32, 7);
    std::vector<uint8_t> q;
    for (int64_t i = 0; i < kMostTokens * k; ++i) {
      q.push_back(FloatToE4m3(8 * testing::GetElement(x, DType::kFp32, i)));
    }
    StageBytes(q.data(), k);
    std::vector<float> scales(kMostTokens), of_blocks(blocks * kScaleStride + 256);
    for (int64_t m = 0; m < kMostTokens; ++m) scales[m] = 0.01f + 0.001f * (m % 5);
    for (size_t i = 0; i < of_blocks.size(); ++i) of_blocks[i] = 0.01f + 0.003f * (i % 11);
    const auto want = [&](auto scale_of) {
      std::vector<float> values;
      for (int64_t m = 0; m < kMostTokens; ++m) {
        for (int64_t i = 0; i < k; ++i) {
          values.push_back(E4m3ToFloat(q[m * k + i]) * scale_of(m, i / cuda::kIntegerBlock));
        }
      }
      return ReferenceProduct(canonical, {.x = {values.data(), DType::kFp32, kMostTokens, k},
                                          .bias = canonical.bias.data()});
    };
    want_ = want([&](int64_t m, int64_t) { return scales[m]; });
    want_of_blocks_ = want([&](int64_t m, int64_t b) { return of_blocks[b * kScaleStride + m]; });
    scales_ = Uploaded(device_, scales.data(), scales.size() * 4);
    block_scales_ = Uploaded(device_, of_blocks.data(), of_blocks.size() * 4);
  }

  Device& device_;
  DType dtype_;
  int64_t stride_ = 0;
  std::shared_ptr<const DeviceWeight> weight_;
  std::optional<GuardedBuffer> x_;
  std::optional<GuardedBuffer> scales_, block_scales_;
  std::vector<double> want_, want_of_blocks_;
  std::vector<uint8_t> ordered_;
};

// The order of sums is kept or not; codes; tile; type of activations.
using Param = std::tuple<bool, Codes, PersistentTile, DType>;

class PersistentTileTest : public ::testing::TestWithParam<Param> {
 protected:
  static void SetUpTestSuite() {
    if (auto opened = OpenCudaDevice(0, 0); opened.ok()) device_ = std::move(*opened);
  }
  static void TearDownTestSuite() {
    problems_.clear();
    device_.reset();
  }

  void SetUp() override {
    if (device_ == nullptr) GTEST_SKIP() << "no GPU";
    if (device_->info().arch != 90)
      GTEST_SKIP() << "got arch " << device_->info().arch << ", expected 90";
  }

  static Problem& Find(int shape, DType dtype) {
    auto& problem = problems_[{shape, dtype}];
    if (problem == nullptr) problem = std::make_unique<Problem>(*device_, kShapes[shape], dtype);
    return *problem;
  }

 private:
  static inline std::unique_ptr<Device> device_;
  static inline std::map<std::pair<int, DType>, std::unique_ptr<Problem>> problems_;
};

TEST_P(PersistentTileTest, IsRightAroundItsEdges) {
  const auto& [fixed_order, codes, tile, dtype] = GetParam();
  const KernelRow& row = fixed_order             ? cuda::FixedOrderA16Row()
                         : dtype == DType::kInt8 ? cuda::PersistentA8ScaledRow()
                         : dtype == DType::kE4m3 ? cuda::PersistentFloat8Row()
                                                 : cuda::PersistentA16Row();
  const auto product = [of = tile, fixed = fixed_order](const MatmulArgs& args, StreamView stream) {
    return cuda::RunTile(args, of, fixed, stream);
  };
  int suited = 0;
  for (int shape : ShapesOf(codes)) {
    Problem& problem = Find(shape, dtype);
    if (!problem.Serves(row) || !problem.Suits(tile, fixed_order)) continue;
    ++suited;
    // Alternately stored in 16 and in 32 bits, in the other order for the next shape.
    bool wide = shape % 2 == 0;
    for (int64_t m : {1, tile.tokens - 1, tile.tokens, tile.tokens + 1, 2 * tile.tokens + 5}) {
      const DType out = wide ? DType::kFp32 : SizeOf(dtype) == 1 ? DType::kFp16 : dtype;
      wide = !wide;
      SCOPED_TRACE(absl::StrCat("K ", problem.shape().k, " ", kShapes[shape].scheme, ", M ", m,
                                ", ", Name(out)));
      const auto y = problem.Run(m, row, product, out);
      EXPECT_LE(testing::FrobeniusError(y, out, problem.Want(m)),
                dtype == DType::kInt8 && out == DType::kFp32
                    ? 1e-6
                    : testing::ProductTolerance(out, dtype));
      if (dtype == DType::kE4m3) {
        EXPECT_LE(testing::FrobeniusError(problem.Run(m, row, product, out, true), out,
                                          problem.Want(m, true)),
                  testing::ProductTolerance(out, dtype))
            << "scales of blocks";
      }
      if (fixed_order && out == DType::kFp32) {
        EXPECT_EQ(testing::FirstDifference(y, problem.Ordered(m)), -1);
      }
      EXPECT_EQ(testing::FirstDifference(y, problem.Run(m, row, product, out)), -1) << "run again";
    }
  }
  // Every kind of records, or the commonest one; INT8 accepts no 8-bit zeros but 128.
  const bool commonest = codes.name == kFourBits.name || codes.name == kEightBits.name;
  if (!commonest) {
    const auto all = static_cast<int>(ShapesOf(codes).size());
    EXPECT_EQ(suited, dtype == DType::kE4m3 ? all - 1 : all) << "all but short groups";
    return;
  }
  const int lengths = tile.accumulators == 0 ? 2 : 1, kinds = 3;
  EXPECT_TRUE(suited == kinds * lengths || suited == lengths) << suited;
}

std::string NameOf(const ::testing::TestParamInfo<Param>& info) {
  const auto& [fixed_order, codes, tile, dtype] = info.param;
  return absl::StrCat(fixed_order ? "fixed_order_" : "", codes.name, "_", tile.tokens, "_tokens_",
                      tile.records, "_records_", tile.cluster, "_cluster_", tile.splits, "_parts_",
                      tile.accumulators, "_sets_", tile.slices, "_slices_", Name(dtype));
}

auto Every(bool fixed_order, Codes codes, const std::vector<PersistentTile>& tiles) {
  return ::testing::Combine(::testing::Values(fixed_order), ::testing::Values(codes),
                            ::testing::ValuesIn(tiles),
                            ::testing::Values(DType::kFp16, DType::kBf16));
}

std::vector<Param> EveryOfOthers() {
  std::vector<Param> out;
  for (const Codes& codes : kOthers) {
    for (const PersistentTile& tile : cuda::PersistentTiles(Commonest(codes))) {
      for (const DType dtype : {DType::kFp16, DType::kBf16}) {
        out.emplace_back(false, codes, tile, dtype);
      }
    }
  }
  return out;
}

// Tiles of E4M3 activations serve records with one scale and without.
std::vector<Param> EveryOfE4m3() {
  const Codes codes = {"e4m3", CodeKind::kE4m3, 8};
  std::vector<Param> out;
  for (const PersistentTile& tile : cuda::PersistentTiles(Commonest(codes), DType::kE4m3)) {
    out.emplace_back(false, codes, tile, DType::kE4m3);
  }
  return out;
}

auto EveryOfInt8(Codes codes) {
  return ::testing::Combine(
      ::testing::Values(false), ::testing::Values(codes),
      ::testing::ValuesIn(cuda::PersistentTiles(Commonest(codes), DType::kInt8)),
      ::testing::Values(DType::kInt8));
}

INSTANTIATE_TEST_SUITE_P(Tiles, PersistentTileTest,
                         Every(false, kFourBits, cuda::PersistentTiles(Commonest(kFourBits))),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(FixedOrderTiles, PersistentTileTest,
                         Every(true, kFourBits, cuda::FixedOrderTiles(Commonest(kFourBits))),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(TilesOf8Bits, PersistentTileTest,
                         Every(false, kEightBits, cuda::PersistentTiles(Commonest(kEightBits))),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(TilesOfOthers, PersistentTileTest, ::testing::ValuesIn(EveryOfOthers()),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(TilesOfE4m3, PersistentTileTest, ::testing::ValuesIn(EveryOfE4m3()),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(TilesOfInt8, PersistentTileTest, EveryOfInt8(kFourBits), NameOf);
INSTANTIATE_TEST_SUITE_P(TilesOfIntegers, PersistentTileTest, EveryOfInt8(kFourBitsOfOneGroup),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(TilesOfIntegersOf8Bits, PersistentTileTest, EveryOfInt8(kEightBits),
                         NameOf);

}  // namespace
}  // namespace awqd
