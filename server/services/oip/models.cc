// Names -> loaded weights.
#include "server/services/oip/models.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/description.h"
#include "server/obs/logging.h"
#include "server/services/weight_lookup.h"
#include "server/wire/checks.h"
#include "server/wire/status.h"

namespace awqd::services::oip {
namespace {

using wire::oip::Kind;

void Describe(const model::PlacedWeight& weight, Found* out) {
  out->k = weight.shape.k;
  out->n = weight.shape.n;
  out->format = weight.format;
  out->scheme = ToString(weight.shape.description);
  out->devices = weight.devices();
}

absl::Status FindMlp(const Env& env, Found* out) {
  v1::GatedMlpRequest request;
  request.mutable_mlp()->set_model(out->name.model);
  request.mutable_mlp()->set_path(out->name.path);
  AWQD_ASSIGN_OR_RETURN(const wire::MlpStacks stacks, MlpProjections::Find(env, request));
  Describe(*stacks.gate->experts.front(), out);
  out->n = stacks.down->shape().n;
  out->experts = stacks.experts;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const model::Model>> FindModel(const Env& env,
                                                              const std::string& name,
                                                              absl::string_view version,
                                                              absl::string_view field) {
  AWQD_RETURN_IF_ERROR(wire::CheckModel(name, field));
  const absl::StatusOr<std::shared_ptr<const model::Model>> found = env.models->Find(name);
  if (!found.ok()) return MaybeNotYet(env, name, found.status());
  if (version.empty() || version == absl::StrCat((*found)->version)) return *found;
  return absl::NotFoundError(absl::StrCat("version: got \"", obs::LogText(version, 64),
                                          "\", expected \"", (*found)->version,
                                          "\", which is served of model \"", name, "\""));
}

absl::StatusOr<Found> FindNamed(const Env& env, const std::string& name,
                                absl::string_view version) {
  if (static_cast<int64_t>(name.size()) > wire::oip::kMaxNameBytes) {
    return wire::FieldError("name", absl::StrCat(name.size(), " bytes"),
                            absl::StrCat("at most ", wire::oip::kMaxNameBytes));
  }
  Found out = {.name = wire::oip::SplitName(name)};
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

}  // namespace awqd::services::oip
