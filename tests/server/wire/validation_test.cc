// Every branch of validation: a good request spoilt in one field names that field.
#include "server/wire/validation.h"

#include <cmath>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/wire/status.h"
#include "server/wire/tensor.h"
#include "tests/server/requests.h"
#include "tests/testing/repeated.h"

namespace awqd::wire {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kLimit = 1 << 20;
const WeightShape kShape = {.k = 128, .n = 16, .scheme = Asymmetric(4, 128)};

std::string Spoilt(const std::function<void(v1::QuantizedMatmulRequest*)>& spoil) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  spoil(&request);
  absl::Status status = CheckRequest(request);
  if (status.ok()) status = BuildMatmul(&request, kShape, kLimit).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return FieldOf(status);
}

TEST(Matmul, TakesE4m3WithScalesOfTokensOrBlocks) {
  using enum ActivationQuantization;
  const WeightShape wide = {.k = 200, .n = 16, .scheme = Asymmetric(4, 100)};
  for (const auto& [shape, how] : {std::pair(std::vector<int64_t>{2}, kFloat8Static),
                                   {{2, 2}, kFloat8PerBlock},
                                   {{1}, kFloat8Static}}) {
    v1::QuantizedMatmulRequest request = GoodMatmul();
    *request.mutable_activations() = RawTensor(v1::FP8_E4M3, {2, 200}, 400);
    v1::Tensor* const scales = request.mutable_activation_scales();
    scales->set_dtype(v1::FP32);
    scales->mutable_shape()->Add(shape.begin(), shape.end());
    const int count = static_cast<int>(shape.size() == 2 ? 4 : shape[0]);
    scales->mutable_floats()->mutable_values()->Resize(count, 0.5f);
    ASSERT_TRUE(CheckRequest(request).ok());
    const auto job = BuildMatmul(&request, wide, kLimit);
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_EQ(job->work.quantization, how);
    EXPECT_EQ(job->work.scales.size(), static_cast<size_t>(count));
    EXPECT_EQ(job->work.x_dtype, DType::kE4m3);
    EXPECT_EQ(job->work.out_dtype, DType::kFp16);
  }
}

