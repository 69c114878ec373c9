// Names -> loaded weights; their inputs and outputs as one list for all schemes.
#include "server/services/oip/models.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/scheme.h"
#include "server/obs/logging.h"
#include "server/services/weight_lookup.h"
#include "server/wire/oip/infer_wire.h"
#include "server/wire/oip/parameters.h"
#include "server/wire/status.h"
#include "server/wire/validation.h"

namespace awqd::services::oip {
namespace {

using wire::oip::Kind;

void Describe(const model::PlacedWeight& weight, NamedWeight* out) {
  out->k = weight.shape.k;
  out->n = weight.shape.n;
  out->format = weight.format;
  out->scheme = ToString(weight.shape.scheme);
  out->devices = weight.devices();
}

absl::Status FindMlp(const Env& env, NamedWeight* out) {
  v1::GatedMlpRequest request;
  request.mutable_mlp()->set_model(out->name.model);
  request.mutable_mlp()->set_path(out->name.path);
  AWQD_ASSIGN_OR_RETURN(const wire::MlpStacks stacks, MlpLookup::Find(env, request));
  Describe(*stacks.gate->experts.front(), out);
  out->n = stacks.down->shape().n;
  out->experts = stacks.experts;
  return absl::OkStatus();
}

// --- Descriptions ---

using TensorMetadata = inference::ModelMetadataResponse::TensorMetadata;

constexpr char kPlatform[] = "awqd";
constexpr int64_t kAnySize = -1;

struct TensorShape {
  absl::string_view name;
  absl::string_view datatype;
  std::vector<int64_t> dims;
  bool optional = false;
};

// x is FP16 here because that is what most send; it may be BF16 or FP32 as well.
std::vector<TensorShape> ListInputs(const NamedWeight& found) {
  if (found.name.kind == Kind::kDequantize) return {};
  std::vector<TensorShape> out = {{"x", "FP16", {kAnySize, found.k}}};
  if (found.experts) {
    out.push_back({"ids", "INT32", {kAnySize, kAnySize}});
    out.push_back({"router_weights", "FP32", {kAnySize, kAnySize}, true});
  }
  if (found.name.kind == Kind::kProduct) {
    out.push_back({"bias", "FP32", {found.n}, true});
    out.push_back({"activation_scales", "FP32", {kAnySize}, true});
  }
  return out;
}

// Without router weights, each choice of a token has a row of its own.
TensorShape DescribeOutput(const NamedWeight& found) {
  const absl::string_view name = wire::oip::OutputName(found.name.kind);
  if (found.name.kind == Kind::kDequantize) return {name, "FP16", {found.k, found.n}};
  if (found.experts) return {name, "FP16", {kAnySize, kAnySize, found.n}};
  return {name, "FP16", {kAnySize, found.n}};
}

void Fill(const TensorShape& tensor, TensorMetadata* out) {
  out->set_name(std::string(tensor.name));
  out->set_datatype(std::string(tensor.datatype));
  out->mutable_shape()->Add(tensor.dims.begin(), tensor.dims.end());
}

inference::DataType ParseDataType(const TensorShape& tensor) {
  inference::DataType type = inference::TYPE_INVALID;
  const bool known = inference::DataType_Parse(absl::StrCat("TYPE_", tensor.datatype), &type);
  return known ? type : inference::TYPE_INVALID;
}

// With a largest batch, clients put the batch in front of dims.
template <typename Tensor>
void FillConfig(const TensorShape& tensor, bool batched, Tensor* out) {
  out->set_name(std::string(tensor.name));
  out->set_data_type(ParseDataType(tensor));
  out->mutable_dims()->Add(tensor.dims.begin() + (batched ? 1 : 0), tensor.dims.end());
}

// Tokens that are merged into one batch; a request may have more.
int32_t MaxBatchSize(const Env& env) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t tokens = env.options.max_batch_tokens;
  return static_cast<int32_t>(tokens == 0 ? kMost : std::min(tokens, kMost));
}

void FillFacts(const NamedWeight& found, inference::ModelConfig* out) {
  const std::pair<const char*, std::string> facts[] = {{"k", absl::StrCat(found.k)},
                                                       {"n", absl::StrCat(found.n)},
                                                       {"format", found.format},
                                                       {"scheme", found.scheme},
                                                       {"device", found.devices}};
  for (const auto& [name, value] : facts) {
    (*out->mutable_parameters())[name].set_string_value(value);
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<const model::Model>> FindModel(const Env& env,
                                                              const std::string& name,
                                                              absl::string_view version,
                                                              absl::string_view field) {
  AWQD_RETURN_IF_ERROR(wire::CheckModel(name, field));
  const absl::StatusOr<std::shared_ptr<const model::Model>> found = env.models->Find(name);
  if (!found.ok()) return UnavailableWhileStarting(env, name, found.status());
  if (version.empty() || version == absl::StrCat((*found)->version)) return *found;
  return absl::NotFoundError(absl::StrCat("version: got \"", obs::LogText(version, 64),
                                          "\", expected \"", (*found)->version,
                                          "\", which is served of model \"", name, "\""));
}

absl::StatusOr<NamedWeight> FindNamedWeight(const Env& env, const std::string& name,
                                            absl::string_view version) {
  if (static_cast<int64_t>(name.size()) > wire::oip::kMaxNameBytes) {
    return wire::FieldError("name", absl::StrCat(name.size(), " bytes"),
                            absl::StrCat("at most ", wire::oip::kMaxNameBytes));
  }
  NamedWeight out = {.name = wire::oip::SplitName(name)};
  AWQD_ASSIGN_OR_RETURN(const std::shared_ptr<const model::Model> model,
                        FindModel(env, out.name.model, version, "name"));
  if (out.name.path.empty()) {
    return wire::FieldError("name", absl::StrCat("\"", name, "\""), "MODEL/WEIGHT");
  }
  out.version = model->version;
  if (out.name.kind == Kind::kMlp) {
    AWQD_RETURN_IF_ERROR(FindMlp(env, &out));
    return out;
  }
  if (out.name.kind == Kind::kStack) {
    AWQD_ASSIGN_OR_RETURN(const StackPtr stack,
                          env.models->FindStack(out.name.model, out.name.path));
    Describe(*stack->experts.front(), &out);
    out.experts = true;
    return out;
  }
  AWQD_ASSIGN_OR_RETURN(const WeightPtr weight,
                        env.models->FindWeight(out.name.model, out.name.path));
  Describe(*weight, &out);
  return out;
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

absl::Status DescribeServer(const Env& env, const inference::ServerMetadataRequest&,
                            inference::ServerMetadataResponse* response) {
  response->set_name(kPlatform);
  response->set_version(AWQD_VERSION);
  for (const char* extension : {"model_repository", "model_configuration", "statistics",
                                "binary_tensor_data", "parameters", "trace", "logging"}) {
    response->add_extensions(extension);
  }
  if (!env.shared_memory->prefix().empty()) response->add_extensions("system_shared_memory");
  return absl::OkStatus();
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
  if (batched) config.set_max_batch_size(MaxBatchSize(env));
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
  if (batched) {
    config.mutable_dynamic_batching()->set_priority_levels(wire::oip::kPriorityLevels);
    config.mutable_dynamic_batching()->set_default_priority_level(wire::oip::kDefaultPriority);
  }
  FillFacts(found, &config);
  config.mutable_model_transaction_policy()->set_decoupled(false);
  return absl::OkStatus();
}

}  // namespace awqd::services::oip
