// Activations that the server rounds to E4M3, against compressed-tensors' own rounding
// (tests/data/fp8_activations), by each way to ask for it.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/files/npy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/float8.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

using client::MatmulCall;
using client::Tensor;
using nlohmann::json;
using ::testing::HasSubstr;

std::string Path(const std::string& name) { return DataPath("fp8_activations/" + name); }

std::vector<json> Cases(const std::string& kind = "cases") {
  return json::parse(std::ifstream(Path("cases.json"))).at(kind).get<std::vector<json>>();
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

// Expert `e` of three that lie in one tensor, as float-quantized has it.
v1::PackedWeight Expert(const std::string& projection, int e, const std::string& activations) {
  v1::PackedWeight out;
  out.set_format("float-quantized");
  (*out.mutable_settings())["strategy"] = "tensor";
  (*out.mutable_settings())["activations"] = activations;
  for (const std::string name : {"weight", "weight_scale", "input_scale"}) {
    if (name == "input_scale" && activations != "fp8_static") continue;
    Tensor all = ReadTensor(Path("mlp." + projection + "." + name + ".npy"));
    const size_t each = all.bytes.size() / 3;
    all.bytes = all.bytes.substr(e * each, each);
    all.shape.erase(all.shape.begin());
    if (all.shape.empty()) all.shape = {1};
    (*out.mutable_tensors())[name] = client::ToProto(all);
  }
  return out;
}

v1::PackedStack Stack(const std::string& projection, std::vector<int> experts,
                      const std::string& activations) {
  v1::PackedStack out;
  for (int e : experts) *out.add_experts() = Expert(projection, e, activations);
  return out;
}

v1::PackedGatedMlp Projections(const std::vector<int>& experts, const std::string& activations) {
  v1::PackedGatedMlp out;
  *out.mutable_gate() = Stack("gate", experts, activations);
  *out.mutable_up() = Stack("up", experts, activations);
  *out.mutable_down() = Stack("down", experts, activations);
  return out;
}

// Each token to both experts.
client::Routing ToBoth(bool summed) {
  client::Routing out;
  const Tensor router = ReadTensor(Path("mlp.router.npy"));
  out.expert_ids = {v1::INT32, router.shape, ""};
  for (int64_t i = 0; i < router.shape[0]; ++i)
    out.expert_ids.bytes += std::string("\0\0\0\0\1\0\0\0", 8);
  if (summed) out.router_weights = router;
  return out;
}

// The mixture of two experts and a shared one that the checkpoint declares.
client::GatedMlpCall Mixture(const std::string& activations) {
  v1::PackedGatedMlp packed = Projections({0, 1}, activations);
  *packed.mutable_shared_expert() = Projections({2}, activations);
  client::GatedMlpCall call = {.mlp = packed, .activations = ReadTensor(Path("mlp.x.npy"))};
  call.routing = ToBoth(true);
  call.activation_quantization = v1::FP8_AS_DECLARED;
  return call;
}

Tensor Scales(std::vector<float> values) {
  return *Tensor::FromFloats(v1::FP32, {static_cast<int64_t>(values.size())}, values);
}

// Activations [tokens, K] rounded to E4M3, and their scales: one for each token, or for each block.
struct Sent {
  Tensor codes, scales;
};

// `scale`: null for the largest number over 448.
Sent RoundActivations(const Tensor& activations, bool blocks, const json& scale = nullptr) {
  const std::vector<float> x = *activations.ToFloats();
  const int64_t tokens = activations.shape[0], k = activations.shape[1];
  const int64_t step = blocks ? 128 : k;
  Sent out = {.codes = {v1::FP8_E4M3, activations.shape, ""}};
  std::vector<float> scales;
  for (int64_t at = 0; at < tokens * k;) {
    const int64_t begin = at, end = at + std::min(step, k - at % k);
    float largest = 0;
    for (; at < end; ++at) largest = std::max(largest, std::abs(x[at]));
    scales.push_back(scale.is_null() ? largest / 448 : scale.get<float>());
    for (int64_t i = begin; i < end; ++i) {
      out.codes.bytes.push_back(static_cast<char>(FloatToE4m3(x[i] / scales.back())));
    }
  }
  std::vector<int64_t> shape = {tokens};
  if (blocks) shape.push_back((k + 127) / 128);
  out.scales = *Tensor::FromFloats(v1::FP32, shape, scales);
  return out;
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

// The rows that enter down are rounded twice: by the sums of gate and up, whose order differs, and to E4M3,
// where 2^-4 of a number in some hundred goes to the other neighbour.
constexpr double kMlpTolerance = 4e-3;

TEST_F(Fp8ActivationsTest, OfMixturesAreThoseOfCompressedTensors) {
  ASSERT_EQ(Cases("mlps").size(), 3u);
  for (const json& golden : Cases("mlps")) {
    SCOPED_TRACE(golden.at("name"));
    auto call = Mixture(golden.at("activations"));
    const std::vector<double> expected =
        client::ReadNpy(Path(golden.at("name").get<std::string>() + ".product.npy"))->ToDoubles();
    const auto declared = client_->GatedMlp(call);
    ASSERT_TRUE(declared.ok()) << declared.status();
    EXPECT_LE(RelativeError(declared->output, expected), kMlpTolerance);
    ASSERT_TRUE(v1::ActivationQuantization_Parse(golden.at("quantization").get<std::string>(),
                                                 &call.activation_quantization));
    if (call.activation_quantization != v1::FP8_STATIC) {
      const auto asked = client_->GatedMlp(call);
      ASSERT_TRUE(asked.ok()) << asked.status();
      EXPECT_EQ(asked->output.bytes, declared->output.bytes);
    }
    call.activation_quantization = v1::ACTIVATIONS_AS_SENT;
    const auto floating = client_->GatedMlp(call);
    ASSERT_TRUE(floating.ok()) << floating.status();
    EXPECT_GE(RelativeError(floating->output, expected), 1.5e-2) << "they are rounded";
  }
}

// The scales of a request do what those of a checkpoint do: one for each expert and for the shared
// one, or one for all.
TEST_F(Fp8ActivationsTest, OfMixturesTakeScales) {
  auto call = Mixture("fp8_static");
  auto& packed = std::get<v1::PackedGatedMlp>(call.mlp);
  *packed.mutable_up()->mutable_experts(1)->mutable_tensors()->at("input_scale").mutable_raw() =
      packed.gate().experts(1).tensors().at("input_scale").raw();
  const auto declared = client_->GatedMlp(call);
  call.activation_quantization = v1::FP8_STATIC;
  call.activation_scales = Scales({0.009f, 0.011f, 0.01f});
  call.down_activation_scales = Scales({0.05f, 0.02f, 0.03f});
  const auto asked = client_->GatedMlp(call);
  ASSERT_TRUE(declared.ok() && asked.ok()) << declared.status() << asked.status();
  EXPECT_EQ(asked->output.bytes, declared->output.bytes);
  call.activation_scales = Scales({0.01f, 0.01f, 0.01f});
  call.down_activation_scales = Scales({0.03f, 0.03f, 0.03f});
  const auto of_each = client_->GatedMlp(call);
  call.activation_scales = Scales({0.01f});
  call.down_activation_scales = Scales({0.03f});
  const auto of_all = client_->GatedMlp(call);
  ASSERT_TRUE(of_each.ok() && of_all.ok()) << of_each.status() << of_all.status();
  EXPECT_EQ(of_all->output.bytes, of_each->output.bytes);
  EXPECT_NE(of_all->output.bytes, asked->output.bytes);
}

// A stack is as its experts one by one, and a gated MLP without experts as one with an expert.
TEST_F(Fp8ActivationsTest, OfAStackAreThoseOfItsExperts) {
  const Tensor x = ReadTensor(Path("mlp.x.npy"));
  for (const std::string activations : {"fp8_dynamic", "fp8_static", "fp8_blocks"}) {
    SCOPED_TRACE(activations);
    client::GroupedMatmulCall call = {.stack = Stack("up", {0, 1}, activations), .activations = x};
    call.routing = ToBoth(false);
    call.activation_quantization = v1::FP8_AS_DECLARED;
    const auto rows = client_->GroupedQuantizedMatmul(call);
    ASSERT_TRUE(rows.ok()) << rows.status();
    const std::vector<float> got = *rows->output.ToFloats();
    for (int e : {0, 1}) {
      MatmulCall alone = {.weight = Expert("up", e, activations), .activations = x};
      alone.activation_quantization = v1::FP8_AS_DECLARED;
      const auto y = client_->QuantizedMatmul(alone);
      ASSERT_TRUE(y.ok()) << y.status();
      const int64_t n = y->output.shape[1];
      std::vector<float> mine;
      for (int64_t m = 0; m < x.shape[0]; ++m) {
        const auto begin = got.begin() + (2 * m + e) * n;
        mine.insert(mine.end(), begin, begin + n);
      }
      const std::vector<float> want = *y->output.ToFloats();
      EXPECT_LE(RelativeError(*Tensor::FromFloats(v1::FP32, y->output.shape, mine),
                              {want.begin(), want.end()}),
                3e-4);
    }
    client::GatedMlpCall dense = {.mlp = Projections({1}, activations), .activations = x};
    dense.activation_quantization = v1::FP8_AS_DECLARED;
    const auto y = client_->GatedMlp(dense);
    client::GatedMlpCall routed = {.mlp = Projections({0, 1}, activations), .activations = x};
    routed.routing = ToBoth(false);
    for (size_t i = 0; i < routed.routing->expert_ids.bytes.size(); i += 4) {
      routed.routing->expert_ids.bytes[i] = 1;
    }
    routed.activation_quantization = v1::FP8_AS_DECLARED;
    const auto twice = client_->GatedMlp(routed);
    ASSERT_TRUE(y.ok() && twice.ok()) << y.status() << twice.status();
    const std::vector<float> want = *y->output.ToFloats(), both = *twice->output.ToFloats();
    std::vector<float> first;
    for (int64_t m = 0; m < x.shape[0]; ++m) {
      const int64_t n = y->output.shape[1];
      first.insert(first.end(), both.begin() + 2 * m * n, both.begin() + (2 * m + 1) * n);
    }
    EXPECT_LE(RelativeError(*Tensor::FromFloats(v1::FP32, y->output.shape, first),
                            {want.begin(), want.end()}),
              kMlpTolerance);
  }
}

TEST_F(Fp8ActivationsTest, OfMixturesAreTheServersDefaultToo) {
  ServerProcess rounding({"--model_repository=" + DemoRepository(), "--fp8_activations"});
  ASSERT_TRUE(rounding.WaitServing()) << rounding.log();
  auto call = Mixture("fp8_static");
  const auto declared = client_->GatedMlp(call);
  call.activation_quantization = v1::ACTIVATIONS_AS_SENT;
  const auto by_default = rounding.NewClient()->GatedMlp(call);
  ASSERT_TRUE(declared.ok() && by_default.ok()) << declared.status() << by_default.status();
  EXPECT_EQ(by_default->output.bytes, declared->output.bytes);
  client::GroupedMatmulCall stack = {.stack = Stack("up", {0, 1}, "fp8_dynamic"),
                                     .activations = call.activations};
  stack.routing = ToBoth(true);
  const auto floating = client_->GroupedQuantizedMatmul(stack);
  const auto rounded = rounding.NewClient()->GroupedQuantizedMatmul(stack);
  ASSERT_TRUE(floating.ok() && rounded.ok()) << floating.status() << rounded.status();
  EXPECT_NE(rounded->output.bytes, floating->output.bytes);
}

// Activations that the client has rounded itself give the result of those that the server rounds.
TEST_F(Fp8ActivationsTest, MayBeSentWithTheirScales) {
  for (const json& golden : Cases()) {
    SCOPED_TRACE(golden.at("name"));
    MatmulCall call = Declared(golden);
    const auto rounded = client_->QuantizedMatmul(call);
    ASSERT_TRUE(rounded.ok()) << rounded.status();
    const Sent round = RoundActivations(
        call.activations, golden.at("quantization") == "FP8_PER_BLOCK_128", golden.at("scale"));
    call.activations = round.codes;
    call.activation_quantization = v1::ACTIVATIONS_AS_SENT;
    call.output_dtype = v1::FP32;
    call.activation_scales = round.scales;
    const auto sent = client_->QuantizedMatmul(call);
    ASSERT_TRUE(sent.ok()) << sent.status();
    EXPECT_EQ(sent->output.bytes, rounded->output.bytes);
    call.activation_scales = Scales({1, 1});
    EXPECT_THAT(client_->QuantizedMatmul(call).status().message(),
                HasSubstr("activation_scales.shape: got [2], expected [6]"));
    call.activation_scales.reset();
    EXPECT_THAT(client_->QuantizedMatmul(call).status().message(),
                HasSubstr("activation_scales: got nothing, expected the scales of FP8_E4M3"));
  }
}

TEST_F(Fp8ActivationsTest, OfMixturesMayBeSentWithTheirScales) {
  for (const auto& [activations, how] :
       {std::pair("fp8_dynamic", v1::FP8_PER_TOKEN), {"fp8_blocks", v1::FP8_PER_BLOCK_128}}) {
    SCOPED_TRACE(activations);
    auto call = Mixture(activations);
    const Sent round = RoundActivations(call.activations, how == v1::FP8_PER_BLOCK_128);
    call.activation_quantization = how;
    call.output_dtype = v1::FP32;
    const auto rounded = client_->GatedMlp(call);
    client::GatedMlpCall sent = call;
    sent.activations = round.codes;
    sent.activation_scales = round.scales;
    const auto same = client_->GatedMlp(sent);
    ASSERT_TRUE(rounded.ok() && same.ok()) << rounded.status() << same.status();
    EXPECT_EQ(same->output.bytes, rounded->output.bytes);
    sent.activation_quantization = v1::ACTIVATIONS_AS_SENT;
    const auto floating_middle = client_->GatedMlp(sent);
    ASSERT_TRUE(floating_middle.ok()) << floating_middle.status();
    EXPECT_NE(floating_middle->output.bytes, rounded->output.bytes) << "what enters down";

    client::GroupedMatmulCall stack = {.stack = Stack("up", {0, 1}, activations),
                                       .activations = call.activations};
    stack.routing = ToBoth(false);
    stack.activation_quantization = how;
    stack.output_dtype = v1::FP32;
    const auto rows = client_->GroupedQuantizedMatmul(stack);
    stack.activations = round.codes;
    stack.activation_scales = round.scales;
    stack.activation_quantization = v1::ACTIVATIONS_AS_SENT;
    const auto same_rows = client_->GroupedQuantizedMatmul(stack);
    ASSERT_TRUE(rows.ok() && same_rows.ok()) << rows.status() << same_rows.status();
    EXPECT_EQ(same_rows->output.bytes, rows->output.bytes);
    stack.activation_scales = Scales({1, 1});
    EXPECT_THAT(client_->GroupedQuantizedMatmul(stack).status().message(),
                HasSubstr("activation_scales.shape: got [2], expected ["));
  }
}

TEST_F(Fp8ActivationsTest, OfMixturesSayWhatIsWrong) {
  const auto refused = [&](const std::function<void(client::GatedMlpCall*)>& spoil) {
    auto call = Mixture("fp8_dynamic");
    spoil(&call);
    const auto y = client_->GatedMlp(call);
    EXPECT_EQ(y.status().code(), absl::StatusCode::kInvalidArgument) << y.status();
    return std::string(y.status().message());
  };
  using Call = client::GatedMlpCall;
  EXPECT_THAT(refused([](Call* c) { c->activation_quantization = v1::INT8_PER_TOKEN; }),
              HasSubstr("activation_quantization: got INT8_PER_TOKEN, expected "
                        "ACTIVATIONS_AS_SENT, ACTIVATIONS_FLOATING, FP8_PER_TOKEN"));
  EXPECT_THAT(refused([](Call* c) {
                c->activation_quantization = v1::FP8_STATIC;
                c->activation_scales = Scales({1});
              }),
              HasSubstr("down_activation_scales: got nothing"));
  EXPECT_THAT(
      refused([](Call* c) { c->down_activation_scales = Scales({1}); }),
      HasSubstr("down_activation_scales: got a tensor, expected none with FP8_AS_DECLARED"));
  EXPECT_THAT(refused([](Call* c) {
                c->activation_quantization = v1::FP8_STATIC;
                c->activation_scales = Scales({1, 1});
                c->down_activation_scales = Scales({1});
              }),
              HasSubstr("activation_scales.shape: got [2], expected one element, or 2, one for "
                        "each expert, and one for the shared one"));
  EXPECT_THAT(refused([](Call* c) {
                c->activation_quantization = v1::FP8_STATIC;
                c->activation_scales = Scales({1});
                c->down_activation_scales = Scales({-1});
              }),
              HasSubstr("down_activation_scales: got -1 at element 0"));
  EXPECT_THAT(refused([](Call* c) {
                auto* experts = std::get<v1::PackedGatedMlp>(c->mlp).mutable_gate();
                (*experts->mutable_experts(1)->mutable_settings())["activations"] = "fp8_blocks";
              }),
              HasSubstr("the experts of gate declare several"));
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