TEST(Matmul, NamesTheBadField) {
  using R = v1::QuantizedMatmulRequest;
  EXPECT_EQ(Spoilt([](R* r) { r->Clear(); }), "weight");
  EXPECT_EQ(Spoilt([](R* r) { r->set_request_id(std::string(257, 'x')); }), "request_id");
  EXPECT_EQ(Spoilt([](R* r) { r->mutable_weight()->clear_model(); }), "weight.model");
  EXPECT_EQ(Spoilt([](R* r) { r->mutable_weight()->set_model("../etc"); }), "weight.model");
  EXPECT_EQ(Spoilt([](R* r) { r->mutable_weight()->clear_weight(); }), "weight.weight");
  EXPECT_EQ(Spoilt([](R* r) { r->mutable_weight()->set_weight(std::string(1025, 'w')); }),
            "weight.weight");
  EXPECT_EQ(Spoilt([](R* r) { r->clear_activations(); }), "activations");
  EXPECT_EQ(Spoilt([](R* r) { r->mutable_activations()->set_dtype(v1::UINT8); }),
            "activations.dtype");
  EXPECT_EQ(Spoilt([](R* r) {
              *r->mutable_activations() = RawTensor(v1::INT8, {2, 128}, 256);
            }),
            "activations.dtype")
      << "the weight has scales";
  EXPECT_EQ(Spoilt([](R* r) {
              *r->mutable_activations() = RawTensor(v1::FP8_E4M3, {2, 128}, 256);
            }),
            "activation_scales");
  EXPECT_EQ(Spoilt([](R* r) {
              *r->mutable_activations() = RawTensor(v1::FP8_E4M3, {2, 128}, 256);
              r->set_activation_quantization(v1::FP8_PER_TOKEN);
            }),
            "activation_quantization");
  EXPECT_EQ(Spoilt([](R* r) {
              r->mutable_activations()->set_dtype(v1::FP8_E4M3);
              r->mutable_activations()->mutable_ints()->mutable_values()->Resize(256, 1);
            }),
            "activations.ints");
  EXPECT_EQ(Spoilt([](R* r) { *r->mutable_activations() = RawTensor(v1::FP16, {}, 2); }),
            "activations.shape");
  EXPECT_EQ(Spoilt([](R* r) {
              *r->mutable_activations() = RawTensor(v1::FP16, {2, 64}, 256);
            }),
            "activations.shape");
  EXPECT_EQ(Spoilt([](R* r) {
              *r->mutable_activations() = RawTensor(v1::FP16, {128, 2}, 512);
            }),
            "activations.shape");
  EXPECT_EQ(Spoilt([](R* r) { r->mutable_activations()->mutable_raw()->push_back('x'); }),
            "activations.raw");
  EXPECT_EQ(Spoilt([](R* r) { r->set_output_dtype(v1::INT32); }), "output_dtype");
  EXPECT_EQ(Spoilt([](R* r) { r->set_path(static_cast<v1::Path>(9)); }), "path");
  EXPECT_EQ(
      Spoilt([](R* r) { r->set_activation_function(static_cast<v1::ActivationFunction>(99)); }),
      "activation_function");
  EXPECT_EQ(Spoilt([](R* r) { r->set_activation_function(v1::SWIGLU_OAI); }),
            "activation_function");
  EXPECT_EQ(Spoilt([](R* r) { r->set_activation_function(v1::SITU); }), "activation_function");
  EXPECT_EQ(Spoilt([](R* r) { r->set_output_encoding(static_cast<v1::Encoding>(9)); }),
            "output_encoding");
  EXPECT_EQ(Spoilt([](R* r) { *r->mutable_bias() = RawTensor(v1::FP32, {15}, 60); }), "bias.shape");
  EXPECT_EQ(Spoilt([](R* r) {
              *r->mutable_bias() = RawTensor(v1::FP32, {1, 16}, 64);
            }),
            "bias.shape");
  EXPECT_EQ(Spoilt([](R* r) { *r->mutable_bias() = RawTensor(v1::UINT8, {16}, 16); }),
            "bias.dtype");
}

// A weight of integers: INT8 activations give INT32, and other types are refused.
TEST(Matmul, OfIntegers) {
  WeightShape shape = kShape;
  shape.scheme.scale_dtype.reset();
  const auto build = [&](const std::function<void(v1::QuantizedMatmulRequest*)>& change) {
    v1::QuantizedMatmulRequest request = GoodMatmul();
    *request.mutable_activations() = RawTensor(v1::INT8, {2, 128}, 256);
    change(&request);
    const absl::Status status = CheckRequest(request);
    return status.ok() ? BuildMatmul(&request, shape, kLimit) : status;
  };
  using R = v1::QuantizedMatmulRequest;
  for (const v1::DType dtype : {v1::DTYPE_UNSPECIFIED, v1::INT32}) {
    const auto job = build([&](R* r) { r->set_output_dtype(dtype); });
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_EQ(job->work.x_dtype, DType::kInt8);
    EXPECT_EQ(job->work.out_dtype, DType::kInt32);
    EXPECT_EQ(job->answer.bytes, 2 * 16 * 4);
  }
  const auto typed = build([](R* r) {
    v1::Tensor* x = r->mutable_activations();
    for (int i = 0; i < 256; ++i) x->mutable_ints()->add_values(i - 128);
  });
  ASSERT_TRUE(typed.ok()) << typed.status();
  EXPECT_EQ(typed->answer.encoding, v1::VALUES);
  EXPECT_EQ(typed->answer.bytes, 2 * 16 * kMostEncodedBytes);
  const auto refused = [&](const std::function<void(R*)>& spoil) {
    return FieldOf(build(spoil).status());
  };
  EXPECT_EQ(refused([](R* r) { r->set_output_dtype(v1::FP32); }), "output_dtype");
  EXPECT_EQ(refused([](R* r) { r->set_activation_function(v1::GELU); }), "activation_function");
  EXPECT_EQ(refused([](R* r) { *r->mutable_bias() = RawTensor(v1::FP32, {16}, 64); }), "bias");
  EXPECT_EQ(refused([](R* r) {
              *r->mutable_activations() = RawTensor(v1::FP16, {2, 128}, 512);
              r->set_output_dtype(v1::INT32);
            }),
            "output_dtype");
}

