// Gated MLPs as models have them, through the real server, against transformers' own modules:
// activation functions with their constants, biases, routers, shared experts.
#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/files/npy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/inference/golden_models.h"
#include "tests/e2e/server_test.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using client::GatedMlpCall;
using client::Tensor;
using ::testing::HasSubstr;

std::string Npy(const std::string& name) {
  return DataPath("experts/blocks_goldens/" + name + ".npy");
}

Tensor Read(const std::string& name) { return ReadTensor(Npy(name)); }

const nlohmann::json& Cases() {
  static const auto* const cases = new nlohmann::json(
      nlohmann::json::parse(std::ifstream(DataPath("experts/blocks_goldens/cases.json")))["cases"]);
  return *cases;
}

class BlocksFixture : public SharedServerTest {
 protected:
  void SetUp() override {
    const std::string folder = *repository_ / "blocks";
    if (std::filesystem::exists(folder)) return;
    std::filesystem::copy(DataPath("experts/blocks"), folder);
    ASSERT_TRUE(client_->LoadModel("blocks").ok());
  }

  static client::Router RouterOf(const nlohmann::json& from) {
    client::Router out = {.logits = Read("logits"),
                          .top_k = from["top_k"],
                          .n_group = from.value("n_group", 0),
                          .topk_group = from.value("topk_group", 0),
                          .norm_topk_prob = from.value("norm_topk_prob", false),
                          .routed_scaling_factor = from.value("routed_scaling_factor", 1.0f)};
    EXPECT_TRUE(v1::RouterScoring_Parse(from["scoring"].get<std::string>(), &out.scoring));
    if (from.value("correction_bias", false)) out.correction_bias = Read("correction_bias");
    return out;
  }

  static GatedMlpCall CallOf(const nlohmann::json& from) {
    const bool dense = from.value("dense", false);
    v1::GatedMlpRef mlp;
    mlp.set_model("blocks");
    mlp.set_path(dense ? "mlp.shared_experts" : "mlp.experts.*");
    if (from.value("shared_expert", false)) mlp.set_shared_expert("mlp.shared_experts");
    GatedMlpCall out = {.mlp = mlp, .activations = Read("x"), .output_dtype = v1::FP32};
    EXPECT_TRUE(v1::ActivationFunction_Parse(from["activation_function"].get<std::string>(),
                                             &out.activation_function));
    const nlohmann::json constants = from.value("activation", nlohmann::json::object());
    v1::ActivationParameters& to = out.activation_parameters;
    if (constants.contains("limit")) to.set_limit(constants["limit"]);
    if (constants.contains("alpha")) to.set_alpha(constants["alpha"]);
    if (constants.contains("beta")) to.set_beta(constants["beta"]);
    if (constants.contains("linear_beta")) to.set_linear_beta(constants["linear_beta"]);
    if (from.value("biases", false)) {
      out.gate_bias = Read("gate_bias");
      out.up_bias = Read("up_bias");
      out.down_bias = Read("down_bias");
    }
    if (!dense) out.router = RouterOf(from["router"]);
    if (from.value("shared_expert_gate", false)) {
      out.shared_expert_gate = Read("shared_expert_gate");
    }
    return out;
  }

  // The weights of a projection whose path has '*' for the expert's number, or none.
  static v1::PackedStack Packed(const std::string& path) {
    v1::PackedStack out;
    const bool stack = absl::StrContains(path, "*");
    for (int e = 0; e < (stack ? 8 : 1); ++e) {
      const std::string weight = absl::StrReplaceAll(path, {{"*", absl::StrCat(e)}});
      *out.add_experts() =
          InlineOf({.folder = "experts", .format = "experts", .model = "blocks", .weight = weight});
      out.mutable_experts(e)->set_format("awq");
    }
    return out;
  }
  static v1::PackedGatedMlp PackedMlp(const std::string& path) {
    v1::PackedGatedMlp out;
    *out.mutable_gate() = Packed(path + ".gate_proj");
    *out.mutable_up() = Packed(path + ".up_proj");
    *out.mutable_down() = Packed(path + ".down_proj");
    return out;
  }

  static double ErrorOf(const Tensor& got, const std::string& golden) {
    return RelativeError(got, client::ReadNpy(Npy(golden))->ToDoubles());
  }
};

class BlocksTest : public BlocksFixture, public ::testing::WithParamInterface<std::string> {};

TEST_P(BlocksTest, IsThatOfTransformers) {
  for (v1::Path path : {v1::AUTO, v1::FUSED, v1::DEQUANTIZE}) {
    GatedMlpCall call = CallOf(Cases()[GetParam()]);
    call.path = path;
    const auto y = client_->GatedMlp(std::move(call));
    ASSERT_TRUE(y.ok()) << y.status();
    EXPECT_LE(ErrorOf(y->output, GetParam()), 1e-3);
  }
}

