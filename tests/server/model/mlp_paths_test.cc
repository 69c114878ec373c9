// Tells the projections of gated MLPs by the paths of weights.
#include <gtest/gtest.h>

#include "server/model/placement.h"

namespace awqd::model {
namespace {

TEST(MlpRoleTest, ProjectionsAreKnownByTheirNamesAndOneAnother) {
  const std::set<std::string, std::less<>> paths = {
      "layers.0.mlp.gate_proj",  "layers.0.mlp.up_proj",
      "layers.0.mlp.down_proj",  "layers.0.attn.o_proj",
      "layers.1.mlp.up_proj",    "layers.1.mlp.down_proj",
      "moe.experts.3.w1",        "moe.experts.3.w2",
      "moe.experts.3.w3",        "moe.experts.4.w2",
      "blk.0.ffn_gate",          "blk.0.ffn_up",
      "blk.0.ffn_down",          "a.ffn_gate_exps.experts.5",
      "a.ffn_up_exps.experts.5", "a.ffn_down_exps.experts.5"};
  const auto role = [&](absl::string_view path) { return FindMlpRole(path, paths); };
  for (const char* path : {"layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "moe.experts.3.w1",
                           "moe.experts.3.w3", "blk.0.ffn_up", "a.ffn_gate_exps.experts.5"}) {
    EXPECT_EQ(role(path), MlpRole::kGateOrUp) << path;
  }
  for (const char* path : {"layers.0.mlp.down_proj", "moe.experts.3.w2", "blk.0.ffn_down",
                           "a.ffn_down_exps.experts.5"}) {
    EXPECT_EQ(role(path), MlpRole::kDown) << path;
  }
  // The other weights of the MLP are missing.
  for (const char* path : {"layers.0.attn.o_proj", "layers.1.mlp.up_proj", "layers.1.mlp.down_proj",
                           "moe.experts.4.w2"}) {
    EXPECT_EQ(role(path), MlpRole::kNone) << path;
  }
}

}  // namespace
}  // namespace awqd::model
