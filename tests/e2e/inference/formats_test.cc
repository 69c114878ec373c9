// Every format through the real server: from a checkpoint's folder, and inline.
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/files/npy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/half.h"
#include "tests/e2e/inference/golden_models.h"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

using client::MatmulCall;
using client::Tensor;
using client::WeightName;
using client::WeightSource;

// Largest relative error of a product, by the type of its activations and output.
double Tolerance(v1::DType dtype) { return dtype == v1::BF16 ? 8e-3 : 1e-3; }

double Apply(v1::ActivationFunction function, double x) {
  if (function == v1::RELU) return std::max(x, 0.0);
  if (function == v1::GELU) return x * (1 + std::erf(x / std::sqrt(2.0))) / 2;
  return function == v1::SILU ? x / (1 + std::exp(-x)) : x;
}

std::vector<GoldenCase> AllCases() {
  std::vector<GoldenCase> out;
  for (const char* folder : {"plain",
                             "int-quantized",
                             "fastertransformer",
                             "gemlite",
                             "fp8",
                             "modelopt",
                             "mxfp4",
                             "bitsandbytes",
                             "bitsandbytes-int8",
                             "hqq",
                             "gptq",
                             "auto-round",
                             "pack-quantized",
                             "float-quantized",
                             "nvfp4-pack-quantized",
                             "mxfp4-pack-quantized",
                             "qserve",
                             "awq-gemm",
                             "awq-gemv",
                             "awq-gemv-fast",
                             "awq-marlin",
                             "gptq-marlin",
                             "gguf",
                             "quark",
                             "mlx",
                             "fp-quant",
                             "comfy",
                             "blockwise-int8",
                             "torchao",
                             "quanto",
                             "quanto-packed",
                             "exl3"}) {
    for (GoldenCase& golden : GoldenCases(folder)) out.push_back(std::move(golden));
  }
  return out;
}

// Letters and digits of the case, for GoogleTest.
std::string TestName(const ::testing::TestParamInfo<GoldenCase>& info) {
  std::string name = info.param.Name();
  for (char& c : name) c = absl::ascii_isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
}

class FormatsTest : public SharedServerTest {
 protected:
  static std::string Model(const GoldenCase& golden) { return golden.folder + "." + golden.model; }

  // Copies the checkpoint into the repository and loads it.
  absl::Status Load(const GoldenCase& golden) {
    const std::string folder = *repository_ / Model(golden);
    if (!std::filesystem::exists(folder)) std::filesystem::copy(golden.Folder(), folder);
    return client_->LoadModel(Model(golden)).status();
  }
};

class GoldenTest : public FormatsTest, public ::testing::WithParamInterface<GoldenCase> {
 protected:
  void SetUp() override {
    const GoldenCase& golden = GetParam();
    const absl::Status loaded = Load(golden);
    ASSERT_TRUE(loaded.ok()) << loaded;
    const auto x = client::ReadNpy(golden.activations);
    const auto y = client::ReadNpy(golden.matmul);
    ASSERT_TRUE(x.ok() && y.ok()) << x.status() << y.status();
    x_ = *client::ToTensor(*x);
    const auto w = client_->Dequantize({.weight = Source()});
    ASSERT_TRUE(w.ok()) << w.status();
    weight_ = *w->output.ToFloats();
    if (!golden.whole.empty()) {
      CheckWhole();
    } else if (golden.factor.empty()) {
      ASSERT_EQ(Fnv1a64(w->output.bytes), golden.dequantized_fnv1a64);
    } else {
      CheckFactor();
    }
    // The bias is the golden's difference to the product of its first row.
    bias_ = y->ToDoubles();
    bias_.resize(golden.n);
    const std::vector<double> product = Product(x_, {});
    for (int64_t n = 0; n < golden.n; ++n) bias_[n] -= product[n];
  }
  void TearDown() override { EXPECT_TRUE(client_->UnloadModel(Model(GetParam())).ok()); }

