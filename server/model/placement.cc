// The rules of --shard; adding weights up, and comparing with what is free.
#include "server/model/placement.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/checkpoint/experts.h"
#include "kernels/kernels.h"

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
  const MlpRole role = FindMlpRole(path, paths);
  if (role == MlpRole::kNone) return Placing::kColumns;
  return role == MlpRole::kDown ? Placing::kMlpRows : Placing::kMlpColumns;
}

absl::Span<Device* const> ChooseDevices(absl::string_view path, const LoadTarget& target) {
  const absl::Span<Device* const> all = target.devices;
  if (target.sharding != Sharding::kExperts) return all;
  const std::optional<ExpertPath> expert = ParseExpertPath(path);
  return expert ? all.subspan(expert->expert % target.devices.size(), 1) : all;
}

// The most that describing a linear takes, in bytes of its tensors: as they are, decoded, and on
// the way from one to the other.
constexpr int64_t kTimesDescribed = 3;

absl::Status NoRoom(int64_t bytes, absl::string_view where, int64_t free, absl::string_view what) {
  return absl::ResourceExhaustedError(
      absl::StrCat("needs ", bytes, " bytes on ", where, what, ", got ", free, " free"));
}

// The bytes beyond the memory that no limit counts.
int64_t Counted(int64_t working) { return std::max<int64_t>(0, working - kFreeWorkingBytes); }

class Planner {
 public:
  Planner(const LoadTarget& target, Paths paths) : target_(target), paths_(std::move(paths)) {}

  // Keeps the reason of a linear that cannot be decoded.
  absl::Status AddLinear(const Checkpoint& checkpoint, const LinearLocation& linear) {
    absl::Status status = AddReadable(checkpoint, linear);
    if (status.ok() || !ConcernsOneLinear(status)) return status;
    if (plan_.unserved.empty()) first_reason_ = status;
    plan_.unserved.emplace(linear.path, std::move(status));
    return absl::OkStatus();
  }

  absl::StatusOr<MemoryPlan> MakePlan() {
    if (beside_.empty()) return first_reason_;
    AWQD_RETURN_IF_ERROR(CheckDevices(plan_.weights, ""));
    std::sort(beside_.begin(), beside_.end(), std::greater<>());
    for (int readers = MostReaders(); readers > 1; --readers) {
      MemoryPlan ahead = PlanAhead(readers);
      if (readers > 2 && ahead.working > MemoryPlan::kMostWorkingBytes) continue;
      if (!CheckPeak(ahead).ok()) continue;
      ahead.unserved = std::move(plan_.unserved);
      return ahead;
    }
    AWQD_RETURN_IF_ERROR(CheckPeak(plan_));
    return std::move(plan_);
  }

 private:
  static constexpr absl::string_view kWhileReading = " while it reads and decodes its weights";

  absl::Status AddReadable(const Checkpoint& checkpoint, const LinearLocation& linear) {
    AWQD_RETURN_IF_ERROR(CheckDescribing(linear));
    AWQD_ASSIGN_OR_RETURN(HostWeight weight,
                          checkpoint.Describe(linear, &scratch_, &plan_.remarks));
    AWQD_ASSIGN_OR_RETURN(std::vector<PartBytes> parts, MeasureParts(weight, linear));
    if (!absl::c_all_of(parts, [](const PartBytes& part) { return part.exact; })) {
      // Its scales lie among its codes, and the layout depends on them.
      AWQD_ASSIGN_OR_RETURN(weight, checkpoint.Read(linear, &scratch_));
      AWQD_ASSIGN_OR_RETURN(parts, MeasureParts(weight, linear));
    }
    raw_ = std::max(raw_, linear.bytes);
    const int64_t host = HostBytes(weight);
    int64_t copies = 0;  // of all parts, which are made side by side
    for (const PartBytes& part : parts) {
      plan_.weights[part.device] += part.bytes;
      copies += host * part.copied / (weight.k * weight.n);
      if (!part.device->host_addressable()) copies += part.bytes;
    }
    const int64_t spare = linear.rule->format->spare_bytes_per_code * weight.k * weight.n;
    const int64_t beside = host + std::max(spare, copies);
    beside_.push_back(beside);
    plan_.working = std::max(plan_.working, raw_ + beside);
    Raise(plan_.weights, raw_ + beside, &plan_);
    return absl::OkStatus();
  }