v1::Tensor Scales(std::vector<int64_t> shape, const std::vector<float>& values) {
  v1::Tensor out;
  out.set_dtype(v1::FP32);
  for (const int64_t dim : shape) out.add_shape(dim);
  for (const float value : values) out.mutable_floats()->add_values(value);
  return out;
}

// A weight with scales: floating results.
TEST(Matmul, OfQuantisedActivations) {
  using R = v1::QuantizedMatmulRequest;
  const auto build = [](const std::function<void(R*)>& change) -> absl::StatusOr<MatmulJob> {
    R request = GoodMatmul();
    change(&request);
    const absl::Status status = CheckRequest(request);
    return status.ok() ? BuildMatmul(&request, kShape, kLimit) : status;
  };
  auto job = build([](R* r) { r->set_activation_quantization(v1::INT8_PER_TOKEN); });
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->work.quantization, ActivationQuantization::kPerToken);
  EXPECT_EQ(job->work.out_dtype, job->work.x_dtype);
  EXPECT_TRUE(job->work.scales.empty());
  job = build([](R* r) {
    r->set_activation_quantization(v1::INT8_STATIC);
    *r->mutable_activation_scales() = Scales({1, 1}, {0.5f});
  });
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->work.quantization, ActivationQuantization::kStatic);
  EXPECT_THAT(job->work.scales, ElementsAre(0.5f));
  const auto int8 = [&](v1::Tensor scales, v1::DType out = v1::DTYPE_UNSPECIFIED) {
    return build([&](R* r) {
      *r->mutable_activations() = RawTensor(v1::INT8, {2, 1, 128}, 256);
      *r->mutable_activation_scales() = scales;
      r->set_output_dtype(out);
    });
  };
  job = int8(Scales({2, 1}, {1, 2}));
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->work.quantization, ActivationQuantization::kNone);
  EXPECT_THAT(job->work.scales, ElementsAre(1, 2));
  EXPECT_EQ(job->work.out_dtype, DType::kFp16);
  EXPECT_EQ(int8(Scales({}, {3}), v1::FP32)->work.out_dtype, DType::kFp32);
  EXPECT_EQ(FieldOf(int8(Scales({2}, {1, 2})).status()), "activation_scales.shape");
  EXPECT_EQ(FieldOf(int8(Scales({1}, {0})).status()), "activation_scales");
  EXPECT_EQ(FieldOf(int8(Scales({1}, {HUGE_VALF})).status()), "activation_scales");
  EXPECT_EQ(FieldOf(int8(RawTensor(v1::FP16, {1}, 2)).status()), "activation_scales.dtype");
  EXPECT_EQ(FieldOf(int8(Scales({1}, {1}), v1::INT32).status()), "output_dtype");
}

// Quantised as the weight's checkpoint declares.
TEST(Matmul, OfActivationsQuantisedAsDeclared) {
  const auto build = [](const DeclaredActivations& declared) {
    v1::QuantizedMatmulRequest request = GoodMatmul();
    request.set_activation_quantization(v1::INT8_AS_DECLARED);
    const absl::Status status = CheckRequest(request);
    return status.ok() ? BuildMatmul(&request, kShape, kLimit, std::nullopt, declared) : status;
  };
  auto job = build({.how = ActivationQuantization::kPerToken});
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->work.quantization, ActivationQuantization::kPerToken);
  EXPECT_TRUE(job->work.scales.empty());
  job = build({.how = ActivationQuantization::kStatic, .scale = 0.25f});
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->work.quantization, ActivationQuantization::kStatic);
  EXPECT_THAT(job->work.scales, ElementsAre(0.25f));
  EXPECT_EQ(FieldOf(build({}).status()), "activation_quantization");
  EXPECT_THAT(build({.how = ActivationQuantization::kFloat8PerToken}).status().message(),
              HasSubstr("got INT8_AS_DECLARED, expected another: the weight's checkpoint declares "
                        "FP8"));
}