TEST_P(BlocksTest, AwqctlSendsEveryField) {
  const nlohmann::json& from = Cases()[GetParam()];
  const bool dense = from.value("dense", false);
  const std::string out = *repository_ / "y.npy";
  const auto word = [](const nlohmann::json& json) {
    return absl::AsciiStrToLower(json.get<std::string>());
  };
  std::vector<std::string> args = {"mlp",
                                   "blocks",
                                   dense ? "mlp.shared_experts" : "mlp.experts.*",
                                   Npy("x"),
                                   "-o",
                                   out,
                                   "--output_dtype",
                                   "fp32",
                                   "--activation_function",
                                   word(from["activation_function"])};
  const auto add = [&](const std::string& flag, const std::string& value) {
    args.insert(args.end(), {"--" + flag, value});
  };
  const nlohmann::json constants = from.value("activation", nlohmann::json::object());
  for (const auto& [name, value] : constants.items()) add("activation_" + name, value.dump());
  if (from.value("biases", false)) {
    for (const char* name : {"gate_bias", "up_bias", "down_bias"}) add(name, Npy(name));
  }
  if (!dense) {
    add("router_logits", Npy("logits"));
    for (const auto& [name, value] : from["router"].items()) {
      if (name == "scoring") {
        add(name, word(value));
      } else if (name == "correction_bias") {
        add(name, Npy(name));
      } else if (name == "norm_topk_prob") {
        args.push_back("--" + name);
      } else {
        add(name, value.dump());
      }
    }
  }
  if (from.value("shared_expert", false)) add("shared_expert", "mlp.shared_experts");
  if (from.value("shared_expert_gate", false)) {
    add("shared_expert_gate", Npy("shared_expert_gate"));
  }
  const ExitReport report = server_->Awqctl(std::move(args));
  ASSERT_EQ(report.code, 0) << report.log;
  EXPECT_LE(ErrorOf(ReadTensor(out), GetParam()), 1e-3);
}

std::vector<std::string> CaseNames() {
  std::vector<std::string> out;
  for (const auto& [name, request] : Cases().items()) out.push_back(name);
  return out;
}
INSTANTIATE_TEST_SUITE_P(Transformers, BlocksTest, ::testing::ValuesIn(CaseNames()),
                         [](const auto& info) { return info.param; });

class RoutersTest : public BlocksFixture {};

TEST_F(RoutersTest, ProductsOfOneStackTakeThemToo) {
  client::GroupedMatmulCall call = {.stack = client::WeightName{"blocks", "mlp.experts.*.up_proj"},
                                    .activations = Read("x"),
                                    .output_dtype = v1::FP32};
  call.router = RouterOf(Cases()["deepseek_v3"]["router"]);
  call.router->top_k = 1;
  call.router->routed_scaling_factor = 1;  // the one weight is 1
  const auto routed = client_->GroupedQuantizedMatmul(call);
  ASSERT_TRUE(routed.ok()) << routed.status();
  EXPECT_THAT(routed->output.shape, ::testing::ElementsAre(11, 96));
  call.router->top_k = 65;
  EXPECT_THAT(client_->GroupedQuantizedMatmul(call).status().message(),
              HasSubstr("router.top_k: got 65, expected 1 to 4"));
}

TEST_F(RoutersTest, SharedExpertsMayComeInTheRequest) {
  for (const char* name : {"deepseek_v3", "qwen2_moe"}) {
    v1::PackedGatedMlp packed = PackedMlp("mlp.experts.*");
    *packed.mutable_shared_expert() = PackedMlp("mlp.shared_experts");
    GatedMlpCall call = CallOf(Cases()[name]);
    call.mlp = packed;
    const auto y = client_->GatedMlp(call);
    ASSERT_TRUE(y.ok()) << y.status();
    EXPECT_LE(ErrorOf(y->output, name), 1e-3);
    packed.mutable_shared_expert()->mutable_down()->mutable_experts(0)->set_group_size(7);
    call.mlp = packed;
    EXPECT_THAT(client_->GatedMlp(call).status().message(),
                HasSubstr("packed.shared_expert.down.experts[0]"));
  }
}

// Requests of several callers with one layer's router run as one batch.
TEST_F(RoutersTest, ManyCallersMerge) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong = 0, merged = 0;
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back([&] {
      const auto client = server_->NewClient();
      for (int call = 0; call < 10; ++call) {
        const auto y = client->GatedMlp(CallOf(Cases()["qwen2_moe"]));
        if (!y.ok() || ErrorOf(y->output, "qwen2_moe") > 1e-3) ++wrong;
        if (y.ok() && y->execution.batch_requests() > 1) ++merged;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(merged, 0);
}

TEST_F(RoutersTest, SharedExpertsAreFoundByName) {
  GatedMlpCall call = CallOf(Cases()["deepseek_v3"]);
  std::get<v1::GatedMlpRef>(call.mlp).set_shared_expert("mlp.none");
  const absl::Status status = client_->GatedMlp(std::move(call)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("mlp.none.gate_proj"));
}

}  // namespace
}  // namespace awqd