  // All of the weight; empty after an error.
  std::vector<float> DequantizeInFp32() {
    const auto exact = client_->Dequantize({.weight = Source(), .output_dtype = v1::FP32});
    EXPECT_TRUE(exact.ok()) << exact.status();
    return exact.ok() ? *exact->output.ToFloats() : std::vector<float>();
  }

  // The golden's hash is of the weight that activations times the factor are multiplied by, and the
  // answer is of the one that activations are multiplied by.
  void CheckFactor() {
    const GoldenCase& golden = GetParam();
    const auto factor = client::ReadNpy(golden.factor);
    ASSERT_TRUE(factor.ok()) << factor.status();
    const std::vector<double> factors = factor->ToDoubles();
    const std::vector<float> values = DequantizeInFp32();
    ASSERT_EQ(values.size(), weight_.size());
    std::string bytes;
    for (int64_t i = 0; i < golden.k * golden.n; ++i) {
      EXPECT_EQ(weight_[i], HalfToFloat(FloatToHalf(values[i]))) << i;
      const uint16_t half = FloatToHalf(static_cast<float>(values[i] / factors[i / golden.n]));
      bytes.append(reinterpret_cast<const char*>(&half), sizeof(half));
    }
    EXPECT_EQ(Fnv1a64(bytes), golden.dequantized_fnv1a64);
  }

  // The answer is of the weight that activations are multiplied by as they are, in FP32: sums of a
  // block of the transform are rounded at each butterfly.
  void CheckWhole() {
    const GoldenCase& golden = GetParam();
    const auto whole = client::ReadNpy(golden.whole);
    ASSERT_TRUE(whole.ok()) << whole.status();
    const std::vector<double> want = whole->ToDoubles();
    const std::vector<float> values = DequantizeInFp32();
    ASSERT_EQ(values.size(), weight_.size());
    double largest = 0;
    for (const double value : want) largest = std::max(largest, std::abs(value));
    for (int64_t i = 0; i < golden.k * golden.n; ++i) {
      ASSERT_NEAR(values[i], want[i], largest * 0x1p-20) << i;
      EXPECT_EQ(weight_[i], HalfToFloat(FloatToHalf(values[i]))) << i;
    }
    // Some rows and columns are those of the whole.
    const auto part = client_->Dequantize({.weight = Source(),
                                           .output_dtype = v1::FP32,
                                           .row_begin = 5,
                                           .row_end = 23,
                                           .column_begin = 1});
    ASSERT_TRUE(part.ok()) << part.status();
    const std::vector<float> some = *part->output.ToFloats();
    for (int64_t i = 0; i < 18 * (golden.n - 1); ++i) {
      EXPECT_EQ(some[i], values[(5 + i / (golden.n - 1)) * golden.n + 1 + i % (golden.n - 1)]);
    }
    weight_ = values;
  }

  WeightSource Source() const { return WeightName{Model(GetParam()), GetParam().weight}; }

  // f(x @ W + bias) in double.
  std::vector<double> Product(const Tensor& x, const std::vector<double>& bias,
                              v1::ActivationFunction function = v1::NONE) const {
    const std::vector<float> values = *x.ToFloats();
    const int64_t k = GetParam().k, n = GetParam().n;
    std::vector<double> out;
    for (int64_t row = 0; row < x.shape[0]; ++row) {
      for (int64_t col = 0; col < n; ++col) {
        double sum = bias.empty() ? 0 : bias[col];
        for (int64_t i = 0; i < k; ++i) sum += double{values[row * k + i]} * weight_[i * n + col];
        out.push_back(Apply(function, sum));
      }
    }
    return out;
  }

  Tensor x_;                   // FP16 [tokens, K]
  std::vector<float> weight_;  // [K, N], as FP16
  std::vector<double> bias_;
};