// Rounded to E4M3: of weights whose codes are no integers too.
TEST(Matmul, OfActivationsRoundedToFp8) {
  const WeightShape float8 = {128, 64, ParseScheme("e4m3c+fp32").value()};
  const auto build = [&](v1::ActivationQuantization how, const DeclaredActivations& declared = {},
                         bool scales = false) -> absl::StatusOr<MatmulJob> {
    v1::QuantizedMatmulRequest request = GoodMatmul();
    request.set_activation_quantization(how);
    if (scales) *request.mutable_activation_scales() = Scales({1}, {0.5f});
    const absl::Status status = CheckRequest(request);
    return status.ok() ? BuildMatmul(&request, float8, kLimit, std::nullopt, declared) : status;
  };
  auto job = build(v1::FP8_PER_TOKEN);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->work.quantization, ActivationQuantization::kFloat8PerToken);
  job = build(v1::FP8_STATIC, {}, true);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->work.quantization, ActivationQuantization::kFloat8Static);
  EXPECT_THAT(job->work.scales, ElementsAre(0.5f));
  job = build(v1::FP8_AS_DECLARED, {.how = ActivationQuantization::kFloat8PerBlock});
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->work.quantization, ActivationQuantization::kFloat8PerBlock);
  job = build(v1::FP8_AS_DECLARED, {ActivationQuantization::kFloat8Static, 0.25f});
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_THAT(job->work.scales, ElementsAre(0.25f));
  EXPECT_EQ(FieldOf(build(v1::FP8_STATIC).status()), "activation_scales");
  EXPECT_EQ(FieldOf(build(v1::FP8_PER_BLOCK_128, {}, true).status()), "activation_scales");
  EXPECT_THAT(build(v1::FP8_AS_DECLARED).status().message(), HasSubstr("declares none"));
  EXPECT_THAT(
      build(v1::FP8_AS_DECLARED, {.how = ActivationQuantization::kPerToken}).status().message(),
      HasSubstr("declares INT8"));
}

TEST(Matmul, RefusesQuantisationWhereItMeansNothing) {
  using R = v1::QuantizedMatmulRequest;
  EXPECT_EQ(Spoilt([](R* r) {
              r->set_activation_quantization(static_cast<v1::ActivationQuantization>(9));
            }),
            "activation_quantization");
  EXPECT_EQ(Spoilt([](R* r) { *r->mutable_activation_scales() = Scales({1}, {1}); }),
            "activation_scales");
  EXPECT_EQ(Spoilt([](R* r) {
              r->set_activation_quantization(v1::INT8_PER_TOKEN);
              *r->mutable_activation_scales() = Scales({1}, {1});
            }),
            "activation_scales");
  EXPECT_EQ(Spoilt([](R* r) { r->set_activation_quantization(v1::INT8_STATIC); }),
            "activation_scales");
  EXPECT_EQ(Spoilt([](R* r) {
              r->set_activation_quantization(v1::INT8_AS_DECLARED);
              *r->mutable_activation_scales() = Scales({1}, {1});
            }),
            "activation_scales");
  EXPECT_EQ(Spoilt([](R* r) {
              r->set_activation_quantization(v1::INT8_STATIC);
              *r->mutable_activation_scales() = Scales({2}, {1, 1});
            }),
            "activation_scales.shape");
  EXPECT_EQ(Spoilt([](R* r) {
              *r->mutable_activations() = RawTensor(v1::INT8, {2, 128}, 256);
              r->set_activation_quantization(v1::INT8_PER_TOKEN);
            }),
            "activation_quantization");
  WeightShape floats = kShape;
  floats.scheme = ParseScheme("e2m1g32").value();
  R request = GoodMatmul();
  request.set_activation_quantization(v1::INT8_PER_TOKEN);
  const absl::Status status = BuildMatmul(&request, floats, kLimit).status();
  EXPECT_EQ(FieldOf(status), "activation_quantization");
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("got INT8_PER_TOKEN, expected ACTIVATIONS_AS_SENT, because codes are no "
                        "integers: e2m1g32"));
}

TEST(Matmul, TakesAnIdOfExactlyTheLimit) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  request.set_request_id(std::string(kMaxRequestIdBytes, 'x'));
  EXPECT_TRUE(CheckRequest(request).ok());
}

