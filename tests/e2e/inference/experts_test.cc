// Mixtures of experts and gated MLPs through the real server, against goldens from numpy: from a
// checkpoint's folder and inline, alone and merged, and refusals.
#include <atomic>
#include <filesystem>
#include <map>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/files/npy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/inference/golden_models.h"
#include "tests/e2e/server_test.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using client::GatedMlpCall;
using client::GroupedMatmulCall;
using client::MatmulResult;
using client::Routing;
using client::Tensor;
using client::WeightName;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kExperts = 5;
constexpr char kGate[] = "moe.experts.*.gate_proj";

std::string Data(const std::string& name) { return DataPath("experts/" + name); }

std::string Npy(const std::string& name) { return Data("goldens/" + name + ".npy"); }

Tensor Read(const std::string& name) { return ReadTensor(Npy(name)); }

double ErrorOf(const Tensor& got, const std::string& golden) {
  return RelativeError(got, client::ReadNpy(Npy(golden))->ToDoubles());
}

class ExpertsTest : public SharedServerTest {
 protected:
  void SetUp() override {
    const std::string folder = *repository_ / "moe";
    if (std::filesystem::exists(folder)) return;
    std::filesystem::copy(Data("moe"), folder);
    ASSERT_TRUE(client_->LoadModel("moe").ok());
  }

  static Routing Routed(bool summed) {
    Routing out = {Read("ids")};
    if (summed) out.router_weights = Read("router");
    return out;
  }
  static GroupedMatmulCall Grouped(bool summed) {
    return {.stack = WeightName{"moe", kGate},
            .activations = Read("x"),
            .routing = Routed(summed),
            .activation_function = v1::SILU};
  }
  static v1::GatedMlpRef Path(const std::string& path) {
    v1::GatedMlpRef out;
    out.set_model("moe");
    out.set_path(path);
    return out;
  }
  static GatedMlpCall Mlp(bool summed) {
    return {.mlp = Path("moe.experts.*"), .activations = Read("x"), .routing = Routed(summed)};
  }
  static v1::PackedStack Packed(const std::string& projection) {
    v1::PackedStack out;
    for (int e = 0; e < kExperts; ++e) {
      const bool stacked = projection == "down_proj";
      const GoldenCase golden = {.folder = "experts",
                                 .format = "experts",
                                 .model = "moe",
                                 .weight = stacked
                                               ? "moe.experts." + projection
                                               : absl::StrCat("moe.experts.", e, ".", projection)};
      *out.add_experts() = InlineOf(golden);
      out.mutable_experts(e)->set_format("awq");
      if (stacked) TakeExpert(e, out.mutable_experts(e));
    }
    return out;
  }
  // Reduces tensors of all experts to one expert.
  static void TakeExpert(int expert, v1::PackedWeight* packed) {
    for (auto& [name, tensor] : *packed->mutable_tensors()) {
      const size_t each = tensor.raw().size() / kExperts;
      tensor.set_raw(tensor.raw().substr(expert * each, each));
      tensor.mutable_shape()->erase(tensor.mutable_shape()->begin());
    }
  }

  static void ExpectGolden(const absl::StatusOr<MatmulResult>& got, const std::string& golden) {
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_LE(ErrorOf(got->output, golden), 1e-3) << golden;
  }
};

TEST_F(ExpertsTest, AreListedAsStacks) {
  const auto model = client_->GetModel("moe");
  ASSERT_TRUE(model.ok()) << model.status();
  std::map<std::string, v1::StackInfo> stacks;
  for (const v1::StackInfo& stack : model->stacks()) stacks[stack.path()] = stack;
  ASSERT_EQ(stacks.size(), 5u);
  EXPECT_EQ(stacks[kGate].experts(), kExperts);
  EXPECT_EQ(stacks[kGate].k(), 64);
  EXPECT_EQ(stacks[kGate].n(), 96);
  EXPECT_EQ(stacks[kGate].scheme(), "w4g32z");
  EXPECT_EQ(stacks["moe.experts.*.down_proj"].n(), 72);
  EXPECT_THAT(stacks["gap.experts.*.up_proj"].refused(), HasSubstr("expert 1 is missing"));
  EXPECT_THAT(stacks["odd.experts.*.up_proj"].refused(), HasSubstr("N"));
}

