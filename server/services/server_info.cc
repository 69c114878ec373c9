// Facts about the running server, gathered when asked.
#include "server/services/server_info.h"

#include <bit>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/formats/format.h"
#include "kernels/layouts/layout.h"
#include "server/services/reply.h"
#include "server/transport/guard.h"
#include "server/wire/messages.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

constexpr DType kDTypes[] = {DType::kFp16, DType::kBf16,  DType::kFp32,
                             DType::kInt8, DType::kUint8, DType::kInt32};

// A weight of usual size that the row takes if its device suits; so what remains to refuse it is
// the device.
WeightShape ShapeFor(const KernelRow& row) {
  WeightShape shape = {.k = 4096, .n = 4096};
  shape.scheme.bits = row.bits_mask & (1u << 4) ? 4 : std::countr_zero(row.bits_mask);
  shape.scheme.group_size = row.group_multiple > 128 ? 4096 : 128;
  shape.scheme.zero_kind = row.integer_zeros ? ZeroKind::kInteger : ZeroKind::kSymmetric;
  shape.scheme.activation = row.activation;
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
}

void FillDTypes(DTypeMask mask, google::protobuf::RepeatedPtrField<std::string>* out) {
  for (DType dtype : kDTypes) {
    if (mask & MaskOf(dtype)) out->Add(std::string(Name(dtype)));
  }
}

}  // namespace

void FillKernel(const KernelRow& row, const DeviceInfo& device, v1::KernelInfo* out) {
  out->set_name(std::string(row.name));
  const bool matmul = row.op == Op::kMatmul;
  out->set_operation(matmul ? "matmul" : "dequantize");
  if (matmul) {
    out->set_path(std::string(Name(row.path)));
    FillDTypes(row.inputs, out->mutable_activations());
  }
  FillDTypes(row.outputs, out->mutable_outputs());
  for (int bits = 1; bits <= 8; ++bits) {
    if (row.bits_mask & (1u << bits)) out->add_bits(bits);
  }
  out->set_group_multiple(static_cast<int32_t>(row.group_multiple));
  out->set_layout(row.layout == nullptr ? "any" : std::string(row.layout->name));
  out->set_min_tokens(row.min_m);
  out->set_max_tokens(row.max_m);
  out->set_needs(Needs(row));
  const std::string reason = WhyNot(row, ShapeFor(row), device);
  out->set_available(reason.empty());
  out->set_reason(reason);
}

absl::Status ServerInfoService::Fill(v1::GetServerInfoResponse* response) const {
  response->set_version(AWQD_VERSION);
  for (const Device* device : env_.engine->devices()) {
    FillDevice(env_, *device, response->add_devices());
  }
  for (const KernelRow* row : AllKernels()) {
    FillKernel(*row, env_.engine->device().info(), response->add_kernels());
  }
  FillLimits(env_, response->mutable_limits());
  response->set_shard(std::string(Name(env_.models->sharding())));
  response->set_uptime_s(absl::ToInt64Seconds(absl::Now() - env_.started));
  for (const Format* format : AllFormats()) response->add_formats(std::string(format->name));
  return absl::OkStatus();
}

void ServerInfoService::ServeOn(transport::CallLoop* loop) {
  constexpr int kSlots = 4;
  loop->Serve<transport::UnaryCall>(
      kSlots, this, &ServerInfoService::RequestGetServerInfo, [this](transport::UnaryCall* call) {
        if (env_.gate->TurnAway(call)) return;
        v1::GetServerInfoResponse response;
        const absl::Status status = transport::Guarded([&]() -> absl::Status {
          v1::GetServerInfoRequest request;
          AWQD_RETURN_IF_ERROR(wire::Parse(call->request(), &request));
          return Fill(&response);
        });
        Reply(call, status, response);
      });
}

}  // namespace awqd::services
