// Quantised activations through the real server: the goldens of tests/data/qserve_w4a8, rounded by
// the server and sent as INT8, alone and merged, and refusals.
#include <cmath>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "client/files/npy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/server_test.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using client::MatmulCall;
using client::Tensor;
using Json = nlohmann::json;
using ::testing::HasSubstr;

std::string Path(const std::string& name) { return DataPath("qserve_w4a8/" + name); }

std::vector<Json> Cases() {
  const Json all = Json::parse(std::ifstream(Path("cases.json")));
  return all.at("cases").get<std::vector<Json>>();
}

std::string PartOf(const Json& golden, const std::string& part) {
  return Path(absl::StrCat(golden.at("name").get<std::string>(), ".", part, ".npy"));
}

Tensor Read(const Json& golden, const std::string& part) {
  return ReadTensor(PartOf(golden, part));
}

v1::PackedWeight Weight(const Json& golden) {
  v1::PackedWeight out;
  out.set_format("plain");
  for (const auto& [name, value] : golden.at("settings").items()) {
    (*out.mutable_settings())[name] = value.get<std::string>();
  }
  for (const Json& name : golden.at("tensors")) {
    (*out.mutable_tensors())[name] = client::ToProto(Read(golden, name));
  }
  return out;
}

// A call whose activations the server rounds.
MatmulCall Floating(const Json& golden) {
  MatmulCall call = {.weight = Weight(golden), .activations = Read(golden, "activations")};
  call.activation_quantization = v1::INT8_PER_TOKEN;
  if (!golden.at("static_scale").is_null()) {
    call.activation_quantization = v1::INT8_STATIC;
    const std::vector<float> scale = {golden.at("static_scale").get<float>()};
    call.activation_scales = *Tensor::FromFloats(v1::FP32, {1}, scale);
  }
  return call;
}

// A call whose activations are rounded already.
MatmulCall Int8(const Json& golden) {
  return {.weight = Weight(golden),
          .activations = Read(golden, "q"),
          .activation_scales = Read(golden, "token_scales")};
}

double Error(const Tensor& got, const Json& golden) {
  return RelativeError(got, client::ReadNpy(PartOf(golden, "product"))->ToDoubles());
}

class QuantizedActivationsTest : public SharedServerTest {
 protected:
  // Changes a good call of the first golden, and returns its refusal.
  std::string Refused(const std::function<void(MatmulCall*)>& spoil, bool int8 = false) {
    const Json golden = Cases().front();
    MatmulCall call = int8 ? Int8(golden) : Floating(golden);
    EXPECT_TRUE(client_->QuantizedMatmul(call).ok());
    spoil(&call);
    const auto y = client_->QuantizedMatmul(std::move(call));
    EXPECT_EQ(y.status().code(), absl::StatusCode::kInvalidArgument) << y.status();
    return std::string(y.status().message());
  }
};

TEST_F(QuantizedActivationsTest, GiveWhatNumpyGives) {
  ASSERT_EQ(Cases().size(), 4u);
  for (const Json& golden : Cases()) {
    SCOPED_TRACE(golden.at("name"));
    std::string bits;
    for (MatmulCall call : {Floating(golden), Int8(golden)}) {
      call.output_dtype = v1::FP32;
      const auto y = client_->QuantizedMatmul(call);
      ASSERT_TRUE(y.ok()) << y.status();
      EXPECT_THAT(y->execution.kernel(), HasSubstr("qmatmul_a8_scaled"));
      EXPECT_LE(Error(y->output, golden), 1e-6);
      // Equal, because the server rounds as NumPy does.
      if (!bits.empty()) {
        EXPECT_EQ(y->output.bytes, bits);
      }
      bits = y->output.bytes;
      call.output_dtype = v1::DTYPE_UNSPECIFIED;
      const auto narrow = client_->QuantizedMatmul(call);
      ASSERT_TRUE(narrow.ok()) << narrow.status();
      EXPECT_EQ(narrow->output.dtype, call.activations.dtype == v1::FP32 ? v1::FP32 : v1::FP16);
      EXPECT_LE(Error(narrow->output, golden), 5e-4);
    }
  }
}