TEST_P(GoldenTest, FromACheckpointsFolder) {
  const GoldenCase& golden = GetParam();
  const auto model = client_->GetModel(Model(golden));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->quant_method(), golden.quant_method);
  for (const v1::WeightInfo& info : model->weights()) {
    if (info.path() != golden.weight) continue;
    EXPECT_EQ(info.format(), golden.weight_format);
    EXPECT_EQ(info.scheme(), golden.scheme);
    EXPECT_EQ(info.k(), golden.k);
    EXPECT_EQ(info.n(), golden.n);
    const v1::PackedWeight packed = InlineOf(golden);
    EXPECT_EQ(info.has_factor(), packed.tensors().contains("pre_quant_scale") ||
                                     packed.tensors().contains("input_prescale") ||
                                     !golden.factor.empty());
    EXPECT_EQ(info.hadamard_size(), golden.hadamard_size);
  }
  for (const v1::DType dtype : {v1::FP16, v1::BF16, v1::FP32}) {
    const Tensor x = *client::Convert(x_, dtype);
    const std::vector<double> expected = Product(x, bias_);
    for (const v1::Path path : {v1::FUSED, v1::DEQUANTIZE}) {
      SCOPED_TRACE(absl::StrCat(v1::DType_Name(dtype), " ", v1::Path_Name(path)));
      const auto y = client_->QuantizedMatmul({.weight = Source(), .activations = x, .path = path});
      ASSERT_TRUE(y.ok()) << y.status();
      EXPECT_LE(RelativeError(y->output, expected), Tolerance(dtype));
    }
  }
}

// compressed-tensors, FP8 and ModelOpt declare how activations were quantised with the weights, and
// QServe implies it.
TEST_P(GoldenTest, QuantisesActivationsAsTheCheckpointDeclares) {
  const GoldenCase& golden = GetParam();
  const auto model = client_->GetModel(Model(golden));
  ASSERT_TRUE(model.ok()) << model.status();
  const bool int8 =
      golden.format == "qserve" ||
      (golden.format == "int-quantized" && golden.model == "w8-channel") ||
      (golden.format == "torchao" && golden.model == "saved" && golden.scheme.starts_with("w8"));
  const auto info =
      absl::c_find_if(model->weights(), [&](const auto& of) { return of.path() == golden.weight; });
  ASSERT_NE(info, model->weights().end());
  const v1::ActivationQuantization expected = info->activations();
  const bool fp8 = expected >= v1::FP8_PER_TOKEN;
  EXPECT_EQ(expected == v1::INT8_PER_TOKEN, int8);
  static const std::set<std::string> kFp8 = {
      "fp8/blocks",   "fp8/channel",          "float-quantized/channel", "float-quantized/tensor",
      "modelopt/fp8", "modelopt/fp8-channel", "fp8/experts-of-fp4"};
  if (kFp8.contains(absl::StrCat(golden.format, "/", golden.model))) {
    EXPECT_TRUE(fp8);
  }
  for (const auto as_declared : {v1::INT8_AS_DECLARED, v1::FP8_AS_DECLARED}) {
    MatmulCall call = {.weight = Source(), .activations = x_};
    call.activation_quantization = as_declared;
    const auto declared = client_->QuantizedMatmul(call);
    const bool names_it = as_declared == v1::INT8_AS_DECLARED ? int8 : fp8;
    if (!names_it) {
      EXPECT_EQ(declared.status().code(), absl::StatusCode::kInvalidArgument) << declared.status();
      continue;
    }
    ASSERT_TRUE(declared.ok()) << declared.status();
    call.activation_quantization = expected;
    if (expected == v1::FP8_STATIC) {
      const std::vector<float> scale = {info->activation_scale()};
      call.activation_scales = *Tensor::FromFloats(v1::FP32, {1}, scale);
    }
    const auto asked = client_->QuantizedMatmul(call);
    ASSERT_TRUE(asked.ok()) << asked.status();
    EXPECT_EQ(declared->output.bytes, asked->output.bytes);
    EXPECT_LE(RelativeError(declared->output, Product(x_, bias_)), int8 ? 2e-2 : 6e-2);
  }
}

