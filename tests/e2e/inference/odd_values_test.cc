// Inline weights and activations with unusual values, through the real server.
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "kernels/base/half.h"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

using client::Tensor;
using ::testing::HasSubstr;

constexpr int64_t kK = 64, kN = 24, kGroup = 32;

uint16_t Bits(const std::string& bytes, int64_t index) {
  uint16_t bits;
  std::memcpy(&bits, bytes.data() + 2 * index, 2);
  return bits;
}
bool IsNan(uint16_t half) { return (half & 0x7fff) > 0x7c00; }

class OddValuesTest : public SharedServerTest {
 protected:
  // Dequantize gives the bits of the definition, with any NaN.
  void ExpectExact(const SyntheticAwq& weight) {
    const auto w = client_->Dequantize({.weight = weight.ToPacked()});
    ASSERT_TRUE(w.ok()) << w.status();
    ASSERT_THAT(w->output.shape, ::testing::ElementsAre(kK, kN));
    for (int64_t i = 0; i < kK * kN; ++i) {
      const uint16_t got = Bits(w->output.bytes, i), want = weight.At(i / kN, i % kN);
      if (IsNan(want)) {
        ASSERT_TRUE(IsNan(got)) << i / kN << ", " << i % kN;
      } else {
        ASSERT_EQ(got, want) << i / kN << ", " << i % kN;
      }
    }
  }

  // Columns of ones times the weight: exact where the sum is finite, and not finite elsewhere.
  void ExpectProduct(const SyntheticAwq& weight, v1::Path path) {
    const auto y = client_->QuantizedMatmul(
        {.weight = weight.ToPacked(),
         .activations = *Tensor::FromFloats(v1::FP32, {1, kK}, std::vector<float>(kK, 1.0f)),
         .path = path});
    ASSERT_TRUE(y.ok()) << y.status();
    const std::vector<float> got = *y->output.ToFloats();
    for (int64_t column = 0; column < kN; ++column) {
      double want = 0, size = 0;
      for (int64_t row = 0; row < kK; ++row) {
        const double w = HalfToFloat(weight.At(row, column));
        want += w;
        size += std::abs(w);
      }
      if (std::isfinite(want)) {
        EXPECT_NEAR(got[column], want, 1e-3 * size) << "column " << column;
      } else {
        EXPECT_FALSE(std::isfinite(got[column])) << "column " << column;
      }
    }
  }

  grpc::Status Matmul(const v1::QuantizedMatmulRequest& request,
                      v1::QuantizedMatmulResponse* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    return stub_->QuantizedMatmul(&context, request, response);
  }

  // One token of ones, as `floats`.
  static v1::QuantizedMatmulRequest Typed() {
    v1::QuantizedMatmulRequest request;
    *request.mutable_packed() = SyntheticAwq::Random(kK, kN, kGroup, 4).ToPacked();
    v1::Tensor* x = request.mutable_activations();
    x->set_dtype(v1::FP16);
    x->add_shape(1);
    x->add_shape(kK);
    for (int64_t i = 0; i < kK; ++i) x->mutable_floats()->add_values(1);
    return request;
  }

  const std::unique_ptr<v1::QuantizedInference::Stub> stub_ =
      v1::QuantizedInference::NewStub(server_->NewChannel());
};

TEST_F(OddValuesTest, ScalesThatAreNoOrdinaryNumbers) {
  SyntheticAwq weight = SyntheticAwq::Random(kK, kN, kGroup, 3);
  // Each value has a column of its own, in both groups: infinities, denormals, zeros. The other
  // columns stay ordinary and must not change.
  const uint16_t odd[] = {0x7c00, 0xfc00, 0x0001, 0x83ff, 0x0000, 0x8000};
  for (int64_t i = 0; i < 6; ++i) weight.scales[i] = weight.scales[kN + i] = odd[i];
  ExpectExact(weight);
  for (const v1::Path path : {v1::FUSED, v1::DEQUANTIZE}) {
    SCOPED_TRACE(v1::Path_Name(path));
    ExpectProduct(weight, path);
  }
  weight.scales[9] = 0x7bff;  // 65504: its multiples round to infinity
  ExpectExact(weight);
}

