// Names -> loaded weights, with their inputs and outputs as one list for all schemes; then names
// that requests can have, of each model that is served; loads; counts.
#include "server/services/oip/models.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/experts.h"
#include "kernels/scheme.h"
#include "server/obs/logging.h"
#include "server/repository/model_store.h"
#include "server/services/unary.h"
#include "server/services/weight_lookup.h"
#include "server/wire/oip/infer_wire.h"
#include "server/wire/oip/name.h"
#include "server/wire/oip/parameters.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"
#include "server/wire/validation.h"

namespace awqd::services::oip {
namespace {

using inference::RepositoryIndexResponse;
using wire::oip::JoinName, wire::oip::Kind;

// --- Names ---

// A loaded weight, stack or MLP.
struct NamedWeight {
  wire::oip::ModelName name;
  int64_t version = 0;
  WeightPtr weight;      // of a stack the first expert's; of an MLP the gate's
  int64_t n = 0;         // of the answer
  bool experts = false;  // requests name them
};

// Finds MODEL/WEIGHT. Errors as FindModel; also NOT_FOUND for a weight, a stack or an MLP that the
// model does not have.
absl::StatusOr<NamedWeight> FindNamedWeight(const Env& env, const std::string& name,
                                            absl::string_view version) {
  if (static_cast<int64_t>(name.size()) > wire::oip::kMaxNameBytes) {
    return wire::FieldError("name", absl::StrCat(name.size(), " bytes"),
                            absl::StrCat("at most ", wire::oip::kMaxNameBytes));
  }
  NamedWeight out = {.name = wire::oip::SplitName(name)};
  AWQD_ASSIGN_OR_RETURN(const ModelPtr model, FindModel(env, out.name.model, version, "name"));
  if (out.name.path.empty()) {
    return wire::FieldError("name", absl::StrCat("\"", name, "\""), "MODEL/WEIGHT");
  }
  out.version = model->version;
  if (out.name.kind == Kind::kMlp) {
    v1::GatedMlpRequest request;
    request.mutable_mlp()->set_model(out.name.model);
    request.mutable_mlp()->set_path(out.name.path);
    AWQD_ASSIGN_OR_RETURN(const wire::MlpStacks stacks, MlpLookup::Find(env, request));
    out.weight = stacks.gate->experts.front();
    out.n = stacks.down->shape().n;
    out.experts = stacks.experts;
    return out;
  }
  if (out.name.kind == Kind::kStack) {
    AWQD_ASSIGN_OR_RETURN(const StackPtr stack,
                          env.models->FindStack(out.name.model, out.name.path));
    out.weight = stack->experts.front();
    out.experts = true;
  } else {
    AWQD_ASSIGN_OR_RETURN(out.weight, env.models->FindWeight(out.name.model, out.name.path));
  }
  out.n = out.weight->shape.n;
  return out;
}

// --- Descriptions ---

using TensorMetadata = inference::ModelMetadataResponse::TensorMetadata;

constexpr int64_t kAnySize = -1;

struct TensorShape {
  absl::string_view name;
  absl::string_view datatype;
  std::vector<int64_t> dims;
  bool optional = false;
};

std::vector<int64_t> BiasDims(const NamedWeight& found, int64_t n) {
  return found.experts ? std::vector<int64_t>{kAnySize, n} : std::vector<int64_t>{n};
}

// x is FP16 here because that is what most send; it may be BF16 or FP32 as well.
std::vector<TensorShape> ListInputs(const NamedWeight& found) {
  if (found.name.kind == Kind::kDequantize) return {};
  std::vector<TensorShape> out = {{"x", "FP16", {kAnySize, found.weight->shape.k}}};
  if (found.experts) {
    out.push_back({"ids", "INT32", {kAnySize, kAnySize}});
    out.push_back({"router_weights", "FP32", {kAnySize, kAnySize}, true});
    // These come in place of ids and router_weights.
    out.push_back({"router_logits", "FP32", {kAnySize, kAnySize}, true});
    out.push_back({"correction_bias", "FP32", {kAnySize}, true});
  }
  if (found.name.kind == Kind::kMlp) {
    const std::vector<int64_t> of_gate = BiasDims(found, found.weight->shape.n);
    out.push_back({"gate_bias", "FP32", of_gate, true});
    out.push_back({"up_bias", "FP32", of_gate, true});
    out.push_back({"down_bias", "FP32", BiasDims(found, found.n), true});
    if (found.experts) {
      out.push_back({"shared_expert_gate", "FP32", {found.weight->shape.k}, true});
    }
  }
  if (found.name.kind == Kind::kProduct) out.push_back({"bias", "FP32", {found.n}, true});
  out.push_back({"activation_scales", "FP32", {kAnySize}, true});
  if (found.name.kind == Kind::kMlp) {
    out.push_back({"down_activation_scales", "FP32", {kAnySize}, true});
  }
  return out;
}

// Without router weights, each choice of a token has a row of its own.
TensorShape DescribeOutput(const NamedWeight& found) {
  const absl::string_view name = wire::oip::OutputName(found.name.kind);
  if (found.name.kind == Kind::kDequantize) return {name, "FP16", {found.weight->shape.k, found.n}};
  if (found.experts) return {name, "FP16", {kAnySize, kAnySize, found.n}};
  return {name, "FP16", {kAnySize, found.n}};
}

void Fill(const TensorShape& tensor, TensorMetadata* out) {
  out->set_name(std::string(tensor.name));
  out->set_datatype(std::string(tensor.datatype));
  out->mutable_shape()->Add(tensor.dims.begin(), tensor.dims.end());
}

// With a largest batch, clients put the batch in front of dims.
template <typename Tensor>
void FillConfig(const TensorShape& tensor, bool batched, Tensor* out) {
  out->set_name(std::string(tensor.name));
  inference::DataType type = inference::TYPE_INVALID;
  (void)inference::DataType_Parse(absl::StrCat("TYPE_", tensor.datatype), &type);
  out->set_data_type(type);
  out->mutable_dims()->Add(tensor.dims.begin() + (batched ? 1 : 0), tensor.dims.end());
}

void FillFacts(const NamedWeight& found, inference::ModelConfig* out) {
  const model::PlacedWeight& weight = *found.weight;
  const std::pair<const char*, std::string> facts[] = {{"k", absl::StrCat(weight.shape.k)},
                                                       {"n", absl::StrCat(found.n)},
                                                       {"format", weight.format},
                                                       {"scheme", ToString(weight.shape.scheme)},
                                                       {"device", weight.devices()}};
  for (const auto& [name, value] : facts) {
    (*out->mutable_parameters())[name].set_string_value(value);
  }
}

// --- The repository ---

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
                   " (the server's max_send_message_bytes); GetModel of awqd.v1.ModelRepository "
                   "answers in pages"));
}