TEST_P(GoldenTest, InTheRequestItIsTheSame) {
  const WeightSource inline_weight = InlineOf(GetParam());
  for (const v1::DType dtype : {v1::FP16, v1::BF16, v1::FP32}) {
    const auto one = client_->Dequantize({.weight = Source(), .output_dtype = dtype});
    const auto other = client_->Dequantize({.weight = inline_weight, .output_dtype = dtype});
    ASSERT_TRUE(one.ok() && other.ok()) << one.status() << other.status();
    EXPECT_EQ(one->output.bytes, other->output.bytes);
  }
  const auto one = client_->QuantizedMatmul({.weight = Source(), .activations = x_});
  const auto other = client_->QuantizedMatmul({.weight = inline_weight, .activations = x_});
  ASSERT_TRUE(one.ok() && other.ok()) << one.status() << other.status();
  EXPECT_EQ(one->output.bytes, other->output.bytes);
}

TEST_P(GoldenTest, ActivationFunctions) {
  for (const auto function : {v1::RELU, v1::GELU, v1::SILU}) {
    for (const v1::DType dtype : {v1::FP16, v1::BF16, v1::FP32}) {
      for (const v1::Path path : {v1::FUSED, v1::DEQUANTIZE}) {
        SCOPED_TRACE(absl::StrCat(v1::ActivationFunction_Name(function), " ", v1::DType_Name(dtype),
                                  " ", v1::Path_Name(path)));
        const Tensor x = *client::Convert(x_, dtype);
        const auto y = client_->QuantizedMatmul(
            {.weight = Source(), .activations = x, .path = path, .activation_function = function});
        ASSERT_TRUE(y.ok()) << y.status();
        EXPECT_LE(RelativeError(y->output, Product(x, bias_, function)), Tolerance(dtype));
      }
    }
  }
}

// Requests that may be merged, with several activation functions, each with its own answer.
TEST_P(GoldenTest, ManyOnOneStream) {
  const auto stream = client_->QuantizedMatmulStream({.timeout = absl::Seconds(60)});
  std::map<std::string, MatmulCall> sent;
  for (int i = 0; i < 24; ++i) {
    MatmulCall call = {.weight = Source(),
                       .activations = x_,
                       .activation_function = static_cast<v1::ActivationFunction>(i % 4),
                       .request_id = absl::StrCat("id", i)};
    if (i % 6 == 5) call.weight = InlineOf(GetParam());
    sent.emplace(call.request_id, call);
    ASSERT_TRUE(stream->Send(std::move(call)).ok());
  }
  ASSERT_TRUE(stream->CloseSend().ok());
  size_t answers = 0;
  for (auto answer = stream->Receive(); answer.ok() && answer->has_value();
       answer = stream->Receive(), ++answers) {
    const MatmulCall& call = sent.at((*answer)->request_id);
    const auto& result = (*answer)->result;
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_LE(RelativeError(result->output, Product(x_, bias_, call.activation_function)),
              Tolerance(v1::FP16));
  }
  EXPECT_EQ(answers, sent.size());
}

INSTANTIATE_TEST_SUITE_P(All, GoldenTest, ::testing::ValuesIn(AllCases()), TestName);

TEST_F(FormatsTest, TheServerNamesItsFormats) {
  const auto info = client_->GetServerInfo();
  ASSERT_TRUE(info.ok()) << info.status();
  const std::vector<std::string> formats(info->formats().begin(), info->formats().end());
  EXPECT_THAT(formats, ::testing::IsSupersetOf({"awq",
                                                "plain",
                                                "int-quantized",
                                                "fastertransformer",
                                                "gemlite",
                                                "gptq",
                                                "auto-round",
                                                "pack-quantized",
                                                "float-quantized",
                                                "nvfp4-pack-quantized",
                                                "mxfp4-pack-quantized",
                                                "qserve",
                                                "awq-gemv",
                                                "awq-gemv-fast",
                                                "awq-marlin",
                                                "gptq-marlin",
                                                "gguf",
                                                "quark",
                                                "mlx",
                                                "fp-quant",
                                                "comfy",
                                                "blockwise-int8",
                                                "torchao",
                                                "quanto",
                                                "quanto-packed",
                                                "exl3"}));
}

}  // namespace
}  // namespace awqd