TEST_F(QuantizedActivationsTest, ManyOnOneStreamWithScalesOfTheirOwn) {
  const Json golden = Cases().front();
  const std::vector<float> half = {0.5f};
  std::vector<std::string> want;
  std::vector<MatmulCall> calls = {Floating(golden), Int8(golden), Int8(golden)};
  calls[2].activation_scales = *Tensor::FromFloats(v1::FP32, {}, half);
  for (const MatmulCall& call : calls) {
    want.push_back(client_->QuantizedMatmul(call)->output.bytes);
  }
  EXPECT_NE(want[1], want[2]);
  const auto stream = client_->QuantizedMatmulStream({.timeout = absl::Seconds(60)});
  for (int i = 0; i < 30; ++i) {
    MatmulCall call = calls[i % calls.size()];
    call.request_id = absl::StrCat(i);
    ASSERT_TRUE(stream->Send(std::move(call)).ok());
  }
  ASSERT_TRUE(stream->CloseSend().ok());
  int answers = 0;
  for (auto answer = stream->Receive(); answer.ok() && answer->has_value();
       answer = stream->Receive(), ++answers) {
    ASSERT_TRUE((*answer)->result.ok()) << (*answer)->result.status();
    const int id = std::stoi((*answer)->request_id);
    EXPECT_EQ((*answer)->result->output.bytes, want[id % calls.size()]);
  }
  EXPECT_EQ(answers, 30);
}

// QServe's own checkpoints, per group and per channel: W is the FP32 result of Dequantize, which
// formats_e2e_test compares with goldens.
TEST_F(QuantizedActivationsTest, OfQServesCheckpoints) {
  for (const char* model : {"g128", "g32-zeros", "channels"}) {
    SCOPED_TRACE(model);
    std::filesystem::copy(DataPath(absl::StrCat("qserve/", model)), *repository_ / model);
    const auto loaded = client_->LoadModel(model);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    const auto info_of_model = client_->GetModel(model);
    ASSERT_TRUE(info_of_model.ok()) << info_of_model.status();
    for (const v1::WeightInfo& info : info_of_model->weights()) {
      const client::WeightName weight = {model, info.path()};
      const int64_t k = info.k(), n = info.n(), tokens = 3;
      const auto dequantized = client_->Dequantize({.weight = weight, .output_dtype = v1::FP32});
      ASSERT_TRUE(dequantized.ok()) << dequantized.status();
      const std::vector<float> w = *dequantized->output.ToFloats(), scales = {0.5f, 0.01f, 2.0f};
      MatmulCall call = {.weight = weight, .activations = {v1::INT8, {tokens, k}, ""}};
      for (int64_t i = 0; i < tokens * k; ++i) {
        call.activations.bytes.push_back(static_cast<char>(i * 37 % 255 - 127));
      }
      call.activation_scales = *Tensor::FromFloats(v1::FP32, {tokens}, scales);
      const std::vector<float> none(n, 0.0f);
      call.bias = *Tensor::FromFloats(v1::FP32, {n}, none);  // instead of the checkpoint's
      call.output_dtype = v1::FP32;
      const auto y = client_->QuantizedMatmul(call);
      ASSERT_TRUE(y.ok()) << y.status();
      EXPECT_THAT(y->execution.kernel(), HasSubstr("qmatmul_a8_scaled"));
      std::vector<double> want;
      for (int64_t i = 0; i < tokens * n; ++i) {
        double sum = 0;
        for (int64_t row = 0; row < k; ++row) {
          const auto q = static_cast<int8_t>(call.activations.bytes[i / n * k + row]);
          sum += 1.0 * q * scales[i / n] * w[row * n + i % n];
        }
        want.push_back(sum);
      }
      EXPECT_LE(RelativeError(y->output, want), 1e-6) << info.path();
    }
    EXPECT_TRUE(client_->UnloadModel(model).ok());
  }
}

