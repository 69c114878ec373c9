// The names that checkpoints give to the projections of a gated MLP.
#include "server/model/mlp_paths.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace awqd::model {
namespace {

// Gate, up, down.
constexpr absl::string_view kNames[][3] = {
    {"gate_proj", "up_proj", "down_proj"},                 // Llama, Qwen, DeepSeek
    {"w1", "w3", "w2"},                                    // Mixtral, Phi's mixtures
    {"ffn_gate", "ffn_up", "ffn_down"},                    // GGUF
    {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"},     // GGUF, of experts
    {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"},  // GGUF, of shared experts
};

}  // namespace

MlpRole MlpRoleOf(absl::string_view path, const std::set<std::string, std::less<>>& paths) {
  std::vector<absl::string_view> components = absl::StrSplit(path, '.');
  for (absl::string_view& component : components) {
    const absl::string_view own = component;
    for (const auto& row : kNames) {
      const auto* const found = std::find(std::begin(row), std::end(row), own);
      if (found == std::end(row)) continue;
      const bool complete = std::all_of(std::begin(row), std::end(row), [&](auto name) {
        component = name;
        return paths.contains(absl::StrJoin(components, "."));
      });
      component = own;
      if (complete) return found == &row[2] ? MlpRole::kDown : MlpRole::kGateOrUp;
    }
  }
  return MlpRole::kNone;
}

}  // namespace awqd::model