TEST(Matmul, AllLeadingDimensionsAreTokens) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  *request.mutable_activations() = RawTensor(v1::BF16, {2, 3, 128}, 2 * 3 * 128 * 2);
  const MatmulJob job = *BuildMatmul(&request, kShape, kLimit);
  EXPECT_EQ(job.work.rows, 6);
  EXPECT_THAT(job.answer.shape, ElementsAre(2, 3, 16));
  EXPECT_EQ(job.work.out_dtype, DType::kBf16);
  EXPECT_FALSE(job.work.path.has_value());
  EXPECT_EQ(static_cast<int64_t>(job.inputs[0].bytes.size()), 6 * 128 * 2);
}

TEST(Matmul, RankOneIsOneToken) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  *request.mutable_activations() = RawTensor(v1::FP16, {128}, 256);
  const MatmulJob job = *BuildMatmul(&request, kShape, kLimit);
  EXPECT_EQ(job.work.rows, 1);
  EXPECT_THAT(job.answer.shape, ElementsAre(16));
}

TEST(Matmul, ZeroTokensAreLegal) {
  v1::QuantizedMatmulRequest request = GoodMatmul(0);
  EXPECT_TRUE(CheckRequest(request).ok());
  EXPECT_EQ(BuildMatmul(&request, kShape, kLimit)->work.rows, 0);
}

TEST(Matmul, TakesBiasDTypePathAndEncoding) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  v1::Tensor* bias = request.mutable_bias();
  bias->set_dtype(v1::FP16);
  bias->add_shape(16);
  for (int i = 0; i < 16; ++i) bias->mutable_floats()->add_values(static_cast<float>(i));
  request.set_output_dtype(v1::FP32);
  request.set_path(v1::DEQUANTIZE);
  request.set_output_encoding(v1::VALUES);
  const MatmulJob job = *BuildMatmul(&request, kShape, kLimit);
  EXPECT_EQ(job.work.bias[15], 15.0f);
  EXPECT_EQ(job.work.out_dtype, DType::kFp32);
  EXPECT_EQ(job.work.path, Path::kDequantize);
  EXPECT_EQ(job.work.activation, ActivationFunction::kNone);
  EXPECT_EQ(job.answer.encoding, v1::VALUES);
  request = GoodMatmul();
  request.set_path(v1::FUSED);
  EXPECT_EQ(BuildMatmul(&request, kShape, kLimit)->work.path, Path::kFused);
  request = GoodMatmul();
  for (const auto& [asked, built] : {std::pair{v1::RELU, ActivationFunction::kRelu},
                                     {v1::GELU, ActivationFunction::kGelu},
                                     {v1::SILU, ActivationFunction::kSilu},
                                     {v1::GELU_TANH, ActivationFunction::kGeluTanh},
                                     {v1::NONE, ActivationFunction::kNone}}) {
    request.set_activation_function(asked);
    v1::QuantizedMatmulRequest copy = request;
    EXPECT_EQ(BuildMatmul(&copy, kShape, kLimit)->work.activation, built);
  }
}

TEST(Matmul, AnswersInTheSpellingOfTheRequest) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  v1::Tensor* x = request.mutable_activations();
  Repeat(256, 0.0f, x->mutable_floats()->mutable_values());
  EXPECT_EQ(BuildMatmul(&request, kShape, kLimit)->answer.encoding, v1::VALUES);
}

TEST(Matmul, RefusesAnswersBeyondTheMessageLimit) {
  // 2 tokens x 16 columns x 2 bytes, besides the overhead.
  v1::QuantizedMatmulRequest request = GoodMatmul();
  EXPECT_TRUE(BuildMatmul(&request, kShape, kResponseOverheadBytes + 64).ok());
  request = GoodMatmul();
  const absl::Status status = BuildMatmul(&request, kShape, kResponseOverheadBytes + 63).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("fewer tokens"));
  request = GoodMatmul();
  request.set_output_encoding(v1::VALUES);  // 4 bytes each
  EXPECT_FALSE(BuildMatmul(&request, kShape, kResponseOverheadBytes + 127).ok());
}

