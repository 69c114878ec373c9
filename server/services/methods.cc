// How the request of each method becomes a job.
#include "server/services/methods.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "kernels/base/status.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

int64_t MaxSendBytes(const Env& env) { return env.options.transport.max_send_message_bytes; }

// --int8_activations: floating activations of a request that does not say how become INT8.
void ApplyInt8Default(const model::PlacedWeight& weight, v1::QuantizedMatmulRequest* request) {
  if (request->activation_quantization() != v1::ACTIVATIONS_AS_SENT) return;
  const bool has_kernels = absl::c_all_of(weight.parts, [](const model::WeightPart& part) {
    return !part.weight->plan.quantized.empty();
  });
  if (request->activations().dtype() == v1::INT8 || !has_kernels) return;
  request->set_activation_quantization(v1::INT8_PER_TOKEN);
}

}  // namespace

absl::StatusOr<wire::MatmulJob> MatmulMethod::Build(const Env& env, Request* request,
                                                    WeightPtr weight,
                                                    std::optional<int64_t> cut_bytes) {
  if (env.options.int8_activations) ApplyInt8Default(*weight, request);
  AWQD_ASSIGN_OR_RETURN(Job job, wire::BuildMatmul(request, weight->shape, MaxSendBytes(env),
                                                   cut_bytes, weight->activations()));
  job.work.weight = std::move(weight);
  return job;
}

absl::StatusOr<GroupedMatmulMethod::Job> GroupedMatmulMethod::Build(
    const Env& env, Request* request, StackPtr stack, std::optional<int64_t> cut_bytes) {
  return wire::BuildGroupedMatmul(request, std::move(stack), MaxSendBytes(env), cut_bytes);
}

absl::StatusOr<GatedMlpMethod::Job> GatedMlpMethod::Build(const Env& env, Request* request,
                                                          wire::MlpStacks projections,
                                                          std::optional<int64_t> cut_bytes) {
  return wire::BuildGatedMlp(request, std::move(projections), MaxSendBytes(env), cut_bytes);
}

absl::StatusOr<wire::DequantizeJob> DequantizeMethod::Build(const Env& env, Request* request,
                                                            WeightPtr weight,
                                                            std::optional<int64_t>) {
  AWQD_ASSIGN_OR_RETURN(Job job, wire::BuildDequantize(*request, weight->shape));
  AWQD_RETURN_IF_ERROR(wire::CheckFits(*request, job, MaxSendBytes(env)));
  const engine::DequantizeWork& work = job.work;
  job.answer.bytes = wire::EncodedBytes(work.rows * work.cols, work.out_dtype, job.answer.encoding);
  job.work.weight = std::move(weight);
  return job;
}

absl::Status DequantizeStreamMethod::Validate(const Request& request,
                                              std::optional<int64_t> /*cut_bytes*/) {
  AWQD_RETURN_IF_ERROR(wire::CheckRequest(request));
  if (!request.has_output_shared_memory()) return absl::OkStatus();
  return wire::FieldError("output_shared_memory", "a range",
                          "none: Dequantize writes an answer of any size there");
}

absl::StatusOr<wire::DequantizeJob> DequantizeStreamMethod::Build(const Env& /*env*/,
                                                                  Request* request,
                                                                  WeightPtr weight,
                                                                  std::optional<int64_t>) {
  AWQD_ASSIGN_OR_RETURN(Job job, wire::BuildDequantize(*request, weight->shape));
  job.work.weight = std::move(weight);
  return job;
}

absl::StatusOr<wire::QuantizeKvJob> QuantizeKvMethod::Build(const Env& env, Request* request,
                                                            Weights, std::optional<int64_t>) {
  return wire::BuildKv(request, MaxSendBytes(env));
}

absl::StatusOr<wire::DequantizeKvJob> DequantizeKvMethod::Build(const Env& env, Request* request,
                                                                Weights, std::optional<int64_t>) {
  return wire::BuildKv(request, MaxSendBytes(env));
}

}  // namespace awqd::services
