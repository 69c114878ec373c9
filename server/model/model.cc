// Finding weights and stacks by path, explaining what is not there, and counting losses.
#include "server/model/model.h"

#include <optional>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/checkpoint/file.h"

namespace awqd::model {
namespace {

// Up to five paths, the most similar ones first.
std::string Suggestions(const PathIndex& paths, absl::string_view wanted) {
  return absl::StrJoin(paths.MostLike(wanted), ", ", [](std::string* out, absl::string_view path) {
    absl::StrAppend(out, Quoted(path));
  });
}

// Why the model has no weight of that path.
std::string ExplainNoWeight(const Model& model, absl::string_view wanted) {
  const std::string others = Suggestions(model.weight_paths, wanted);
  const auto stack = model.stacks.find(wanted);
  if (stack == model.stacks.end()) {
    return absl::StrCat("no weight ", Quoted(wanted), " among ", model.weights.size(),
                        "; there are ", others);
  }
  if (!stack->second.ok()) {
    return absl::StrCat("got the path of a stack, expected one weight such as ", others, "; ",
                        stack->second.status().message());
  }
  const size_t experts = (*stack->second)->experts.size();
  return absl::StrCat("got ", Quoted(wanted), ", a stack of ", experts,
                      experts == 1 ? " expert" : " experts",
                      " that GroupedQuantizedMatmul takes, expected one weight such as ", others);
}

// Why the model has no stack of that path.
std::string ExplainNoStack(const Model& model, absl::string_view wanted) {
  const std::string others =
      model.stacks.empty() ? "the model has none"
                           : absl::StrCat("there are ", Suggestions(model.stack_paths, wanted));
  if (model.weights.find(wanted) == model.weights.end()) {
    return absl::StrCat("no stack ", Quoted(wanted), " among ", model.stacks.size(), "; ", others);
  }
  const std::optional<ExpertPath> expert = ParseExpertPath(wanted);
  return absl::StrCat(
      "got the path of one weight, ", Quoted(wanted), ", expected a stack",
      expert ? absl::StrCat(" such as ", Quoted(expert->stack)) : absl::StrCat("; ", others));
}

bool IsLost(const PlacedWeight& weight) {
  const auto dead = [](const WeightPart& part) { return !part.weight->device->healthy(); };
  return weight.partitioned() ? absl::c_any_of(weight.parts, dead)
                              : absl::c_all_of(weight.parts, dead);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const PlacedWeight>> Model::FindWeight(
    absl::string_view path) const {
  const auto it = weights.find(path);
  if (it != weights.end()) return it->second;
  return absl::NotFoundError(absl::StrCat("model \"", name, "\": ", ExplainNoWeight(*this, path)));
}

absl::StatusOr<std::shared_ptr<const WeightStack>> Model::FindStack(absl::string_view path) const {
  const std::string prefix = absl::StrCat("model \"", name, "\"");
  const auto it = stacks.find(path);
  if (it == stacks.end()) {
    return absl::NotFoundError(absl::StrCat(prefix, ": ", ExplainNoStack(*this, path)));
  }
  if (!it->second.ok()) return Prefixed(prefix, it->second.status());
  return *it->second;
}

std::string Losses::Message() const {
  if (devices.empty()) return "";
  if (weights == 0) return absl::StrCat("failed: ", devices, "; the model serves without");
  return absl::StrCat("failed: ", devices, ", and with it ", weights,
                      weights == 1 ? " weight" : " weights",
                      "; loading the model again puts it on the devices that are left");
}

Losses FindLosses(const Model& model) {
  Losses out;
  for (const auto& [device, bytes] : model.bytes_on) {
    if (device->healthy()) continue;
    absl::StrAppend(&out.devices, out.devices.empty() ? "" : ",", device->info().id);
  }
  if (out.devices.empty()) return out;
  out.weights = absl::c_count_if(model.weights, [](const auto& w) { return IsLost(*w.second); });
  return out;
}

}  // namespace awqd::model
