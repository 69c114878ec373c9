// The rules of --shard.
#include "server/model/placement.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/checkpoint/experts.h"

namespace awqd::model {
namespace {

// The names that checkpoints give to gate, up and down.
constexpr absl::string_view kNames[][3] = {
    {"gate_proj", "up_proj", "down_proj"},                 // Llama, Qwen, DeepSeek
    {"w1", "w3", "w2"},                                    // Mixtral, Phi's mixtures
    {"ffn_gate", "ffn_up", "ffn_down"},                    // GGUF
    {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"},     // GGUF, of experts
    {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"},  // GGUF, of shared experts
};

Placing ChoosePlacing(absl::string_view path, const Paths& paths, Sharding sharding) {
  if (sharding != Sharding::kColumns) return Placing::kWhole;
  switch (FindMlpRole(path, paths)) {
    case MlpRole::kGateOrUp:
      return Placing::kMlpColumns;
    case MlpRole::kDown:
      return Placing::kMlpRows;
    case MlpRole::kNone:
      return Placing::kColumns;
  }
  return Placing::kColumns;
}

absl::Span<Device* const> ChooseDevices(absl::string_view path, const LoadTarget& target) {
  const absl::Span<Device* const> all = target.devices;
  if (target.sharding != Sharding::kExperts) return all;
  const std::optional<ExpertPath> expert = ParseExpertPath(path);
  return expert ? all.subspan(expert->expert % target.devices.size(), 1) : all;
}

}  // namespace

MlpRole FindMlpRole(absl::string_view path, const Paths& paths) {
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

Paths CollectPaths(const Checkpoint& checkpoint) {
  Paths out;
  for (const LinearLocation& linear : checkpoint.linears()) out.insert(linear.path);
  return out;
}

Place ChoosePlace(absl::string_view path, const Paths& paths, const LoadTarget& target) {
  return {ChooseDevices(path, target), ChoosePlacing(path, paths, target.sharding)};
}

}  // namespace awqd::model
