// Tensor contents: every refusal, and the roundings of typed values.
#include "server/wire/tensor.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/half.h"
#include "server/wire/status.h"
#include "tests/server/requests.h"

namespace awqd::wire {
namespace {

constexpr DTypeMask kAll = 0xffffffffu;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string FieldThatFails(const v1::Tensor& tensor, DTypeMask allowed = kAll) {
  const absl::Status status = CheckTensor(tensor, allowed, "t").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(FieldOf(status)));
  return FieldOf(status);
}

TEST(CheckTensor, TakesEveryRankUpToEight) {
  EXPECT_EQ(CheckTensor(RawTensor(v1::FP32, {}, 4), kAll, "t")->elements, 1);
  EXPECT_EQ(CheckTensor(RawTensor(v1::FP16, {1, 1, 2, 1, 1, 3, 1, 1}, 12), kAll, "t")->bytes, 12);
}

TEST(CheckTensor, RefusesRankNine) {
  EXPECT_EQ(FieldThatFails(RawTensor(v1::INT8, {1, 1, 1, 1, 1, 1, 1, 1, 1}, 1)), "t.shape");
}

TEST(CheckTensor, TakesZeroDimensions) {
  EXPECT_EQ(CheckTensor(RawTensor(v1::FP16, {0, 4096}, 0), kAll, "t")->elements, 0);
  v1::Tensor no_contents = RawTensor(v1::FP16, {4096, 0}, 0);
  no_contents.clear_contents();
  EXPECT_TRUE(CheckTensor(no_contents, kAll, "t").ok());
}

TEST(CheckTensor, RefusesShapesThatOverflow) {
  const int64_t big = int64_t{1} << 32;
  EXPECT_EQ(FieldThatFails(RawTensor(v1::INT8, {big, big}, 0)), "t.shape");
  EXPECT_EQ(FieldThatFails(RawTensor(v1::FP16, {int64_t{1} << 62}, 0)), "t.shape");
  EXPECT_EQ(FieldThatFails(RawTensor(v1::FP32, {INT64_MAX}, 0)), "t.shape");
  EXPECT_EQ(FieldThatFails(RawTensor(v1::INT8, {big, big, 0}, 0)), "t.shape");
  EXPECT_EQ(FieldThatFails(RawTensor(v1::INT8, {0, big, big}, 0)), "t.shape");
}

TEST(CheckTensor, RefusesNegativeDimensions) {
  EXPECT_EQ(FieldThatFails(RawTensor(v1::INT8, {-1}, 0)), "t.shape");
  EXPECT_EQ(FieldThatFails(RawTensor(v1::INT8, {-2, -2}, 4)), "t.shape");
  EXPECT_EQ(FieldThatFails(RawTensor(v1::INT8, {INT64_MIN}, 0)), "t.shape");
  EXPECT_EQ(FieldThatFails(RawTensor(v1::INT8, {0, -1}, 0)), "t.shape");
}

TEST(CheckTensor, RawHasExactlyTheBytesOfTheShape) {
  for (int64_t off : {-2, -1, 1, 2}) {
    EXPECT_EQ(FieldThatFails(RawTensor(v1::FP16, {2, 3}, 12 + off)), "t.raw") << off;
  }
  EXPECT_TRUE(CheckTensor(RawTensor(v1::FP16, {2, 3}, 12), kAll, "t").ok());
}

TEST(CheckTensor, RefusesDTypes) {
  EXPECT_EQ(FieldThatFails(RawTensor(v1::DTYPE_UNSPECIFIED, {1}, 1)), "t.dtype");
  EXPECT_EQ(FieldThatFails(RawTensor(static_cast<v1::DType>(77), {1}, 1)), "t.dtype");
  EXPECT_EQ(FieldThatFails(RawTensor(v1::INT8, {1}, 1), kFloatingMask), "t.dtype");
}

TEST(CheckTensor, RefusesMissingAndMismatchedContents) {
  v1::Tensor tensor = RawTensor(v1::FP16, {2}, 4);
  tensor.clear_contents();
  EXPECT_EQ(FieldThatFails(tensor), "t");
  tensor.mutable_ints()->add_values(1);
  EXPECT_EQ(FieldThatFails(tensor), "t.ints");
  tensor.mutable_floats()->add_values(1);
  EXPECT_EQ(FieldThatFails(tensor), "t.floats");  // one value for a shape of two
  tensor.set_dtype(v1::INT32);
  EXPECT_EQ(FieldThatFails(tensor), "t.floats");
  tensor.mutable_ints()->add_values(1);
  EXPECT_EQ(FieldThatFails(tensor), "t.ints");
}

absl::StatusOr<std::string> Typed(v1::DType dtype, std::initializer_list<float> values) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  tensor.add_shape(static_cast<int64_t>(values.size()));
  for (float value : values) tensor.mutable_floats()->add_values(value);
  absl::StatusOr<TensorInfo> info = CheckTensor(tensor, kAll, "t");
  if (!info.ok()) return info.status();
  return TakeBytes(&tensor, *info, "t");
}

