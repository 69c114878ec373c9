// Loaded weights by name, inline ones packed together on one device.
#include "server/services/weight_lookup.h"

#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

absl::StatusOr<StackPtr> FindStack(const Env& env, const std::string& model,
                                   const std::string& path) {
  absl::StatusOr<StackPtr> stack = env.models->FindStack(model, path);
  if (!stack.ok()) return UnavailableWhileStarting(env, model, stack.status());
  return stack;
}

// Packs a stack on `*device`; the first weight chooses it where that is null.
absl::StatusOr<StackPtr> PackStack(const Env& env, const v1::PackedStack& packed,
                                   absl::string_view field, const Device** device) {
  AWQD_ASSIGN_OR_RETURN(const std::vector<HostWeight> weights, wire::DecodePacked(packed, field));
  std::map<int64_t, WeightPtr> experts;
  for (const HostWeight& weight : weights) {
    AWQD_ASSIGN_OR_RETURN(WeightPtr placed, env.engine->Prepare(weight, *device));
    *device = placed->parts.front().weight->device;
    experts.emplace(static_cast<int64_t>(experts.size()), std::move(placed));
  }
  absl::StatusOr<StackPtr> stack = model::MakeStack(std::string(field), experts);
  if (stack.ok()) return stack;
  // A checkpoint's experts are as they are; a request's can be mended.
  return wire::WithField(absl::InvalidArgumentError(stack.status().message()), field);
}

// A projection by its own path, or by the common one.
std::string ProjectionPath(const v1::GatedMlpRef& mlp, const std::string& own,
                           absl::string_view name) {
  return own.empty() ? absl::StrCat(mlp.path(), ".", name) : own;
}

}  // namespace

absl::Status UnavailableWhileStarting(const Env& env, absl::string_view model,
                                      const absl::Status& status) {
  if (!absl::IsNotFound(status) || !env.starting.load()) return status;
  return absl::UnavailableError(absl::StrCat("model \"", model,
                                             "\": the server is still loading its models; try "
                                             "again when its health is SERVING"));
}

absl::StatusOr<WeightPtr> WeightLookup::FindRef(const Env& env, const v1::WeightRef& ref) {
  absl::StatusOr<WeightPtr> weight = env.models->FindWeight(ref.model(), ref.weight());
  if (!weight.ok()) return UnavailableWhileStarting(env, ref.model(), weight.status());
  return weight;
}

absl::StatusOr<WeightPtr> WeightLookup::Pack(const Env& env, const v1::PackedWeight& packed) {
  AWQD_ASSIGN_OR_RETURN(const HostWeight weight, wire::DecodePacked(packed));
  return env.engine->Prepare(weight);
}

absl::StatusOr<StackPtr> StackLookup::Find(const Env& env,
                                           const v1::GroupedQuantizedMatmulRequest& request) {
  return FindStack(env, request.weight().model(), request.weight().weight());
}

absl::StatusOr<StackPtr> StackLookup::Pack(const Env& env, const v1::PackedStack& packed) {
  const Device* device = nullptr;
  return PackStack(env, packed, "packed", &device);
}

absl::StatusOr<wire::MlpStacks> MlpLookup::Find(const Env& env,
                                                const v1::GatedMlpRequest& request) {
  const v1::GatedMlpRef& mlp = request.mlp();
  const std::string gate = ProjectionPath(mlp, mlp.gate(), "gate_proj");
  wire::MlpStacks out = {.experts = absl::StrContains(gate, "*")};
  const auto find = [&](const std::string& path) -> absl::StatusOr<StackPtr> {
    if (out.experts) return FindStack(env, mlp.model(), path);
    AWQD_ASSIGN_OR_RETURN(WeightPtr weight, env.models->FindWeight(mlp.model(), path));
    return model::StackOfOne(std::move(weight));
  };
  const auto found = [&]() -> absl::Status {
    AWQD_ASSIGN_OR_RETURN(out.gate, find(gate));
    AWQD_ASSIGN_OR_RETURN(out.up, find(ProjectionPath(mlp, mlp.up(), "up_proj")));
    AWQD_ASSIGN_OR_RETURN(out.down, find(ProjectionPath(mlp, mlp.down(), "down_proj")));
    if (mlp.shared_expert().empty()) return absl::OkStatus();
    for (const auto& [name, stack] : {std::pair("gate_proj", &out.shared.gate),
                                      {"up_proj", &out.shared.up},
                                      {"down_proj", &out.shared.down}}) {
      AWQD_ASSIGN_OR_RETURN(
          WeightPtr weight,
          env.models->FindWeight(mlp.model(), absl::StrCat(mlp.shared_expert(), ".", name)));
      *stack = model::StackOfOne(std::move(weight));
    }
    return absl::OkStatus();
  }();
  if (!found.ok()) return UnavailableWhileStarting(env, mlp.model(), found);
  return out;
}

absl::StatusOr<wire::MlpStacks> MlpLookup::Pack(const Env& env, const v1::PackedGatedMlp& packed) {
  const Device* device = nullptr;
  wire::MlpStacks out = {.experts = packed.gate().experts_size() > 1};
  AWQD_ASSIGN_OR_RETURN(out.gate, PackStack(env, packed.gate(), "packed.gate", &device));
  AWQD_ASSIGN_OR_RETURN(out.up, PackStack(env, packed.up(), "packed.up", &device));
  AWQD_ASSIGN_OR_RETURN(out.down, PackStack(env, packed.down(), "packed.down", &device));
  if (!packed.has_shared_expert()) return out;
  const v1::PackedGatedMlp& shared = packed.shared_expert();
  for (const auto& [name, from, stack] : {std::tuple("gate", &shared.gate(), &out.shared.gate),
                                          {"up", &shared.up(), &out.shared.up},
                                          {"down", &shared.down(), &out.shared.down}}) {
    const std::string field = absl::StrCat("packed.shared_expert.", name);
    AWQD_ASSIGN_OR_RETURN(*stack, PackStack(env, *from, field, &device));
  }
  return out;
}

LogName MlpLookup::Name(const v1::GatedMlpRequest& request) {
  const v1::GatedMlpRef& mlp = request.mlp();
  return {mlp.model(), mlp.path().empty() ? mlp.gate() : mlp.path()};
}

}  // namespace awqd::services