void Count(uint64_t count, uint64_t ns, inference::StatisticDuration* out) {
  out->set_count(count);
  out->set_ns(ns);
}

void Fill(const repository::ModelStatus& status, const std::string& name,
          inference::ModelStatistics* out) {
  out->set_name(name);
  out->set_version(VersionOf(status));
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

absl::Status IsModelReady(const Env& env, const inference::ModelReadyRequest& request,
                          inference::ModelReadyResponse* response) {
  const wire::oip::ModelName name = wire::oip::SplitName(request.name());
  // The request that needs an idle model loads it; this question does not.
  if (request.version().empty() && env.models->IsUnloadedIdle(name.model)) {
    response->set_ready(true);
    return absl::OkStatus();
  }
  const absl::Status found =
      name.path.empty() ? FindModel(env, request.name(), request.version(), "name").status()
                        : FindNamedWeight(env, request.name(), request.version()).status();
  response->set_ready(found.ok());
  // A wrong question is an error; a missing model is not ready.
  return absl::IsInvalidArgument(found) ? found : absl::OkStatus();
}

absl::Status DescribeModel(const Env& env, const inference::ModelMetadataRequest& request,
                           inference::ModelMetadataResponse* response) {
  AWQD_ASSIGN_OR_RETURN(const NamedWeight found,
                        FindNamedWeight(env, request.name(), request.version()));
  response->set_name(request.name());
  response->add_versions(absl::StrCat(found.version));
  response->set_platform(kPlatform);
  for (const TensorShape& input : ListInputs(found)) {
    if (!input.optional) Fill(input, response->add_inputs());
  }
  Fill(DescribeOutput(found), response->add_outputs());
  return absl::OkStatus();
}

absl::Status ConfigureModel(const Env& env, const inference::ModelConfigRequest& request,
                            inference::ModelConfigResponse* response) {
  AWQD_ASSIGN_OR_RETURN(const NamedWeight found,
                        FindNamedWeight(env, request.name(), request.version()));
  inference::ModelConfig& config = *response->mutable_config();
  config.set_name(request.name());
  config.set_platform(kPlatform);
  config.set_backend(kPlatform);
  config.mutable_version_policy()->mutable_latest()->set_num_versions(1);
  const bool batched = found.name.kind != Kind::kDequantize;
  if (batched) {
    // Tokens that are merged into one batch; a request may have more.
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    const int64_t tokens = env.options.max_batch_tokens;
    config.set_max_batch_size(static_cast<int32_t>(tokens == 0 ? kMost : std::min(tokens, kMost)));
    config.mutable_dynamic_batching()->set_priority_levels(wire::oip::kPriorityLevels);
    config.mutable_dynamic_batching()->set_default_priority_level(wire::oip::kDefaultPriority);
  }
  std::vector<absl::string_view> optional;
  for (const TensorShape& input : ListInputs(found)) {
    if (input.optional) {
      optional.push_back(input.name);
    } else {
      FillConfig(input, batched, config.add_input());
    }
  }
  FillConfig(DescribeOutput(found), batched, config.add_output());
  if (!optional.empty()) {
    (*config.mutable_parameters())["optional_inputs"].set_string_value(
        absl::StrJoin(optional, ","));
  }
  FillFacts(found, &config);
  config.mutable_model_transaction_policy()->set_decoupled(false);
  return absl::OkStatus();
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
    if (status.model == nullptr || (!asked.empty() && status.name != asked)) continue;
    Fill(status, asked.empty() ? status.name : request.name(), response->add_model_stats());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelPtr> FindModel(const Env& env, const std::string& name,
                                   absl::string_view version, absl::string_view field) {
  AWQD_RETURN_IF_ERROR(wire::CheckModel(name, field));
  const absl::StatusOr<ModelPtr> found = env.models->Find(name);
  if (!found.ok()) return UnavailableWhileStarting(env, name, found.status());
  if (version.empty() || version == absl::StrCat((*found)->version)) return *found;
  return absl::NotFoundError(absl::StrCat("version: got \"", obs::LogText(version, 64),
                                          "\", expected \"", (*found)->version,
                                          "\", which is served of model \"", name, "\""));
}

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

void ServeModels(const Env& env) {
  // The list lives as long as the handler that knows it.
  const auto names = std::make_shared<NameList>();
  const UnaryOptions of_model = {.queue = env.pages.get(), .loads_model = true};
  const UnaryOptions loads = {.need = security::Need::kModelControl, .queue = env.loads.get()};
  ServeUnary(env, MethodPath("ModelReady"), {}, IsModelReady);
  ServeUnary(env, MethodPath("ModelMetadata"), of_model, DescribeModel);
  ServeUnary(env, MethodPath("ModelConfig"), of_model, ConfigureModel);
  ServeUnary(env, MethodPath("ModelStatistics"), {.queue = env.pages.get()}, CountModels);
  ServeUnary(env, MethodPath("RepositoryModelLoad"), loads, Load);
  ServeUnary(env, MethodPath("RepositoryModelUnload"), loads, Unload);
  ServeUnary<inference::RepositoryIndexRequest, grpc::ByteBuffer>(
      env, MethodPath("RepositoryIndex"), {.queue = env.lists.get()},
      [&env, names](const transport::UnaryCall&, const auto& request,
                    auto* answer) -> absl::Status {
        AWQD_ASSIGN_OR_RETURN(*answer, names->Encoded(env, request));
        return absl::OkStatus();
      });
}

}  // namespace awqd::services::oip
