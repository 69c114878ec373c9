// Hadamard matrices of tensors: their signs, their order, and every refusal; the setting.
#include "kernels/formats/hadamard.h"

#include <bit>
#include <cmath>
#include <functional>

#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kSize = 8;
constexpr float kScale = 0.25f;

// FP32 [8, 8]: Sylvester's, with these signs of rows and this order of columns.
Linear::Tensor Matrix(const std::function<float(int row)>& sign,
                      const std::function<int(int col)>& column) {
  Linear made;
  made.Add("m", "F32", {kSize, kSize});
  for (int i = 0; i < kSize * kSize; ++i) {
    const int row = i / kSize;
    const bool odd = std::popcount(static_cast<unsigned>(row & column(i % kSize))) % 2 != 0;
    made.Put("m", i, sign(row) * (odd ? -kScale : kScale));
  }
  return made.tensors["m"];
}
float Positive(int) { return 1; }
int InOrder(int col) { return col; }

struct Decoded {
  absl::Status status;
  HostWeight weight;
};
Decoded Decode(const Linear::Tensor& matrix, int64_t k = 2 * kSize) {
  Decoded out;
  out.weight.k = k;
  out.status = DecodeHadamard("m", {matrix.dtype, matrix.shape, matrix.bytes}, &out.weight);
  return out;
}
std::string Error(const Linear::Tensor& matrix, int64_t k = 2 * kSize) {
  return std::string(Decode(matrix, k).status.message());
}

TEST(DecodeHadamard, SylvestersIsATransformAlone) {
  const Decoded got = Decode(Matrix(Positive, InOrder));
  ASSERT_TRUE(got.status.ok()) << got.status;
  EXPECT_EQ(got.weight.hadamard, (Hadamard{kSize, kScale}));
  EXPECT_TRUE(got.weight.factor.empty());
  EXPECT_TRUE(got.weight.order.empty());
}

TEST(DecodeHadamard, SignsAreFactorsAndColumnsAnOrder) {
  const auto sign = [](int row) { return row == 0 || row == 5 ? -1.0f : 1.0f; };
  const auto swapped = [](int col) { return col ^ 1; };
  const Decoded got = Decode(Matrix(sign, InOrder));
  ASSERT_TRUE(got.status.ok()) << got.status;
  EXPECT_THAT(got.weight.factor, ElementsAre(-1, 1, 1, 1, 1, -1, 1, 1, -1, 1, 1, 1, 1, -1, 1, 1));
  EXPECT_TRUE(got.weight.order.empty());
  // The first column is taken for the signs: the same matrix, row 1 times -1 and column 0 in front.
  const Decoded both = Decode(Matrix(Positive, swapped));
  ASSERT_TRUE(both.status.ok()) << both.status;
  EXPECT_TRUE(both.weight.order.empty());
  EXPECT_EQ(both.weight.factor[1], -1);
  const auto turned = [](int col) { return (col & 1) << 2 | col >> 1; };
  const Decoded ordered = Decode(Matrix(Positive, turned));
  ASSERT_TRUE(ordered.status.ok()) << ordered.status;
  EXPECT_TRUE(ordered.weight.factor.empty());
  EXPECT_THAT(ordered.weight.order,
              ElementsAre(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
}

TEST(DecodeHadamard, RefusesOtherMatrices) {
  Linear::Tensor matrix = Matrix(Positive, InOrder);
  const float off = 0.125f;
  std::memcpy(matrix.bytes.data() + 4 * (3 * kSize + 6), &off, 4);
  EXPECT_THAT(Error(matrix), HasSubstr("tensor \"m\": got 0.125 at [3, 6], expected a Hadamard "
                                       "matrix of Sylvester with signs of rows and an order of "
                                       "columns, of elements 0.25 and -0.25"));
  EXPECT_THAT(Error(Matrix(Positive, [](int col) { return col == 3 ? 2 : col; })),
              HasSubstr("at [0, 3]"));
  EXPECT_THAT(Error(Matrix([](int) { return 0.0f; }, InOrder)),
              HasSubstr("scale of the transform: got 0, expected a positive number"));
  EXPECT_THAT(Error(Matrix([](int row) { return row == 1 ? NAN : 1; }, InOrder)),
              HasSubstr("expected a Hadamard matrix"));
  EXPECT_THAT(
      Error(Matrix(Positive, InOrder), 12),
      HasSubstr("hadamard_size: got 8, expected a power of two from 2 to 16384 that divides "
                "K = 12"));
  matrix.shape = {kSize / 2, 2 * kSize};
  EXPECT_THAT(Error(matrix), HasSubstr("expected [4, 4]"));
  matrix.dtype = "F64";
  EXPECT_THAT(Error(matrix), HasSubstr("F64"));
}

TEST(ReadHadamard, OfASetting) {
  HostWeight weight = {.k = 96};
  const auto read = [&](int64_t size) {
    Setting object;
    object.members["hadamard_size"] = Setting::Literal(size);
    return ReadHadamard(object, &weight);
  };
  EXPECT_TRUE(ReadHadamard({}, &weight).ok());
  EXPECT_EQ(weight.hadamard.size, 0);
  EXPECT_TRUE(read(32).ok());
  EXPECT_EQ(weight.hadamard, (Hadamard{32, 0.17677669f}));
  for (const int64_t size : {-2, -1, 0, 1, 3, 64, 32768}) {
    const absl::Status status = read(size);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << size;
    EXPECT_THAT(std::string(status.message()), HasSubstr("hadamard_size: got "));
  }
  weight.k = 64;
  EXPECT_TRUE(read(-1).ok());
  EXPECT_EQ(weight.hadamard, (Hadamard{64, 0.125f}));
}

}  // namespace
}  // namespace awqd