TEST_F(ExpertsTest, ProductsAreThoseOfNumpyFromAFolderAndInTheRequest) {
  for (bool in_request : {false, true}) {
    for (v1::Path path : {v1::AUTO, v1::FUSED, v1::DEQUANTIZE}) {
      GroupedMatmulCall call = Grouped(false);
      call.path = path;
      if (in_request) call.stack = Packed("gate_proj");
      const auto rows = client_->GroupedQuantizedMatmul(call);
      ExpectGolden(rows, "grouped");
      EXPECT_THAT(rows->output.shape, ElementsAre(11, 3, 96));
      EXPECT_EQ(rows->execution.batch_tokens(), 33);
      call.routing = Routed(true);
      const auto summed = client_->GroupedQuantizedMatmul(call);
      ExpectGolden(summed, "grouped_summed");
      EXPECT_THAT(summed->output.shape, ElementsAre(11, 96));
    }
  }
}

TEST_F(ExpertsTest, MlpsAreThoseOfNumpyFromAFolderAndInTheRequest) {
  for (bool in_request : {false, true}) {
    GatedMlpCall call = Mlp(false);
    if (in_request) {
      v1::PackedGatedMlp packed;
      *packed.mutable_gate() = Packed("gate_proj");
      *packed.mutable_up() = Packed("up_proj");
      *packed.mutable_down() = Packed("down_proj");
      call.mlp = packed;
    }
    const auto rows = client_->GatedMlp(call);
    ExpectGolden(rows, "mlp");
    EXPECT_THAT(rows->output.shape, ElementsAre(11, 3, 72));
    call.routing = Routed(true);
    ExpectGolden(client_->GatedMlp(call), "mlp_summed");
  }
}

TEST_F(ExpertsTest, AnMlpWithoutExperts) {
  const auto y = client_->GatedMlp({.mlp = Path("mlp"), .activations = Read("x")});
  ExpectGolden(y, "dense_mlp");
  EXPECT_THAT(y->output.shape, ElementsAre(11, 72));
  v1::GatedMlpRef named = Path("");
  named.set_gate("mlp.gate_proj");
  named.set_up("mlp.up_proj");
  named.set_down("mlp.down_proj");
  ExpectGolden(client_->GatedMlp({.mlp = named, .activations = Read("x")}), "dense_mlp");
}

TEST_F(ExpertsTest, NoTokensAtAll) {
  GroupedMatmulCall call = Grouped(true);
  call.activations = {v1::FP16, {0, 64}, ""};
  call.routing = {{v1::INT32, {0, 2}, ""}, Tensor{v1::FP32, {0, 2}, ""}};
  const auto y = client_->GroupedQuantizedMatmul(call);
  ASSERT_TRUE(y.ok()) << y.status();
  EXPECT_THAT(y->output.shape, ElementsAre(0, 96));
}

