// Facts about the running server, gathered when asked: CollectSnapshot, one function a room, and
// the ServerInfo service.
#include <bit>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "awqd/v1/server_info.pb.h"
#include "kernels/formats/format.h"
#include "kernels/layouts/layout.h"
#include "kernels/plan/plan.h"
#include "kernels/registry.h"
#include "server/obs/call_recorder.h"
#include "server/obs/snapshot.h"
#include "server/services/env.h"
#include "server/services/unary.h"
#include "server/transport/admission.h"
#include "server/transport/call_loop.h"

namespace awqd::services {
namespace {

constexpr absl::string_view kStates[] = {"unloaded", "loading", "ready", "failed"};

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
  for (const repository::ModelStatus& status : env.models->ListKnown()) {
    const bool failed = status.state == repository::ModelState::kFailed;
    if (failed && env.options.start_models.contains(status.name)) out->start_models_failed = true;
    const bool served = status.model != nullptr || status.loading;
    if (!served && !failed) {
      ++out->unloaded_models;
      continue;
    }
    obs::ModelStats& shown = (served ? out->models : out->failed_models).emplace_back();
    shown.name = status.name;
    shown.message = status.message;
    shown.state = std::string(kStates[static_cast<int>(status.state)]);
    shown.loaded_share = status.loaded_share;
    shown.requests = status.statistics->requests;
    shown.failed = status.statistics->failed;
    shown.tokens = status.statistics->tokens;
    shown.in_time = status.statistics->in_time;
    shown.lost = status.statistics->lost;
    shown.not_computed = status.statistics->not_computed;
    shown.queue = absl::Nanoseconds(status.statistics->queue_ns.load());
    if (status.model == nullptr) continue;
    const model::Model& model = *status.model;
    shown.format = model.quant_method;
    shown.version = model.version;
    shown.weights = static_cast<int64_t>(model.weights.size());
    shown.unserved_weights = static_cast<int64_t>(model.unserved.size());
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
  out.methods = env.admission->Calls();
  out.devices = env.engine->stats();
  const std::vector<const Device*> devices = env.engine->devices();
  for (size_t i = 0; i < out.devices.size(); ++i) {
    out.devices[i].weights_bytes = env.models->device_bytes(devices[i]);
  }
  AddModels(env, plans, &out);
  out.loads_ns = env.models->loads().data();
  out.failed_loads_ns = env.models->failed_loads().data();
  out.in_flight_bytes = env.in_flight->in_flight();
  out.in_flight_limit_bytes = env.in_flight->limit();
  out.in_flight_refused = env.in_flight->refused();
  out.rejected = env.admission->drain()->rejected();
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

// --- The ServerInfo service ---

namespace {

constexpr DType kDTypes[] = {DType::kFp16,  DType::kBf16,  DType::kFp32, DType::kInt8,
                             DType::kUint8, DType::kInt32, DType::kE4m3, DType::kE8m0};

// A weight of usual size that the row takes if its device suits: only the device can refuse it.
WeightShape ShapeFor(const KernelRow& row) {
  WeightShape shape = {.k = 4096, .n = 4096};
  const Claims& claims = row.claims;
  if (claims.codes == MaskOf(CodeKind::kVector)) {
    shape.scheme = Vectors(VectorCode::kIq3S);
    return shape;
  }
  if (claims.codes == MaskOf(CodeKind::kTrellis)) {
    shape.scheme = Trellis(TrellisCode::k3Inst, 4);
    return shape;
  }
  const int bits = claims.bits & (1u << 4) ? 4 : std::countr_zero(claims.bits);
  const int64_t rows = claims.group_multiple > 128 ? 0 : 128;
  const bool stored = (claims.zeros & MaskOf(ZeroKind::kStored)) != 0;
  shape.scheme = stored ? Asymmetric(bits, rows) : Symmetric(bits, rows);
  if (claims.scales == 0) shape.scheme.scale_dtype.reset();
  return shape;
}

std::string Needs(const KernelRow& row) {
  if (row.device == DeviceKind::kCpu) return "cpu";
  return absl::StrCat("sm_", row.min_arch, row.max_arch == row.min_arch ? "a" : "");
}

void FillDevice(const Env& env, const Device& device, v1::DeviceStatus* out) {
  const DeviceInfo& info = device.info();
  out->set_id(info.id);
  out->set_name(info.name);
  out->set_memory_total_bytes(info.memory_bytes);
  out->set_memory_free_bytes(device.FreeBytes());
  out->set_weights_bytes(env.models->device_bytes(&device));
  out->set_arch(info.arch);
  if (info.kind == DeviceKind::kCpu) out->set_isa(std::string(Name(info.isa)));
  out->set_healthy(device.healthy());
}

void FillLimits(const Env& env, v1::Limits* out) {
  out->set_max_receive_bytes(env.options.transport.max_receive_message_bytes);
  out->set_max_send_bytes(env.options.transport.max_send_message_bytes);
  out->set_token_threshold(env.engine->token_threshold());
  out->set_max_batch_tokens(env.options.max_batch_tokens);
  out->set_max_queued_requests(env.options.max_queued_requests);
  out->set_max_inline_weight_bytes(env.options.max_inline_weight_bytes);
  out->set_shared_memory_prefix(env.shared_memory->prefix());
  out->set_ring_path(env.options.ring.path);
  out->set_cuda_shared_memory(!env.options.sharing_devices.empty());
}

constexpr std::pair<ZeroKind, absl::string_view> kZeroNames[] = {{ZeroKind::kConstant, "constant"},
                                                                 {ZeroKind::kStored, "stored"},
                                                                 {ZeroKind::kRealBefore, "real"},
                                                                 {ZeroKind::kRealAfter, "offset"}};

void FillDTypes(DTypeMask mask, google::protobuf::RepeatedPtrField<std::string>* out) {
  for (DType dtype : kDTypes) {
    if (mask & MaskOf(dtype)) out->Add(std::string(Name(dtype)));
  }
}

// One line of the support matrix, with whether `device` can run the row on a weight that suits it.
void FillKernel(const KernelRow& row, const DeviceInfo& device, v1::KernelInfo* out) {
  out->set_name(std::string(row.name));
  const bool matmul = row.op != Op::kDequantize;
  out->set_operation(!matmul                               ? "dequantize"
                     : row.op == Op::kQuantizedActivations ? "matmul_a8"
                     : row.op == Op::kFloat8Activations    ? "matmul_fp8"
                     : row.op == Op::kGroupedMatmul        ? "matmul_experts"
                     : row.op == Op::kGroupedFloat8        ? "matmul_experts_fp8"
                                                           : "matmul");
  if (matmul) {
    out->set_path(std::string(Name(row.path)));
    FillDTypes(row.inputs, out->mutable_activations());
  }
  FillDTypes(row.outputs, out->mutable_outputs());
  for (int bits = 1; bits <= 8; ++bits) {
    if (row.claims.bits & (1u << bits)) out->add_bits(bits);
  }
  for (const auto& [kind, name] : kZeroNames) {
    if (row.claims.zeros & MaskOf(kind)) out->add_zeros(std::string(name));
  }
  FillDTypes(row.claims.scales, out->mutable_scales());
  out->set_group_multiple(static_cast<int32_t>(row.claims.group_multiple));
  out->set_layout(row.layout == nullptr ? "any" : std::string(row.layout->name));
  out->set_min_tokens(row.min_m);
  out->set_max_tokens(row.max_m);
  out->set_needs(Needs(row));
  const std::string reason = WhyNot(row, ShapeFor(row), device);
  out->set_available(reason.empty());
  out->set_reason(reason);
}

void FillHistogram(const HistogramData& data, double unit, v1::Histogram* out) {
  for (const int64_t bound : data.bounds) out->add_bounds(static_cast<double>(bound) * unit);
  for (const int64_t count : data.counts) out->add_counts(count);
  out->set_sum(static_cast<double>(data.sum) * unit);
}

void FillDeviceCounters(const obs::DeviceStats& device, v1::DeviceCounters* out) {
  out->set_id(device.id);
  out->set_queued_requests(device.queued_requests);
  out->set_requests(device.batch_requests.sum);
  out->set_tokens(device.batch_tokens.sum);
  out->set_batches(device.batch_tokens.total());
  out->set_batches_failed(device.batches_failed);
  out->set_compute_s(static_cast<double>(device.compute_ns.sum) * 1e-9);
  FillHistogram(device.queue_ns, 1e-9, out->mutable_queue());
}

void FillModelCounters(const obs::ModelStats& model, v1::ModelCounters* out) {
  out->set_name(model.name);
  out->set_requests(model.requests);
  out->set_tokens(model.tokens);
  out->set_failed(model.failed);
  out->set_lost(model.lost);
  out->set_not_computed(model.not_computed);
  int64_t bytes = 0;
  for (const auto& [device, held] : model.bytes) bytes += held;
  out->set_weights_bytes(bytes);
  out->set_loaded_share(model.loaded_share);
  out->set_unserved_weights(model.unserved_weights);
}

void FillCounters(const obs::Snapshot& snapshot, v1::Counters* out) {
  int64_t calls = 0, good = 0;
  for (const obs::MethodStats& method : snapshot.methods) {
    for (const HistogramData& durations : method.durations_ns) calls += durations.total();
    good += method.durations_ns[0].total();
  }
  out->set_calls(calls);
  out->set_failed_calls(calls - good);
  FillHistogram(obs::RequestDurations(snapshot), 1e-9, out->mutable_request_calls());
  out->set_in_flight_bytes(snapshot.in_flight_bytes);
  out->set_in_flight_limit_bytes(snapshot.in_flight_limit_bytes);
  out->set_resident_bytes(snapshot.process.resident_bytes);
  for (const obs::DeviceStats& device : snapshot.devices) {
    FillDeviceCounters(device, out->add_devices());
  }
  for (const obs::ModelStats& model : snapshot.models) FillModelCounters(model, out->add_models());
}

absl::Status Fill(const Env& env, const v1::GetServerInfoRequest&,
                  v1::GetServerInfoResponse* response) {
  response->set_version(AWQD_VERSION);
  for (const Device* device : env.engine->devices()) {
    FillDevice(env, *device, response->add_devices());
  }
  for (const KernelRow* row : AllKernels()) {
    FillKernel(*row, env.engine->device().info(), response->add_kernels());
  }
  FillLimits(env, response->mutable_limits());
  response->set_shard(std::string(Name(env.models->sharding())));
  response->set_uptime_s(absl::ToInt64Seconds(absl::Now() - env.started));
  for (const Format* format : AllFormats()) response->add_formats(std::string(format->name));
  FillCounters(CollectSnapshot(env, Plans::kLeftOut), response->mutable_counters());
  return absl::OkStatus();
}

}  // namespace

void ServeServerInfo(const Env& env) {
  ServeUnary(env, "awqd.v1.ServerInfo/GetServerInfo", {.queue = env.pages.get()}, Fill);
}

}  // namespace awqd::services
