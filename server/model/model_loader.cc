// Reading, decoding, preparing and freeing, a few weights at a time; the lines and bars of progress.
#include "server/model/model_loader.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint.h"
#include "server/model/readers.h"

namespace awqd::model {
namespace {

constexpr double kMib = 1 << 20;
constexpr int kBarWidth = 30;

// The remedy for an operator.
std::string Advice(const LoadTarget& target) {
  if (target.devices.size() < 2 || target.shared()) {
    return " (a reload needs room for both versions)";
  }
  return " (a reload needs room for both versions; --shard=columns or --shard=models takes less of "
         "each device)";
}

// Plans the load, and tells how much memory it will take.
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
  return plan;
}

// The sinks of a load's progress: before the first line, which only a long load has, the log says
// what the load needs. `sinks` outlives them.
ProgressSinks TellNeedsFirst(const ProgressSinks& sinks, std::string needs) {
  ProgressSinks out = sinks;
  if (!sinks.log) return out;
  out.log = [&sinks, needs = std::move(needs)](absl::string_view line) mutable {
    if (!needs.empty()) sinks.log(std::exchange(needs, ""));
    sinks.log(line);
  };
  return out;
}

absl::StatusOr<std::shared_ptr<const PlacedWeight>> LoadWeight(
    const Checkpoint& checkpoint, const LinearLocation& linear, const LoadTarget& target,
    const Paths& paths, const Arenas& arenas, std::vector<uint8_t>* scratch, PackMemory* memory) {
  AWQD_ASSIGN_OR_RETURN(const HostWeight weight, checkpoint.Read(linear, scratch));
  const Place place = ChoosePlace(linear.path, paths, target);
  auto out = PlaceWeight(weight, place.devices, place.placing, arenas, memory);
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

// Allocates what the plan says that the weights take, and which is exact.
absl::Status MakeArenas(const LoadTarget& target, const MemoryPlan& plan, Model* model) {
  if (!target.lend) return absl::OkStatus();
  for (Device* device : target.devices) {
    const auto planned = plan.weights.find(device);
    if (planned == plan.weights.end()) continue;
    auto arena = WeightArena::Create(*device, planned->second);
    if (!arena.ok()) {
      return absl::Status(
          arena.status().code(),
          absl::StrCat("model \"", model->name, "\": ", arena.status().message(),
                       absl::IsResourceExhausted(arena.status()) ? Advice(target) : ""));
    }
    model->arenas.emplace(device, *std::move(arena));
  }
  return absl::OkStatus();
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

// Reads, decodes and places the linears that `plan` has not given up, as many at a time as it says.
absl::Status LoadAll(const Checkpoint& checkpoint, const LoadTarget& target, const MemoryPlan& plan,
                     const std::atomic<bool>& cancelled, Progress* progress, Model* model) {
  const Paths paths = CollectPaths(checkpoint);
  const absl::Span<const LinearLocation> linears = checkpoint.linears();
  std::vector<std::vector<uint8_t>> scratch(plan.readers);
  std::vector<PackMemory> memory(plan.readers);
  Mutex mu;
  return RunOnReaders(
      plan.readers, static_cast<int64_t>(linears.size()), [&](int reader, int64_t i) {
        if (cancelled) {
          return absl::UnavailableError(absl::StrCat(
              "model \"", model->name, "\": load cancelled, the server is shutting down"));
        }
        const LinearLocation& linear = linears[i];
        if (plan.unserved.contains(linear.path)) return absl::OkStatus();
        auto weight = LoadWeight(checkpoint, linear, target, paths, model->arenas, &scratch[reader],
                                 &memory[reader]);
        if (!weight.ok() && !ConcernsOneLinear(weight.status())) return weight.status();
        MutexLock lock(&mu);
        if (weight.ok()) {
          AddWeight(linear.path, *std::move(weight), model);
        } else {
          model->unserved.emplace(linear.path, weight.status());
        }
        progress->AddWeight(linear.bytes);
        return absl::OkStatus();
      });
}

}  // namespace

Progress::Progress(std::string model, int64_t total_bytes, int64_t total_weights,
                   ProgressSinks sinks, NowFunction now)
    : model_(std::move(model)),
      total_bytes_(total_bytes),
      total_weights_(total_weights),
      sinks_(std::move(sinks)),
      now_(std::move(now)),
      start_(now_()),
      last_(start_) {
  if (sinks_.share != nullptr) *sinks_.share = 0;
  if (sinks_.bar) sinks_.bar(Bar());
}

Progress::~Progress() {
  if (sinks_.bar) sinks_.bar("");
}

void Progress::AddWeight(int64_t bytes) {
  bytes_ += bytes;
  ++weights_;
  if (sinks_.share != nullptr) *sinks_.share = static_cast<float>(LoadedShare());
  const absl::Time now = now_();
  if (now - last_ < (sinks_.bar ? kBarInterval : kInterval)) return;
  last_ = now;
  if (sinks_.bar) {
    sinks_.bar(Bar());
  } else if (sinks_.log) {
    sinks_.log(Line());
  }
}

double Progress::LoadedShare() const {
  const auto total = static_cast<double>(std::max<int64_t>(total_bytes_, 1));
  return std::min(static_cast<double>(bytes_) / total, 1.0);
}

std::string Progress::Amount() const {
  return absl::StrFormat("%.0f of %.0f MiB", static_cast<double>(bytes_) / kMib,
                         static_cast<double>(total_bytes_) / kMib);
}

double Progress::MibPerSecond() const {
  const double seconds = absl::ToDoubleSeconds(elapsed());
  return seconds > 0 ? static_cast<double>(bytes_) / kMib / seconds : 0;
}

std::string Progress::Line() const {
  return absl::StrFormat("loading model \"%s\": %d of %d weights, %s (%d %%), %.0f MiB/s", model_,
                         weights_, total_weights_, Amount(), static_cast<int>(LoadedShare() * 100),
                         MibPerSecond());
}

std::string Progress::Bar() const {
  const int filled = static_cast<int>(LoadedShare() * kBarWidth);
  return absl::StrFormat("[%s%s] %3d %%  %s, %.0f MiB/s  %s", std::string(filled, '#'),
                         std::string(kBarWidth - filled, '.'),
                         static_cast<int>(LoadedShare() * 100), Amount(), MibPerSecond(), model_);
}

absl::StatusOr<std::shared_ptr<Model>> LoadModel(const RepositoryRoot& root,
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
  for (const std::string& note : {checkpoint.note(), ToString(plan.remarks)}) {
    if (sinks.log && !note.empty()) sinks.log(absl::StrCat("model \"", name, "\": ", note));
  }
  auto model = std::make_shared<Model>();
  model->name = name;
  model->quant_method = checkpoint.quant_method();
  model->ignored_tensors = checkpoint.ignored_tensors();
  model->unserved = checkpoint.unserved();
  model->unserved.insert(plan.unserved.begin(), plan.unserved.end());
  Progress progress(
      name, checkpoint.total_bytes(), static_cast<int64_t>(checkpoint.linears().size()),
      TellNeedsFirst(sinks, absl::StrCat("model \"", name, "\": needs ", plan.ToString())),
      absl::Now);
  if (target.require_all) AWQD_RETURN_IF_ERROR(model->CheckAllServed());
  AWQD_RETURN_IF_ERROR(MakeArenas(target, plan, model.get()));
  AWQD_RETURN_IF_ERROR(LoadAll(checkpoint, target, plan, cancelled, &progress, model.get()));
  AWQD_RETURN_IF_ERROR(checkpoint.CheckUnchanged(root));
  if (target.require_all) AWQD_RETURN_IF_ERROR(model->CheckAllServed());
  if (model->weights.empty()) return model->unserved.begin()->second;
  if (sinks.log && !model->unserved.empty()) {
    sinks.log(absl::StrCat("model \"", name, "\": ", model->UnservedMessage()));
  }
  AWQD_RETURN_IF_ERROR(AddStacks(target.sharding, cancelled, model.get()));
  model->weight_paths = MakeIndex(model->weights);
  model->stack_paths = MakeIndex(model->stacks);
  model->load_ms = absl::ToInt64Milliseconds(progress.elapsed());
  return model;
}

}  // namespace awqd::model
