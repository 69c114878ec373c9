// Reading, decoding, preparing and freeing, a few weights at a time.
#include "server/model/model_loader.h"

#include <map>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint.h"
#include "server/model/readers.h"

namespace awqd::model {
namespace {

// The remedy for an operator.
std::string Advice(const LoadTarget& target) {
  if (target.devices.size() < 2 || target.shared()) {
    return " (a reload needs room for both versions)";
  }
  return " (a reload needs room for both versions; --shard=columns or --shard=models takes less of "
         "each device)";
}

// Plans the load, and tells of the plan.
absl::StatusOr<MemoryPlan> Plan(const Checkpoint& checkpoint, const std::string& name,
                                const LoadTarget& target, const std::atomic<bool>& cancelled,
                                const ProgressSinks& sinks) {
  absl::StatusOr<MemoryPlan> plan = PlanLoad(checkpoint, target, cancelled);
  if (absl::IsResourceExhausted(plan.status())) {
    return absl::ResourceExhaustedError(
        absl::StrCat("model \"", name, "\": ", plan.status().message(), Advice(target)));
  }
  if (!plan.ok()) return plan.status();
  if (sinks.planned_bytes != nullptr) *sinks.planned_bytes = plan->device_bytes();
  if (sinks.log) sinks.log(absl::StrCat("model \"", name, "\": needs ", plan->ToString()));
  return plan;
}

absl::StatusOr<std::shared_ptr<const PlacedWeight>> LoadWeight(const Checkpoint& checkpoint,
                                                               const LinearLocation& linear,
                                                               const LoadTarget& target,
                                                               const Paths& paths,
                                                               std::vector<uint8_t>* scratch) {
  AWQD_ASSIGN_OR_RETURN(const HostWeight weight, checkpoint.Read(linear, scratch));
  const Place place = ChoosePlace(linear.path, paths, target);
  auto out = PlaceWeight(weight, place.devices, place.placing);
  if (out.ok()) {
    auto counting = std::make_shared<PlacedWeight>(**out);
    counting->statistics = target.statistics;
    return counting;
  }
  const absl::Status& status = out.status();
  return absl::Status(status.code(),
                      absl::StrCat("weight ", Quoted(linear.path), ": ", status.message(),
                                   absl::IsResourceExhausted(status) ? Advice(target) : ""));
}

void AddWeight(const std::string& path, std::shared_ptr<const PlacedWeight> weight, Model* model) {
  for (const WeightPart& part : weight->parts) {
    model->bytes_on[part.weight->device] += part.weight->bytes();
  }
  model->device_bytes += weight->bytes();
  model->weights.emplace(path, std::move(weight));
}

// Experts that make no stack still serve as weights, so that none of this fails a load.
absl::Status AddStacks(Sharding sharding, const std::atomic<bool>& cancelled, Model* model) {
  std::map<std::string, std::map<int64_t, std::shared_ptr<const PlacedWeight>>> stacks;
  for (const auto& [path, weight] : model->weights) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(&cancelled));
    const std::optional<ExpertPath> expert = ParseExpertPath(path);
    if (expert) stacks[expert->stack].emplace(expert->expert, weight);
  }
  for (const auto& [path, experts] : stacks) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(&cancelled));
    model->stacks.emplace(path, MakeStack(path, experts, sharding == Sharding::kExperts));
  }
  return absl::OkStatus();
}

// `paths`: a map by path.
template <typename Map>
PathIndex MakeIndex(const Map& paths) {
  std::vector<absl::string_view> out;
  out.reserve(paths.size());
  for (const auto& [path, value] : paths) out.push_back(path);
  return PathIndex(std::move(out));
}

// Reads, decodes and places all linears, as many at a time as `plan` says.
absl::Status LoadAll(const Checkpoint& checkpoint, const LoadTarget& target, const MemoryPlan& plan,
                     const std::atomic<bool>& cancelled, Progress* progress, Model* model) {
  const Paths paths = CollectPaths(checkpoint);
  const absl::Span<const LinearLocation> linears = checkpoint.linears();
  std::vector<std::vector<uint8_t>> scratch(plan.readers);
  Mutex mu;
  return RunOnReaders(
      plan.readers, static_cast<int64_t>(linears.size()), [&](int reader, int64_t i) {
        if (cancelled) {
          return absl::UnavailableError(absl::StrCat(
              "model \"", model->name, "\": load cancelled, the server is shutting down"));
        }
        const LinearLocation& linear = linears[i];
        auto weight = LoadWeight(checkpoint, linear, target, paths, &scratch[reader]);
        if (!weight.ok()) return weight.status();
        MutexLock lock(&mu);
        AddWeight(linear.path, *std::move(weight), model);
        progress->AddWeight(linear.bytes);
        return absl::OkStatus();
      });
}

absl::StatusOr<std::shared_ptr<Model>> LoadWeights(const RepositoryRoot& root,
                                                   const std::string& path, const std::string& name,
                                                   const LoadTarget& target,
                                                   const std::atomic<bool>& cancelled,
                                                   const ProgressSinks& sinks) {
  AWQD_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(root, path, &cancelled));
  if (const auto weights = static_cast<int64_t>(checkpoint.linears().size());
      weights > target.max_weights) {
    return absl::ResourceExhaustedError(absl::StrCat("model \"", name, "\": got ", weights,
                                                     " quantised linears, expected at most ",
                                                     target.max_weights));
  }
  AWQD_ASSIGN_OR_RETURN(const MemoryPlan plan, Plan(checkpoint, name, target, cancelled, sinks));
  if (sinks.log && !checkpoint.note().empty()) {
    sinks.log(absl::StrCat("model \"", name, "\": ", checkpoint.note()));
  }
  auto model = std::make_shared<Model>();
  model->name = name;
  model->quant_method = checkpoint.quant_method();
  model->ignored_tensors = checkpoint.ignored_tensors();
  Progress progress(name, checkpoint.total_bytes(),
                    static_cast<int64_t>(checkpoint.linears().size()), sinks, absl::Now);
  AWQD_RETURN_IF_ERROR(LoadAll(checkpoint, target, plan, cancelled, &progress, model.get()));
  AWQD_RETURN_IF_ERROR(checkpoint.CheckUnchanged(root));
  AWQD_RETURN_IF_ERROR(AddStacks(target.sharding, cancelled, model.get()));
  model->weight_paths = MakeIndex(model->weights);
  model->stack_paths = MakeIndex(model->stacks);
  model->load_ms = absl::ToInt64Milliseconds(progress.elapsed());
  return model;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Model>> LoadModel(const RepositoryRoot& root,
                                                 const std::string& path, const std::string& name,
                                                 const LoadTarget& target,
                                                 const std::atomic<bool>& cancelled,
                                                 const ProgressSinks& sinks) {
  // The standard library reports exhausted host memory in no other way.
  try {
    return LoadWeights(root, path, name, target, cancelled, sinks);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        absl::StrCat("model \"", name, "\": host memory ran out while it was loaded"));
  }
}

}  // namespace awqd::model
