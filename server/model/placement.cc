// The rules of --shard.
#include "server/model/placement.h"

#include <optional>

#include "kernels/checkpoint/experts.h"
#include "server/model/mlp_paths.h"

namespace awqd::model {
namespace {

Placing PlacingOf(absl::string_view path, const Paths& paths, Sharding sharding) {
  if (sharding != Sharding::kColumns) return Placing::kWhole;
  switch (MlpRoleOf(path, paths)) {
    case MlpRole::kGateOrUp:
      return Placing::kMiddleColumns;
    case MlpRole::kDown:
      return Placing::kMiddleRows;
    case MlpRole::kNone:
      return Placing::kColumns;
  }
  return Placing::kColumns;
}

absl::Span<Device* const> DevicesOf(absl::string_view path, const LoadTarget& target) {
  const absl::Span<Device* const> all = target.devices;
  if (target.sharding != Sharding::kExperts) return all;
  const std::optional<ExpertPath> expert = ParseExpertPath(path);
  return expert ? all.subspan(expert->expert % target.devices.size(), 1) : all;
}

}  // namespace

Paths PathsOf(const Checkpoint& checkpoint) {
  Paths out;
  for (const LinearLocation& linear : checkpoint.linears()) out.insert(linear.path);
  return out;
}

Place PlaceOf(absl::string_view path, const Paths& paths, const LoadTarget& target) {
  return {DevicesOf(path, target), PlacingOf(path, paths, target.sharding)};
}

}  // namespace awqd::model