  absl::Status CheckPeak(const MemoryPlan& plan) const {
    AWQD_RETURN_IF_ERROR(CheckDevices(plan.peak, kWhileReading));
    const int64_t free = HostFreeBytes();
    if (plan.host_peak <= free) return absl::OkStatus();
    return NoRoom(plan.host_peak, "the host", free, kWhileReading);
  }

  int MostReaders() const {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    const int most =
        target_.readers > 0 ? target_.readers : std::clamp(cores, 2, MemoryPlan::kMostReaders);
    return std::min<int>(most, static_cast<int>(beside_.size()));
  }

  // With so many readers: the largest linears at the same time, when all weights are there.
  MemoryPlan PlanAhead(int readers) const {
    MemoryPlan out = {.weights = plan_.weights, .readers = readers, .remarks = plan_.remarks};
    for (int i = 0; i < readers; ++i) out.working += raw_ + beside_[i];
    Raise(out.weights, out.working, &out);
    return out;
  }

  absl::StatusOr<std::vector<PartBytes>> MeasureParts(const HostWeight& weight,
                                                      const LinearLocation& linear) const {
    const Place place = ChoosePlace(linear.path, paths_, target_);
    auto parts = MeasurePlaced(weight, place.devices, place.placing);
    if (parts.ok()) return parts;
    return Prefixed(absl::StrCat("weight ", Quoted(linear.path)), parts.status());
  }

  // In the order of the target, so that an error names the first.
  absl::Status CheckDevices(const std::map<const Device*, int64_t>& needed,
                            absl::string_view what) const {
    for (const Device* device : target_.devices) {
      const auto it = needed.find(device);
      const int64_t free = device->FreeBytes();
      if (it != needed.end() && it->second > free) {
        return NoRoom(it->second, device->info().id, free, what);
      }
    }
    return absl::OkStatus();
  }

  // Scales may be as large as codes where somebody means harm.
  absl::Status CheckDescribing(const LinearLocation& linear) const {
    const int64_t rest = linear.bytes - linear.codes().info->bytes();
    const int64_t free = std::min(HostFreeBytes(), target_.devices[0]->host_addressable()
                                                       ? target_.devices[0]->FreeBytes()
                                                       : HostFreeBytes());
    if (Counted(linear.bytes) > free) {
      return NoRoom(linear.bytes, "the host", free, absl::StrCat(" to read ", Quoted(linear.path)));
    }
    if (Counted(rest) <= free / kTimesDescribed) return absl::OkStatus();
    return NoRoom(rest * kTimesDescribed, "the host", free, " to read its scales and zeros");
  }

  static void Raise(const std::map<const Device*, int64_t>& weights, int64_t working,
                    MemoryPlan* plan) {
    int64_t on_host = working;
    for (const auto& [device, bytes] : weights) {
      if (!device->host_addressable()) continue;
      on_host += bytes;
      int64_t& peak = plan->peak[device];
      peak = std::max(peak, bytes + Counted(working));
    }
    plan->host_peak = std::max(plan->host_peak, on_host);
  }

  const LoadTarget& target_;
  const Paths paths_;
  std::vector<uint8_t> scratch_;
  int64_t raw_ = 0;              // of the largest linear: a reader keeps its buffer
  std::vector<int64_t> beside_;  // of each linear, what is held beside its tensors as they are read
  MemoryPlan plan_;              // of one reader
  absl::Status first_reason_;    // of plan_.unserved, in the order of the files
};

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

int64_t MemoryPlan::device_bytes() const {
  int64_t out = 0;
  for (const auto& [device, bytes] : weights) out += bytes;
  return out;
}

std::string MemoryPlan::ToString() const {
  std::map<std::string, int64_t> by_name;
  for (const auto& [device, bytes] : weights) by_name[device->info().id] = bytes;
  const std::string on = absl::StrJoin(by_name, ", ", [](std::string* out, const auto& entry) {
    absl::StrAppend(out, FormatBytes(entry.second), " on ", entry.first);
  });
  return absl::StrCat(on, " and ", FormatBytes(working), " of host memory while it loads");
}

absl::StatusOr<MemoryPlan> PlanLoad(const Checkpoint& checkpoint, const LoadTarget& target,
                                    const std::atomic<bool>& cancelled) {
  Planner planner(target, CollectPaths(checkpoint));
  for (const LinearLocation& linear : checkpoint.linears()) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(&cancelled));
    AWQD_RETURN_IF_ERROR(planner.AddLinear(checkpoint, linear));
  }
  return planner.MakePlan();
}

}  // namespace awqd::model
