// Store structs -> messages, and what touches the disk off the loop's threads.
#include "server/services/model_repository.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/layouts/layout.h"
#include "kernels/registry.h"
#include "kernels/scheme.h"
#include "server/obs/logging.h"
#include "server/services/reply.h"
#include "server/transport/guard.h"
#include "server/wire/messages.h"
#include "server/wire/status.h"
#include "server/wire/validate.h"

namespace awqd::services {
namespace {

v1::ModelState ToProto(model::ModelState state) {
  switch (state) {
    case model::ModelState::kUnloaded:
      return v1::UNLOADED;
    case model::ModelState::kLoading:
      return v1::LOADING;
    case model::ModelState::kReady:
      return v1::READY;
    case model::ModelState::kFailed:
      return v1::FAILED;
  }
  return v1::MODEL_STATE_UNSPECIFIED;
}

void FillSummary(const model::Model& model, v1::ModelSummary* out) {
  out->set_name(model.name);
  out->set_state(v1::READY);
  out->set_weights(static_cast<int32_t>(model.weights.size()));
  out->set_device_bytes(model.device_bytes);
  out->set_version(model.version);
}

void FillPlan(const DeviceWeight& weight, v1::WeightInfo* out) {
  const WeightPlan& plan = weight.plan;
  for (const PlanEntry& entry : plan.matmul) {
    v1::PlanEntry* row = out->add_plan();
    row->set_path(entry.path == Path::kFused ? v1::FUSED : v1::DEQUANTIZE);
    row->set_min_tokens(entry.min_m);
    row->set_max_tokens(entry.max_m);
    row->set_kernel(std::string(entry.row->name));
    row->set_tiles(DescribeTiles(entry, weight.shape, weight.device->info()));
  }
  if (plan.dequantize != nullptr) out->set_dequantize_kernel(std::string(plan.dequantize->name));
  for (const RefusedRow& refused : plan.refused) {
    v1::RefusedKernel* row = out->add_refused();
    row->set_kernel(refused.name);
    row->set_reason(refused.reason);
  }
}

void FillParts(const model::PlacedWeight& weight, v1::WeightInfo* out) {
  for (const model::WeightPart& part : weight.parts) {
    v1::WeightPart* row = out->add_parts();
    row->set_device(part.weight->device->info().id);
    row->set_column_begin(part.col_begin);
    row->set_column_end(part.col_end());
    row->set_bytes(part.weight->bytes());
  }
}

void FillWeight(const std::string& path, const model::PlacedWeight& weight, v1::WeightInfo* out) {
  out->set_path(path);
  out->set_k(weight.shape.k);
  out->set_n(weight.shape.n);
  out->set_format(weight.format);
  out->set_scheme(ToString(weight.shape.scheme));
  out->set_bytes(weight.bytes());
  out->set_device(weight.devices());
  out->set_has_bias(weight.has_bias);
  FillParts(weight, out);
  const DeviceWeight& first = *weight.parts.front().weight;
  out->set_layout(std::string(first.layout->name));
  FillPlan(first, out);
}

absl::Status Load(model::ModelStore* models, const std::string& name,
                  v1::LoadModelResponse* response) {
  AWQD_ASSIGN_OR_RETURN(const std::shared_ptr<const model::Model> model, models->Load(name));
  FillSummary(*model, response->mutable_model());
  response->set_load_ms(model->load_ms);
  response->set_ignored_tensors(model->ignored_tensors);
  return absl::OkStatus();
}

// As FindWeight of weights.h: what was not loaded yet is not missing.
absl::StatusOr<std::shared_ptr<const model::Model>> FindModel(const Env& env,
                                                              const std::string& name) {
  auto model = env.models->Find(name);
  if (absl::IsNotFound(model.status()) && env.starting.load()) {
    return absl::UnavailableError(absl::StrCat("model \"", name,
                                               "\": the server is still loading its models; try "
                                               "again when its health is SERVING"));
  }
  return model;
}

absl::Status Get(const Env& env, const std::string& name, v1::GetModelResponse* response) {
  AWQD_RETURN_IF_ERROR(wire::CheckName(name));
  AWQD_ASSIGN_OR_RETURN(const std::shared_ptr<const model::Model> model, FindModel(env, name));
  FillSummary(*model, response->mutable_model());
  for (const auto& [path, weight] : model->weights) {
    FillWeight(path, *weight, response->add_weights());
  }
  response->set_ignored_tensors(model->ignored_tensors);
  response->set_quant_method(model->quant_method);
  return absl::OkStatus();
}

// A message and its answer, where the answer is at hand. `body` fills the answer.
template <typename Request, typename Response, typename F>
void Answer(const Env& env, transport::UnaryCall* call, F body) {
  if (env.gate->TurnAway(call)) return;
  Response response;
  const absl::Status status = transport::Guarded([&]() -> absl::Status {
    Request request;
    AWQD_RETURN_IF_ERROR(wire::Parse(call->request(), &request));
    return body(request, &response);
  });
  Reply(call, status, response);
}

// The same on the worker: `body` may block. Both end up in the log, as `what`.
template <typename Request, typename Response, typename F>
void Offload(const Env& env, transport::UnaryCall* call, absl::string_view what, F body) {
  if (env.gate->TurnAway(call)) return;
  Request request;
  const auto ticket = std::make_shared<transport::CallGate::Ticket>(env.gate);
  const absl::Status accepted = transport::Guarded([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(wire::Parse(call->request(), &request));
    AWQD_RETURN_IF_ERROR(wire::CheckName(request.name()));
    return env.loads->Run([ticket, call, what, name = request.name(), body = std::move(body)] {
      Response response;
      const absl::Status status =
          wire::ForClient(transport::Guarded([&] { return body(name, &response); }));
      obs::LogEvent(status.ok() ? obs::LogLevel::kInfo : obs::LogLevel::kWarning, what,
                    {{"model", obs::LogText(name)},
                     {"status", absl::StatusCodeToString(status.code())},
                     {"error", obs::LogText(status.message(), wire::kMaxErrorBytes)}});
      Reply(call, status, response);
    });
  });
  if (!accepted.ok()) call->Finish(wire::ToGrpc(accepted));
}

absl::Status List(model::ModelStore* models, v1::ListModelsResponse* response) {
  for (const model::ModelStatus& status : models->List()) {
    v1::ModelSummary* summary = response->add_models();
    if (status.model != nullptr) FillSummary(*status.model, summary);
    summary->set_name(status.name);
    summary->set_state(ToProto(status.state));
    summary->set_message(status.message);
  }
  return absl::OkStatus();
}

}  // namespace

void ModelRepositoryService::StartList(transport::UnaryCall* call) {
  if (env_.gate->TurnAway(call)) return;
  const auto ticket = std::make_shared<transport::CallGate::Ticket>(env_.gate);
  const absl::Status accepted = transport::Guarded([&]() -> absl::Status {
    v1::ListModelsRequest request;
    AWQD_RETURN_IF_ERROR(wire::Parse(call->request(), &request));
    return lists_.Run([ticket, call, models = env_.models] {
      v1::ListModelsResponse response;
      const absl::Status status = transport::Guarded([&] { return List(models, &response); });
      Reply(call, status, response);
    });
  });
  if (!accepted.ok()) call->Finish(wire::ToGrpc(accepted));
}

void ModelRepositoryService::ServeOn(transport::CallLoop* loop) {
  using Service = ModelRepositoryService;
  constexpr int kSlots = 4;
  loop->Serve<transport::UnaryCall>(kSlots, this, &Service::RequestListModels,
                                    [this](transport::UnaryCall* call) { StartList(call); });
  loop->Serve<transport::UnaryCall>(kSlots, this, &Service::RequestGetModel,
                                    [this](transport::UnaryCall* call) {
                                      Answer<v1::GetModelRequest, v1::GetModelResponse>(
                                          env_, call, [this](const auto& request, auto* response) {
                                            return Get(env_, request.name(), response);
                                          });
                                    });
  loop->Serve<transport::UnaryCall>(
      kSlots, this, &Service::RequestLoadModel, [this](transport::UnaryCall* call) {
        Offload<v1::LoadModelRequest, v1::LoadModelResponse>(
            env_, call, "load model",
            [models = env_.models](const std::string& name, v1::LoadModelResponse* response) {
              return Load(models, name, response);
            });
      });
  loop->Serve<transport::UnaryCall>(
      kSlots, this, &Service::RequestUnloadModel, [this](transport::UnaryCall* call) {
        Offload<v1::UnloadModelRequest, v1::UnloadModelResponse>(
            env_, call, "unload model",
            [models = env_.models](const std::string& name, v1::UnloadModelResponse*) {
              return models->Unload(name);
            });
      });
}

}  // namespace awqd::services
