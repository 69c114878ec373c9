// CollectSnapshot: one function a room.
#include "server/obs/snapshot.h"

#include <set>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "kernels/registry.h"
#include "server/obs/call_recorder.h"
#include "server/services/env.h"
#include "server/transport/admission.h"
#include "server/transport/call_loop.h"

namespace awqd::services {
namespace {

static_assert(obs::MethodStats::kCodes == transport::MethodCalls::kOutcomes);

constexpr absl::string_view kStates[] = {"unloaded", "loading", "ready", "failed"};

void AddMethods(const Env& env, obs::Snapshot* out) {
  for (transport::MethodCalls& calls : env.admission->Calls()) {
    obs::MethodStats& method = out->methods.emplace_back();
    method.method = std::move(calls.method);
    method.started = calls.started;
    method.durations_ns = std::move(calls.durations);
    method.received_bytes = std::move(calls.received);
    method.sent_bytes = std::move(calls.sent);
  }
}

obs::DeviceStats ToDeviceStats(engine::EngineStats stats) {
  obs::DeviceStats out;
  out.queued_requests = stats.queued_tasks;
  out.queue_full = stats.queue.refused_full;
  out.queue_draining = stats.queue.refused_draining;
  out.queue_expired = stats.queue.expired;
  out.queue_cancelled = stats.queue.cancelled;
  out.batches_failed = stats.batches_failed;
  out.merged_requests = stats.merged_requests;
  out.batch_tokens = std::move(stats.batch_tokens);
  out.batch_requests = std::move(stats.batch_requests);
  out.compute_ns = std::move(stats.compute_ns);
  out.queue_ns = std::move(stats.queue_ns);
  for (engine::KernelStatistics& use : stats.kernels) {
    out.kernels.push_back({std::move(use.kernel), use.batches, absl::Microseconds(use.compute_us)});
  }
  out.staging_lent_bytes = stats.staging.lent_bytes;
  out.staging_kept_bytes = stats.staging.kept_bytes;
  out.staging_misses = stats.staging.misses;
  out.staging_copied = stats.staging.copied_bytes;
  return out;
}

void AddDevices(const Env& env, obs::Snapshot* out) {
  for (engine::EngineStats& stats : env.engine->stats()) {
    const Device& device = *stats.device;
    obs::DeviceStats& shown = out->devices.emplace_back(ToDeviceStats(std::move(stats)));
    shown.id = device.info().id;
    shown.name = device.info().name;
    shown.pci_bus_id = device.info().pci_bus_id;
    shown.healthy = device.healthy();
    shown.memory_bytes = device.info().memory_bytes;
    shown.free_bytes = device.FreeBytes();
    shown.weights_bytes = env.models->device_bytes(&device);
  }
}

std::vector<std::string> ListKernels(const model::Model& model) {
  std::set<absl::string_view> names;
  for (const auto& [path, weight] : model.weights) {
    for (const PlanEntry& entry : weight->parts.front().weight->plan.matmul) {
      if (entry.row != nullptr) names.insert(entry.row->name);
    }
  }
  return {names.begin(), names.end()};
}

void AddModels(const Env& env, Plans plans, obs::Snapshot* out) {
  for (const repository::ModelStatus& status : env.models->ListServed()) {
    obs::ModelStats& shown = out->models.emplace_back();
    shown.name = status.name;
    shown.state = std::string(kStates[static_cast<int>(status.state)]);
    shown.loaded_share = status.loaded_share;
    shown.requests = status.statistics->requests;
    shown.failed = status.statistics->failed;
    shown.tokens = status.statistics->tokens;
    shown.queue = absl::Nanoseconds(status.statistics->queue_ns.load());
    if (status.model == nullptr) continue;
    const model::Model& model = *status.model;
    shown.format = model.quant_method;
    shown.version = model.version;
    shown.weights = static_cast<int64_t>(model.weights.size());
    for (const auto& [device, bytes] : model.bytes_on) {
      shown.bytes.emplace_back(device->info().id, bytes);
    }
    if (plans == Plans::kIncluded) shown.kernels = ListKernels(model);
  }
}

}  // namespace

obs::Snapshot CollectSnapshot(const Env& env, Plans plans) {
  obs::Snapshot out;
  out.time = absl::Now();
  out.version = AWQD_VERSION;
  AddMethods(env, &out);
  AddDevices(env, &out);
  AddModels(env, plans, &out);
  out.loads_ns = env.models->loads().data();
  out.failed_loads_ns = env.models->failed_loads().data();
  out.in_flight_bytes = env.in_flight->in_flight();
  out.in_flight_limit_bytes = env.in_flight->limit();
  out.in_flight_refused = env.in_flight->refused();
  out.turned_away = env.gate->rejected();
  const transport::LongestEvents::Times longest = env.loop->longest_events().Longest();
  out.loop_hold_wall = longest.wall;
  out.loop_hold_processor = longest.processor;
  out.queue_limit_requests = env.options.max_queued_requests;
  const obs::CallRecorder* const recorder = env.options.transport.recorder;
  if (recorder != nullptr && recorder->tracer() != nullptr) {
    out.exported_spans = recorder->tracer()->exported_spans();
    out.dropped_spans = recorder->tracer()->dropped_spans();
  }
  out.process = obs::ReadProcess();
  return out;
}

}  // namespace awqd::services
