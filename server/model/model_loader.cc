// Reading, decoding, preparing and freeing, weight by weight.
#include "server/model/model_loader.h"

#include <algorithm>
#include <limits>
#include <map>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "checkpoint/checkpoint.h"
#include "kernels/base/status.h"

namespace awqd::model {
namespace {

// What an operator can do about it.
std::string Advice(const LoadTarget& target) {
  if (target.devices.size() < 2 || target.cut) {
    return " (a reload needs room for both versions)";
  }
  return " (a reload needs room for both versions; --shard=columns or --shard=models takes less of "
         "each device)";
}

absl::Status NoRoom(absl::string_view what, int64_t bytes, absl::string_view where, int64_t free,
                    const LoadTarget& target) {
  return absl::ResourceExhaustedError(absl::StrCat(what, ": needs ", bytes, " bytes on ", where,
                                                   ", got ", free, " free", Advice(target)));
}

// No layout is smaller than the packed tensors, so this refuses at once what can never fit, and
// bounds the host's buffers too.
absl::Status CheckRoom(absl::string_view what, int64_t bytes, const LoadTarget& target) {
  int64_t all = 0;
  for (const Device* device : target.devices) {
    const int64_t free = device->FreeBytes();
    if (!target.cut && bytes > free) return NoRoom(what, bytes, device->info().id, free, target);
    all += std::min(free, std::numeric_limits<int64_t>::max() - all);
  }
  if (bytes <= all || !target.cut) return absl::OkStatus();
  const std::string names =
      absl::StrJoin(target.devices, " + ",
                    [](std::string* out, const Device* device) { out->append(device->info().id); });
  return NoRoom(what, bytes, names, all, target);
}

absl::StatusOr<std::shared_ptr<const PlacedWeight>> LoadWeight(const Checkpoint& checkpoint,
                                                               const LinearLocation& linear,
                                                               const LoadTarget& target,
                                                               std::vector<uint8_t>* scratch) {
  AWQD_ASSIGN_OR_RETURN(const HostWeight weight, checkpoint.Read(linear, scratch));
  auto out = PlaceWeight(weight, target.devices, target.cut);
  if (out.ok()) return out;
  const absl::Status& status = out.status();
  return absl::Status(status.code(),
                      absl::StrCat("weight ", Quoted(linear.path), ": ", status.message(),
                                   absl::IsResourceExhausted(status) ? Advice(target) : ""));
}

void Add(const std::string& path, std::shared_ptr<const PlacedWeight> weight, Model* model) {
  for (const WeightPart& part : weight->parts) {
    model->bytes_on[part.weight->device] += part.weight->bytes();
  }
  model->device_bytes += weight->bytes();
  model->weights.emplace(path, std::move(weight));
}

// Experts that make no stack still serve as weights, so that none of this fails a load.
void AddStacks(Model* model) {
  std::map<std::string, std::map<int64_t, std::shared_ptr<const PlacedWeight>>> stacks;
  for (const auto& [path, weight] : model->weights) {
    const std::optional<ExpertPath> expert = ParseExpertPath(path);
    if (expert) stacks[expert->stack].emplace(expert->expert, weight);
  }
  for (const auto& [path, experts] : stacks) {
    model->stacks.emplace(path, MakeStack(path, experts));
  }
}

absl::StatusOr<std::shared_ptr<Model>> LoadWeights(const ModelFolder& folder,
                                                   const std::string& name,
                                                   const LoadTarget& target,
                                                   const std::atomic<bool>& cancelled,
                                                   const ProgressSinks& sinks) {
  AWQD_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(*folder.root, folder.path));
  AWQD_RETURN_IF_ERROR(
      CheckRoom(absl::StrCat("model \"", name, "\""), checkpoint.total_bytes(), target));
  if (sinks.log && !checkpoint.note().empty()) {
    sinks.log(absl::StrCat("model \"", name, "\": ", checkpoint.note()));
  }
  auto model = std::make_shared<Model>();
  model->name = name;
  model->quant_method = checkpoint.quant_method();
  model->ignored_tensors = checkpoint.ignored_tensors();
  Progress progress(name, checkpoint.total_bytes(),
                    static_cast<int64_t>(checkpoint.linears().size()), sinks, absl::Now);
  std::vector<uint8_t> scratch;
  for (const LinearLocation& linear : checkpoint.linears()) {
    if (cancelled) {
      return absl::UnavailableError(
          absl::StrCat("model \"", name, "\": load cancelled, the server is shutting down"));
    }
    AWQD_ASSIGN_OR_RETURN(std::shared_ptr<const PlacedWeight> weight,
                          LoadWeight(checkpoint, linear, target, &scratch));
    Add(linear.path, std::move(weight), model.get());
    progress.Add(linear.bytes);
  }
  AWQD_RETURN_IF_ERROR(checkpoint.CheckUnchanged(*folder.root));
  AddStacks(model.get());
  model->load_ms = absl::ToInt64Milliseconds(progress.elapsed());
  return model;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Model>> LoadModel(const ModelFolder& folder, const std::string& name,
                                                 const LoadTarget& target,
                                                 const std::atomic<bool>& cancelled,
                                                 const ProgressSinks& sinks) {
  // The standard library reports exhausted host memory in no other way.
  try {
    return LoadWeights(folder, name, target, cancelled, sinks);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        absl::StrCat("model \"", name, "\": host memory ran out while it was loaded"));
  }
}

}  // namespace awqd::model