TEST_F(QuantizedActivationsTest, TakeABiasAndAnActivationFunctionAndNoTokens) {
  const Json golden = Cases().front();
  MatmulCall call = Int8(golden);
  call.output_dtype = v1::FP32;
  call.activation_function = v1::RELU;
  const std::vector<float> thousand(40, -1000.0f);
  call.bias = *Tensor::FromFloats(v1::FP32, {40}, thousand);
  const auto y = client_->QuantizedMatmul(call);
  ASSERT_TRUE(y.ok()) << y.status();
  const std::vector<double> product = client::ReadNpy(PartOf(golden, "product"))->ToDoubles();
  const std::vector<float> got = *y->output.ToFloats();
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], std::max(0.0, product[i] - 1000), 1e-3) << i;
  }
  call = Int8(golden);
  call.activations = {.dtype = v1::INT8, .shape = {0, 256}, .bytes = ""};
  call.activation_scales = *Tensor::FromFloats(v1::FP32, {0}, {});
  const auto none = client_->QuantizedMatmul(call);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(none->output.dtype, v1::FP16);
  EXPECT_TRUE(none->output.bytes.empty());
}

// A request without a quantisation gets INT8_PER_TOKEN. A request that names one keeps it, and so
// does a weight whose codes are not integers.
TEST(Int8Activations, AreTheServersDefaultWhereAskedFor) {
  ServerProcess plain({"--model_repository=" + DemoRepository()});
  ServerProcess rounding({"--model_repository=" + DemoRepository(), "--int8_activations"});
  ASSERT_TRUE(plain.WaitServing()) << plain.log();
  ASSERT_TRUE(rounding.WaitServing()) << rounding.log();
  const Json golden = Cases().front();
  const auto run = [&](ServerProcess& server, v1::ActivationQuantization how) {
    MatmulCall call = {.weight = Weight(golden), .activations = Read(golden, "activations")};
    call.activation_quantization = how;
    const auto y = server.NewClient()->QuantizedMatmul(call);
    EXPECT_TRUE(y.ok()) << y.status();
    return y.ok() ? y->output.bytes : std::string();
  };
  const std::string as_floats = run(plain, v1::ACTIVATIONS_AS_SENT);
  const std::string as_int8 = run(plain, v1::INT8_PER_TOKEN);
  ASSERT_NE(as_floats, as_int8);
  EXPECT_EQ(run(plain, v1::ACTIVATIONS_FLOATING), as_floats);
  EXPECT_EQ(run(rounding, v1::ACTIVATIONS_AS_SENT), as_int8);
  EXPECT_EQ(run(rounding, v1::INT8_PER_TOKEN), as_int8);
  EXPECT_EQ(run(rounding, v1::ACTIVATIONS_FLOATING), as_floats);
  const auto sent_as_int8 = rounding.NewClient()->QuantizedMatmul(Int8(golden));
  EXPECT_TRUE(sent_as_int8.ok()) << sent_as_int8.status();
}

TEST_F(QuantizedActivationsTest, SayWhatIsWrong) {
  const auto scales = [](std::vector<int64_t> shape, float value) {
    std::vector<float> values(*client::ElementCount(shape), value);
    return *Tensor::FromFloats(v1::FP32, std::move(shape), values);
  };
  EXPECT_THAT(Refused([&](MatmulCall* c) { c->activation_scales = scales({6}, 1); }),
              HasSubstr("activation_scales: got a tensor, expected none with INT8_PER_TOKEN"));
  EXPECT_THAT(Refused([](MatmulCall* c) { c->activation_quantization = v1::INT8_STATIC; }),
              HasSubstr("activation_scales: got nothing, expected an FP32 tensor of one element"));
  EXPECT_THAT(Refused([&](MatmulCall* c) { c->activation_scales = scales({5}, 1); }, true),
              HasSubstr("activation_scales.shape: got [5], expected [6], the leading dimensions"));
  EXPECT_THAT(
      Refused([&](MatmulCall* c) { c->activation_scales = scales({6}, -1); }, true),
      HasSubstr("activation_scales: got -1 at element 0, expected positive finite numbers"));
  EXPECT_THAT(Refused([&](MatmulCall* c) { c->activation_scales = scales({1}, NAN); }, true),
              HasSubstr("activation_scales: got nan at element 0"));
  EXPECT_THAT(
      Refused([](MatmulCall* c) { c->activation_quantization = v1::INT8_PER_TOKEN; }, true),
      HasSubstr("got INT8_PER_TOKEN, expected ACTIVATIONS_AS_SENT: the activations are INT8"));
  EXPECT_THAT(Refused([](MatmulCall* c) { c->output_dtype = v1::INT32; }, true),
              HasSubstr("output_dtype: got INT32, expected FP16, BF16, FP32"));
}

}  // namespace
}  // namespace awqd