// The tokens of many clients share batches, and each client gets its own rows.
TEST_F(ExpertsTest, ManyCallersMerge) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong = 0, merged = 0;
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back([&, i] {
      const auto client = server_->NewClient();
      for (int call = 0; call < 10; ++call) {
        const bool mlp = (i + call) % 2 == 0;
        const auto y =
            mlp ? client->GatedMlp(Mlp(true)) : client->GroupedQuantizedMatmul(Grouped(true));
        if (!y.ok() || ErrorOf(y->output, mlp ? "mlp_summed" : "grouped_summed") > 1e-3) ++wrong;
        if (y.ok() && y->execution.batch_requests() > 1) ++merged;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(merged, 0);
}

TEST_F(ExpertsTest, RefusalsNameTheCondition) {
  const auto refused = [&](const std::function<void(GroupedMatmulCall*)>& spoil,
                           absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    GroupedMatmulCall call = Grouped(true);
    spoil(&call);
    const absl::Status status = client_->GroupedQuantizedMatmul(std::move(call)).status();
    EXPECT_EQ(status.code(), code) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused([](auto* c) { c->routing.expert_ids.bytes[4] = 5; }),
              HasSubstr("expert_ids: got 5 at [0, 1], expected 0 to 4"));
  EXPECT_THAT(refused([](auto* c) { c->routing.expert_ids.shape = {33}; }),
              HasSubstr("expert_ids.shape: got [33], expected [11, top_k]"));
  EXPECT_THAT(refused([](auto* c) { c->activations.dtype = v1::INT8; }), HasSubstr("activations"));
  EXPECT_THAT(refused(
                  [](auto* c) {
                    c->stack = WeightName{"moe", "gap.experts.*.up_proj"};
                  },
                  absl::StatusCode::kFailedPrecondition),
              HasSubstr("expert 1 is missing"));
  EXPECT_THAT(refused(
                  [](auto* c) {
                    c->stack = WeightName{"moe", "odd.experts.*.up_proj"};
                  },
                  absl::StatusCode::kFailedPrecondition),
              HasSubstr("odd.experts.*.up_proj"));
  EXPECT_THAT(refused(
                  [](auto* c) {
                    c->stack = WeightName{"moe", "moe.experts.0.gate_proj"};
                  },
                  absl::StatusCode::kNotFound),
              HasSubstr("stack"));
  const absl::Status one =
      client_->QuantizedMatmul({.weight = WeightName{"moe", kGate}, .activations = Read("x")})
          .status();
  EXPECT_EQ(one.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(one.message(), HasSubstr("GroupedQuantizedMatmul"));
  GatedMlpCall dense = {.mlp = Path("mlp"), .activations = Read("x"), .routing = Routed(true)};
  EXPECT_THAT(
      client_->GatedMlp(dense).status().message(),
      HasSubstr("expert_ids: got a tensor, expected none: the projections have no experts"));
  GatedMlpCall unrouted = {.mlp = Path("moe.experts.*"), .activations = Read("x")};
  EXPECT_THAT(client_->GatedMlp(unrouted).status().message(),
              HasSubstr("expert_ids: got nothing, expected an INT32 tensor"));
}

TEST_F(ExpertsTest, AwqctlMultipliesByStacksAndRunsMlps) {
  const auto run = [&](std::vector<std::string> args) {
    const ExitReport report = server_->Awqctl(std::move(args));
    EXPECT_EQ(report.code, 0) << report.log;
    return report.log;
  };
  const std::string out = *repository_ / "y.npy";
  run({"matmul", "moe", kGate, Npy("x"), "--expert_ids", Npy("ids"), "--router_weights",
       Npy("router"), "--activation_function", "silu", "-o", out, "--output_dtype", "fp32"});
  EXPECT_LE(ErrorOf(ReadTensor(out), "grouped_summed"), 1e-3);
  run({"mlp", "moe", "moe.experts.*", Npy("x"), "--expert_ids", Npy("ids"), "-o", out});
  EXPECT_LE(ErrorOf(ReadTensor(out), "mlp"), 1e-3);
  run({"mlp", "moe", "mlp", Npy("x"), "-o", out});
  EXPECT_LE(ErrorOf(ReadTensor(out), "dense_mlp"), 1e-3);
  EXPECT_THAT(run({"matmul", "moe", kGate, "--random", "16", "--top_k", "4"}),
              HasSubstr("FP16 [16, 96]"));
  EXPECT_THAT(run({"mlp", "moe", "moe.experts.*", "--random", "3"}), HasSubstr("FP16 [3, 72]"));
  EXPECT_THAT(run({"models", "moe"}), HasSubstr("moe.experts.*.gate_proj"));
  const std::string mix =
      run({"bench", "--json", "--weight", std::string("moe/") + kGate, "--weight",
           "moe/mlp.up_proj", "--mlp", "moe/moe.experts.*:2", "--mlp", "moe/mlp", "--tokens", "1,5",
           "--concurrency", "4", "--requests", "200", "--warmup", "0"});
  EXPECT_THAT(mix, HasSubstr("\"errors\": {}"));
}

}  // namespace
}  // namespace awqd