std::string SpoiltRange(int64_t begin, int64_t end, bool columns) {
  v1::DequantizeRequest request = GoodDequantize();
  v1::Range* range = columns ? request.mutable_columns() : request.mutable_rows();
  range->set_begin(begin);
  range->set_end(end);
  return FieldOf(BuildDequantize(request, kShape).status());
}

TEST(Dequantize, ChecksRanges) {
  EXPECT_EQ(SpoiltRange(0, 129, false), "rows");
  EXPECT_EQ(SpoiltRange(5, 4, false), "rows");
  EXPECT_EQ(SpoiltRange(-1, 0, false), "rows");
  EXPECT_EQ(SpoiltRange(-1, 4, false), "rows");
  EXPECT_EQ(SpoiltRange(129, 0, false), "rows");
  EXPECT_EQ(SpoiltRange(0, -1, false), "rows");
  EXPECT_EQ(SpoiltRange(INT64_MAX, INT64_MIN, false), "rows");
  EXPECT_EQ(SpoiltRange(0, 17, true), "columns");
  EXPECT_EQ(SpoiltRange(128, 0, false), "");
  EXPECT_EQ(SpoiltRange(7, 7, false), "");
}

TEST(Dequantize, ResolvesRanges) {
  v1::DequantizeRequest request = GoodDequantize();
  request.mutable_rows()->set_begin(3);
  request.mutable_columns()->set_begin(1);
  request.mutable_columns()->set_end(4);
  request.set_output_dtype(v1::FP32);
  const DequantizeJob job = *BuildDequantize(request, kShape);
  EXPECT_EQ(job.work.row_begin, 3);
  EXPECT_EQ(job.work.rows, 125);
  EXPECT_EQ(job.work.col_begin, 1);
  EXPECT_EQ(job.work.cols, 3);
  EXPECT_EQ(job.work.out_dtype, DType::kFp32);
}

TEST(Dequantize, NamesTheBadField) {
  v1::DequantizeRequest request;
  EXPECT_EQ(FieldOf(CheckRequest(request)), "weight");
  request = GoodDequantize();
  request.set_output_dtype(v1::UINT8);
  EXPECT_EQ(FieldOf(CheckRequest(request)), "output_dtype");
  request = GoodDequantize();
  request.set_request_id(std::string(300, 'x'));
  EXPECT_EQ(FieldOf(CheckRequest(request)), "request_id");
  request = GoodDequantize();
  request.set_output_encoding(static_cast<v1::Encoding>(5));
  EXPECT_EQ(FieldOf(CheckRequest(request)), "output_encoding");
}

TEST(Dequantize, HintsAtTheStream) {
  const DequantizeJob job = *BuildDequantize(GoodDequantize(), kShape);
  EXPECT_TRUE(CheckFits(GoodDequantize(), job, 128 * 16 * 2 + kResponseOverheadBytes).ok());
  const absl::Status status =
      CheckFits(GoodDequantize(), job, 128 * 16 * 2 + kResponseOverheadBytes - 1);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("DequantizeStream"));
}

TEST(Dequantize, ChunksHoldAtLeastOneRowAndFitAMessage) {
  const DequantizeJob job = *BuildDequantize(GoodDequantize(), kShape);  // rows of 32 bytes
  EXPECT_EQ(*RowsPerChunk(job, 320, kLimit), 10);
  EXPECT_EQ(*RowsPerChunk(job, 1, kLimit), 1);
  EXPECT_EQ(*RowsPerChunk(job, kLimit, kResponseOverheadBytes + 64), 2);
  EXPECT_TRUE(
      absl::IsResourceExhausted(RowsPerChunk(job, 320, kResponseOverheadBytes + 31).status()));
}

TEST(Name, IsCheckedBeforeAnyFileSystem) {
  EXPECT_EQ(FieldOf(CheckName("")), "name");
  EXPECT_EQ(FieldOf(CheckName("../x")), "name");
  EXPECT_EQ(FieldOf(CheckName(std::string(4096, 'n'))), "name");
  EXPECT_EQ(FieldOf(CheckName(std::string("a\0b", 3))), "name");
  EXPECT_TRUE(CheckName("all-MiniLM-L6-v2-awq").ok());
}

}  // namespace
}  // namespace awqd::wire