TEST(TakeBytes, RoundsFloatsToNearestEven) {
  // 2049 lies between 2048 and 2050 in FP16; 2051 between 2050 and 2052.
  EXPECT_THAT(FloatsFromBytes(*Typed(v1::FP16, {2049, 2051, -1.5f}), DType::kFp16),
              ElementsAre(2048, 2052, -1.5f));
  EXPECT_THAT(FloatsFromBytes(*Typed(v1::BF16, {257, 259}), DType::kBf16), ElementsAre(256, 260));
  EXPECT_THAT(FloatsFromBytes(*Typed(v1::FP32, {0.1f}), DType::kFp32), ElementsAre(0.1f));
}

TEST(TakeBytes, PassesNaNAndInfinity) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> got = FloatsFromBytes(*Typed(v1::FP16, {NAN, inf, -inf}), DType::kFp16);
  EXPECT_TRUE(std::isnan(got[0]));
  EXPECT_EQ(got[1], inf);
  EXPECT_EQ(got[2], -inf);
}

TEST(TakeBytes, RefusesFiniteValuesThatWouldBecomeInfinite) {
  EXPECT_TRUE(Typed(v1::FP16, {65504, 65519}).ok());
  const absl::Status status = Typed(v1::FP16, {0, 65520}).status();
  EXPECT_EQ(FieldOf(status), "t.floats.values[1]");
  EXPECT_EQ(FieldOf(Typed(v1::BF16, {std::numeric_limits<float>::max()}).status()),
            "t.floats.values[0]");
}

std::string IntFieldThatFails(v1::DType dtype, int64_t value) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  tensor.mutable_ints()->add_values(value);
  const TensorInfo info = *CheckTensor(tensor, kAll, "t");  // rank 0
  absl::StatusOr<std::string> bytes = TakeBytes(&tensor, info, "t");
  if (bytes.ok()) {
    EXPECT_EQ(static_cast<int64_t>(bytes->size()), info.bytes);
    return "";
  }
  return FieldOf(bytes.status());
}

TEST(TakeBytes, ChecksTheRangeOfInts) {
  EXPECT_EQ(IntFieldThatFails(v1::INT8, -128), "");
  EXPECT_EQ(IntFieldThatFails(v1::INT8, 127), "");
  EXPECT_EQ(IntFieldThatFails(v1::INT8, 128), "t.ints.values[0]");
  EXPECT_EQ(IntFieldThatFails(v1::INT8, -129), "t.ints.values[0]");
  EXPECT_EQ(IntFieldThatFails(v1::UINT8, 255), "");
  EXPECT_EQ(IntFieldThatFails(v1::UINT8, -1), "t.ints.values[0]");
  EXPECT_EQ(IntFieldThatFails(v1::UINT8, 256), "t.ints.values[0]");
  EXPECT_EQ(IntFieldThatFails(v1::INT32, INT32_MIN), "");
  EXPECT_EQ(IntFieldThatFails(v1::INT32, int64_t{INT32_MAX} + 1), "t.ints.values[0]");
}

TEST(FillTensor, WritesValuesButNotRawContents) {
  v1::Tensor raw;
  FillTensor(std::string("\0\x3c", 2), DType::kFp16, {1}, v1::RAW, &raw);
  EXPECT_EQ(raw.contents_case(), v1::Tensor::CONTENTS_NOT_SET);
  EXPECT_THAT(raw.shape(), ElementsAre(1));
  EXPECT_EQ(raw.dtype(), v1::FP16);
  v1::Tensor values;
  FillTensor(std::string("\0\x3c", 2), DType::kFp16, {1}, v1::VALUES, &values);
  EXPECT_THAT(values.floats().values(), ElementsAre(1.0f));
}

TEST(FillTensor, BytesHaveTheSignOfTheirType) {
  v1::Tensor with_sign, without;
  FillTensor("\x80\xff\x7f", DType::kInt8, {3}, v1::VALUES, &with_sign);
  EXPECT_THAT(with_sign.ints().values(), ElementsAre(-128, -1, 127));
  FillTensor("\x80\xff\x7f", DType::kUint8, {3}, v1::VALUES, &without);
  EXPECT_THAT(without.ints().values(), ElementsAre(128, 255, 127));
}

}  // namespace
}  // namespace awqd::wire