TEST_F(OddValuesTest, ScalesThatAreNoNumbersAreRefused) {
  for (const uint16_t nan : {0x7e00, 0x7d01, 0xfe00}) {
    SyntheticAwq weight = SyntheticAwq::Random(kK, kN, kGroup, 3);
    weight.scales[kN + 5] = nan;
    const absl::Status status = client_->Dequantize({.weight = weight.ToPacked()}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("packed.scales: got NaN at element 29, expected numbers"));
  }
}

TEST_F(OddValuesTest, EveryCornerOfCodesAndZeroPoints) {
  for (const uint32_t codes : {0u, 0xffffffffu}) {
    for (const uint32_t zeros : {0u, 0xffffffffu}) {
      SCOPED_TRACE(absl::StrCat("codes ", codes & 15, ", zero points ", zeros & 15));
      SyntheticAwq weight = SyntheticAwq::Random(kK, kN, kGroup, 5);
      std::fill(weight.qweight.begin(), weight.qweight.end(), codes);
      std::fill(weight.qzeros.begin(), weight.qzeros.end(), zeros);
      ExpectExact(weight);
      ExpectProduct(weight, v1::FUSED);
      ExpectProduct(weight, v1::DEQUANTIZE);
    }
  }
}

TEST_F(OddValuesTest, HalvesAsTypedFloats) {
  v1::QuantizedMatmulRequest request = Typed();
  v1::QuantizedMatmulResponse typed, raw;
  grpc::Status status = Matmul(request, &typed);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(typed.output().floats().values_size(), kN) << "answers are spelled as requests are";
  std::string ones;
  for (int64_t i = 0; i < kK; ++i) ones += std::string("\x00\x3c", 2);
  request.mutable_activations()->set_raw(ones);
  status = Matmul(request, &raw);
  ASSERT_TRUE(status.ok()) << status.error_message();
  for (int64_t i = 0; i < kN; ++i) {
    EXPECT_EQ(HalfToFloat(Bits(raw.output().raw(), i)), typed.output().floats().values(i));
  }
}

TEST_F(OddValuesTest, ContentsThatDoNotFitNameTheField) {
  const auto expect = [&](const char* text, auto change) {
    v1::QuantizedMatmulRequest request = Typed();
    change(request.mutable_activations());
    v1::QuantizedMatmulResponse response;
    const grpc::Status status = Matmul(request, &response);
    EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT) << text;
    EXPECT_THAT(status.error_message(), HasSubstr(text));
  };
  expect("activations.floats", [](v1::Tensor* x) { x->mutable_floats()->add_values(1); });
  expect("activations.floats", [](v1::Tensor* x) { x->mutable_floats()->clear_values(); });
  expect("activations.floats.values[7]",
         [](v1::Tensor* x) { x->mutable_floats()->set_values(7, 65520); });
  expect("activations.ints", [](v1::Tensor* x) { x->mutable_ints()->add_values(1); });
  expect("activations", [](v1::Tensor* x) { x->clear_contents(); });
  expect("activations.raw", [](v1::Tensor* x) { x->set_raw(std::string(2 * kK - 1, '\0')); });
  expect("activations.raw", [](v1::Tensor* x) { x->set_raw(std::string(2 * kK + 2, '\0')); });
}

TEST_F(OddValuesTest, NanInfinityAndNoTokensAtAll) {
  v1::QuantizedMatmulRequest request = Typed();
  v1::QuantizedMatmulResponse response;
  for (const float odd : {NAN, INFINITY, -INFINITY}) {
    request.mutable_activations()->mutable_floats()->set_values(kK / 2, odd);
    const grpc::Status status = Matmul(request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    int finite = 0;
    for (const float y : response.output().floats().values()) finite += std::isfinite(y) ? 1 : 0;
    EXPECT_LT(finite, std::isnan(odd) ? 1 : kN / 2) << "only a zero weight keeps an infinity out";
  }
  v1::Tensor* x = request.mutable_activations();
  x->set_shape(0, 0);
  x->clear_contents();
  const grpc::Status status = Matmul(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.output().shape(), ::testing::ElementsAre(0, kN));
  EXPECT_EQ(response.output().raw(), "");
}

}  // namespace
}  // namespace awqd
