// Activations that the server rounds to E4M3, against compressed-tensors' own rounding
// (tests/data/fp8_activations), by each way to ask for it.
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/files/npy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

using client::MatmulCall;
using client::Tensor;
using nlohmann::json;
using ::testing::HasSubstr;

std::string Path(const std::string& name) { return DataPath("fp8_activations/" + name); }

std::vector<json> Cases() {
  return json::parse(std::ifstream(Path("cases.json"))).at("cases").get<std::vector<json>>();
}

Tensor Read(const json& golden, const std::string& part) {
  return ReadTensor(Path(absl::StrCat(golden.at("name").get<std::string>(), ".", part, ".npy")));
}

// The product that the checkpoint declares.
MatmulCall Declared(const json& golden) {
  v1::PackedWeight weight;
  weight.set_format("float-quantized");
  for (const auto& [name, value] : golden.at("settings").items()) {
    (*weight.mutable_settings())[name] = value.get<std::string>();
  }
  for (const json& name : golden.at("tensors")) {
    (*weight.mutable_tensors())[name] = client::ToProto(Read(golden, name));
  }
  MatmulCall call = {.weight = weight, .activations = Read(golden, "x")};
  call.activation_quantization = v1::FP8_AS_DECLARED;
  return call;
}

class Fp8ActivationsTest : public SharedServerTest {};

TEST_F(Fp8ActivationsTest, AreThoseOfCompressedTensors) {
  ASSERT_EQ(Cases().size(), 3u);
  for (const json& golden : Cases()) {
    SCOPED_TRACE(golden.at("name"));
    MatmulCall call = Declared(golden);
    const auto declared = client_->QuantizedMatmul(call);
    ASSERT_TRUE(declared.ok()) << declared.status();
    const std::vector<double> expected =
        client::ReadNpy(Path(absl::StrCat(golden.at("name").get<std::string>(), ".product.npy")))
            ->ToDoubles();
    EXPECT_LE(RelativeError(declared->output, expected), 1e-3);
    ASSERT_TRUE(v1::ActivationQuantization_Parse(golden.at("quantization").get<std::string>(),
                                                 &call.activation_quantization));
    if (call.activation_quantization == v1::FP8_STATIC) {
      const std::vector<float> scale = {golden.at("scale").get<float>()};
      call.activation_scales = *Tensor::FromFloats(v1::FP32, {1}, scale);
    }
    const auto asked = client_->QuantizedMatmul(call);
    ASSERT_TRUE(asked.ok()) << asked.status();
    EXPECT_EQ(asked->output.bytes, declared->output.bytes);
    call.activation_quantization = v1::ACTIVATIONS_AS_SENT;
    call.activation_scales.reset();
    const auto floating = client_->QuantizedMatmul(call);
    ASSERT_TRUE(floating.ok()) << floating.status();
    EXPECT_GE(RelativeError(floating->output, expected), 5e-3) << "they are rounded";
  }
}

TEST_F(Fp8ActivationsTest, AreTheServersDefaultWhereAskedFor) {
  ServerProcess rounding({"--model_repository=" + DemoRepository(), "--fp8_activations"});
  ASSERT_TRUE(rounding.WaitServing()) << rounding.log();
  MatmulCall call = Declared(Cases().front());
  const auto declared = client_->QuantizedMatmul(call);
  call.activation_quantization = v1::ACTIVATIONS_AS_SENT;
  const auto by_default = rounding.NewClient()->QuantizedMatmul(call);
  ASSERT_TRUE(declared.ok() && by_default.ok()) << declared.status() << by_default.status();
  EXPECT_EQ(by_default->output.bytes, declared->output.bytes);
  call.activation_quantization = v1::ACTIVATIONS_FLOATING;
  const auto floating = rounding.NewClient()->QuantizedMatmul(call);
  ASSERT_TRUE(floating.ok()) << floating.status();
  EXPECT_NE(floating->output.bytes, declared->output.bytes);
}

TEST_F(Fp8ActivationsTest, SayWhatIsWrong) {
  const auto refused = [&](v1::ActivationQuantization how, bool scales) {
    MatmulCall call = Declared(Cases().front());
    call.activation_quantization = how;
    const std::vector<float> scale = {1};
    if (scales) call.activation_scales = *Tensor::FromFloats(v1::FP32, {1}, scale);
    const auto y = client_->QuantizedMatmul(call);
    EXPECT_EQ(y.status().code(), absl::StatusCode::kInvalidArgument) << y.status();
    return std::string(y.status().message());
  };
  EXPECT_THAT(refused(v1::FP8_PER_TOKEN, true),
              HasSubstr("activation_scales: got a tensor, expected none with FP8_PER_TOKEN: each "
                        "token has its own"));
  EXPECT_THAT(refused(v1::FP8_AS_DECLARED, true), HasSubstr("the checkpoint has them"));
  EXPECT_THAT(refused(v1::FP8_STATIC, false), HasSubstr("activation_scales: got nothing"));
  EXPECT_THAT(refused(v1::INT8_AS_DECLARED, false),
              HasSubstr("got INT8_AS_DECLARED, expected another: the weight's checkpoint declares "
                        "FP8"));
  EXPECT_THAT(refused(v1::INT8_PER_TOKEN, false), HasSubstr("codes are no integers"));
}

}  // namespace
}  // namespace awqd
