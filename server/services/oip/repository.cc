// Names that requests can have, of each model that is served; loads; counts; settings.
#include "server/services/oip/repository.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/experts.h"
#include "server/obs/call_recorder.h"
#include "server/obs/logging.h"
#include "server/services/loads.h"
#include "server/services/oip/models.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"
#include "server/wire/validation.h"

namespace awqd::services::oip {
namespace {

using inference::RepositoryIndexResponse;
using wire::oip::JoinName, wire::oip::Kind;

constexpr char kReady[] = "READY";

absl::Status CheckRepository(const std::string& name) {
  if (name.empty()) return absl::OkStatus();
  return wire::FieldError("repository_name", absl::StrCat("\"", obs::LogText(name, 64), "\""),
                          "nothing: there is one repository");
}

void AddName(const model::Model& model, std::string name, RepositoryIndexResponse* out) {
  RepositoryIndexResponse::ModelIndex* const line = out->add_models();
  line->set_name(std::move(name));
  line->set_version(absl::StrCat(model.version));
  line->set_state(kReady);
}

// The projections of an MLP are called like this, beneath one path.
template <typename Map>
void AddMlps(const model::Model& model, const Map& paths, RepositoryIndexResponse* out) {
  for (const auto& [path, unused] : paths) {
    absl::string_view common = path;
    if (!absl::ConsumeSuffix(&common, ".gate_proj")) continue;
    if (!paths.contains(absl::StrCat(common, ".up_proj"))) continue;
    if (!paths.contains(absl::StrCat(common, ".down_proj"))) continue;
    if (model::ParseExpertPath(path)) continue;
    AddName(model, JoinName(model.name, common, Kind::kMlp), out);
  }
}

void AddNames(const model::Model& model, RepositoryIndexResponse* out) {
  for (const auto& [path, weight] : model.weights) {
    if (model::ParseExpertPath(path)) continue;  // its stack is listed
    AddName(model, JoinName(model.name, path, Kind::kProduct), out);
  }
  for (const auto& [path, stack] : model.stacks) {
    if (stack.ok()) AddName(model, JoinName(model.name, path, Kind::kStack), out);
  }
  AddMlps(model, model.weights, out);
  AddMlps(model, model.stacks, out);
}

// A request loads a model that was unloaded while idle.
std::string StateOf(const repository::ModelStatus& status) {
  if (status.model != nullptr || status.unloaded_idle) return kReady;
  return status.state == repository::ModelState::kLoading ? "LOADING" : "UNAVAILABLE";
}

std::string ReasonOf(const repository::ModelStatus& status) {
  return status.unloaded_idle ? "unloaded while idle; loaded on demand" : status.message;
}

// Empty of a model that is not served.
std::string VersionOf(const repository::ModelStatus& status) {
  return status.model == nullptr ? "" : absl::StrCat(status.model->version);
}

absl::StatusOr<grpc::ByteBuffer> Encode(const std::vector<repository::ModelStatus>& models,
                                        int64_t limit) {
  RepositoryIndexResponse response;
  for (const repository::ModelStatus& status : models) {
    RepositoryIndexResponse::ModelIndex* const line = response.add_models();
    line->set_name(status.name);
    line->set_version(VersionOf(status));
    line->set_state(StateOf(status));
    line->set_reason(ReasonOf(status));
    if (status.model != nullptr) AddNames(*status.model, &response);
  }
  const auto bytes = static_cast<int64_t>(response.ByteSizeLong());
  if (bytes <= limit) return wire::Encode(response);
  return absl::ResourceExhaustedError(
      absl::StrCat("models: got ", bytes, " bytes, expected at most ", limit,
                   " (the server's max_send_message_bytes); GetModel of "
                   "awqd.v1.ModelRepository answers in pages"));
}

void Count(uint64_t count, uint64_t ns, inference::StatisticDuration* out) {
  out->set_count(count);
  out->set_ns(ns);
}

void Fill(const repository::ModelStatus& status, const std::string& name,
          inference::ModelStatistics* out) {
  out->set_name(name);
  if (status.model != nullptr) out->set_version(absl::StrCat(status.model->version));
  if (status.statistics == nullptr) return;
  const model::ModelStatistics& use = *status.statistics;
  out->set_inference_count(use.tokens);
  out->set_execution_count(use.batches);
  inference::InferStatistics* const counts = out->mutable_inference_stats();
  Count(use.succeeded, use.succeeded_ns, counts->mutable_success());
  Count(use.refused, use.refused_ns, counts->mutable_fail());
  Count(use.requests + use.failed, use.queue_ns, counts->mutable_queue());
  Count(use.requests, use.input_ns, counts->mutable_compute_input());
  Count(use.requests, use.compute_ns, counts->mutable_compute_infer());
  Count(use.answered, use.output_ns, counts->mutable_compute_output());
  for (const model::BatchSizeStatistics& size : use.sizes.Seen()) {
    inference::InferBatchStatistics* const batches = out->add_batch_stats();
    batches->set_batch_size(size.tokens);
    Count(size.batches, size.times.input_ns, batches->mutable_compute_input());
    Count(size.batches, size.times.compute_ns, batches->mutable_compute_infer());
    Count(size.answered, size.times.output_ns, batches->mutable_compute_output());
  }
}

}  // namespace

absl::StatusOr<grpc::ByteBuffer> NameList::Encoded(
    const Env& env, const inference::RepositoryIndexRequest& request) {
  AWQD_RETURN_IF_ERROR(CheckRepository(request.repository_name()));
  std::vector<repository::ModelStatus> models = env.models->List();
  if (request.ready()) {
    std::erase_if(models, [](const auto& status) { return StateOf(status) != kReady; });
  }
  std::string state;
  for (const repository::ModelStatus& status : models) {
    absl::StrAppend(&state, status.name, "\n", VersionOf(status), StateOf(status), "\n",
                    ReasonOf(status).size(), ReasonOf(status));
  }
  MutexLock lock(&mu_);
  Kept& kept = request.ready() ? ready_ : all_;
  if (!kept.answer || kept.state != state) {
    kept.answer = Encode(models, env.options.transport.max_send_message_bytes);
    kept.state = std::move(state);
  }
  return *kept.answer;
}

absl::Status Load(const Env& env, const inference::RepositoryModelLoadRequest& request,
                  inference::RepositoryModelLoadResponse*) {
  AWQD_RETURN_IF_ERROR(CheckRepository(request.repository_name()));
  AWQD_RETURN_IF_ERROR(wire::CheckModel(request.model_name(), "model_name"));
  if (!request.parameters().empty()) {
    return wire::FieldError("parameters", absl::StrCat(request.parameters_size()),
                            "none: a model is what is in its folder");
  }
  return LoadModel(env, request.model_name()).status();
}

absl::Status Unload(const Env& env, const inference::RepositoryModelUnloadRequest& request,
                    inference::RepositoryModelUnloadResponse*) {
  AWQD_RETURN_IF_ERROR(CheckRepository(request.repository_name()));
  AWQD_RETURN_IF_ERROR(wire::CheckModel(request.model_name(), "model_name"));
  for (const auto& [name, value] : request.parameters()) {
    if (name == "unload_dependents") continue;
    return wire::FieldError(absl::StrCat("parameters[", obs::LogText(name, 64), "]"), "a value",
                            "unload_dependents alone");
  }
  return UnloadModel(env, request.model_name());
}

absl::Status CountModels(const Env& env, const inference::ModelStatisticsRequest& request,
                         inference::ModelStatisticsResponse* response) {
  const std::string asked = wire::oip::SplitName(request.name()).model;
  if (!request.name().empty()) {
    AWQD_RETURN_IF_ERROR(FindModel(env, asked, request.version(), "name").status());
  }
  for (const repository::ModelStatus& status : env.models->ListServed()) {
    if (status.model == nullptr) continue;
    if (request.name().empty()) {
      Fill(status, status.name, response->add_model_stats());
    } else if (status.name == asked) {
      Fill(status, request.name(), response->add_model_stats());
    }
  }
  return absl::OkStatus();
}

absl::Status TellTracing(const Env& env, const inference::TraceSettingRequest& request,
                         inference::TraceSettingResponse* response) {
  for (const auto& [name, value] : request.settings()) {
    if (value.value().empty()) continue;  // to ask is to set nothing
    return wire::FieldError(absl::StrCat("settings[", obs::LogText(name, 64), "]"), "a value",
                            "none: traces are set when the server starts");
  }
  const obs::CallRecorder* const recorder = env.options.transport.recorder;
  const bool traces = recorder != nullptr && recorder->tracer() != nullptr;
  (*response->mutable_settings())["trace_level"].add_value(traces ? "TIMESTAMPS" : "OFF");
  return absl::OkStatus();
}

absl::Status TellLogging(const Env&, const inference::LogSettingsRequest& request,
                         inference::LogSettingsResponse* response) {
  for (const auto& [name, value] : request.settings()) {
    if (value.parameter_choice_case() ==
        inference::LogSettingsRequest::SettingValue::PARAMETER_CHOICE_NOT_SET) {
      continue;
    }
    return wire::FieldError(absl::StrCat("settings[", obs::LogText(name, 64), "]"), "a value",
                            "none: the log is set when the server starts");
  }
  auto& settings = *response->mutable_settings();
  settings["log_info"].set_bool_param(obs::Logs(obs::LogLevel::kInfo));
  settings["log_warning"].set_bool_param(obs::Logs(obs::LogLevel::kWarning));
  settings["log_error"].set_bool_param(obs::Logs(obs::LogLevel::kError));
  settings["log_verbose_level"].set_uint32_param(obs::Logs(obs::LogLevel::kDebug) ? 1 : 0);
  return absl::OkStatus();
}

}  // namespace awqd::services::oip
