// The ModelRepository service: store structs -> messages.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "awqd/v1/model_repository.pb.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/layouts/layout.h"
#include "kernels/plan/plan.h"
#include "kernels/scheme.h"
#include "server/model/model.h"
#include "server/obs/logging.h"
#include "server/services/env.h"
#include "server/services/unary.h"
#include "server/services/weight_lookup.h"
#include "server/wire/status.h"

namespace awqd::services {

namespace {

// By repository::ModelState.
constexpr v1::ModelState kStates[] = {v1::UNLOADED, v1::LOADING, v1::READY, v1::FAILED};

constexpr size_t kMaxReasonBytes = 1024;

void FillUnserved(const std::string& path, const absl::Status& reason, v1::UnservedWeight* out) {
  out->set_path(path);
  out->set_reason(std::string(ClipUtf8(reason.message(), kMaxReasonBytes)));
  out->set_code(static_cast<int32_t>(reason.code()));
}

void FillSummary(const Env& env, const model::Model& model, v1::ModelSummary* out) {
  const model::Losses losses = model::FindLosses(model);
  out->set_name(model.name);
  out->set_state(losses.weights > 0 ? v1::FAILED : v1::READY);
  out->set_message(losses.devices.empty()
                       ? std::string(ClipUtf8(model.UnservedMessage(), kMaxReasonBytes))
                       : losses.Message());
  out->set_unserved_weights(static_cast<int32_t>(model.unserved.size()));
  out->set_weights(static_cast<int32_t>(model.weights.size()));
  out->set_device_bytes(model.device_bytes);
  out->set_version(model.version);
  out->set_stacks(static_cast<int32_t>(model.stacks.size()));
  out->set_loaded_share(1);
  if (env.lender != nullptr) out->set_leases(env.lender->leases(model.name));
}

// "a/row", or "a/row, b/row from 33 tokens on".
std::string KernelsOf(const std::vector<PlanEntry>& entries) {
  std::string out;
  for (const PlanEntry& entry : entries) {
    absl::StrAppend(&out, out.empty() ? "" : ", ", entry.row->name);
    if (entry.min_m > 1) absl::StrAppend(&out, " from ", entry.min_m, " tokens on");
  }
  return out;
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
  if (!plan.integer.empty()) out->set_integer_kernel(KernelsOf(plan.integer));
  if (!plan.quantized.empty()) out->set_a8_kernel(KernelsOf(plan.quantized));
  if (!plan.float8.empty()) out->set_float8_kernel(KernelsOf(plan.float8));
  for (const RefusedRow& refused : plan.refused) {
    v1::RefusedKernel* row = out->add_refused();
    row->set_kernel(refused.name);
    row->set_reason(refused.reason);
  }
}

v1::ActivationQuantization ToProto(ActivationQuantization how) {
  switch (how) {
    case ActivationQuantization::kNone:
      break;
    case ActivationQuantization::kPerToken:
      return v1::INT8_PER_TOKEN;
    case ActivationQuantization::kStatic:
      return v1::INT8_STATIC;
    case ActivationQuantization::kFloat8PerToken:
      return v1::FP8_PER_TOKEN;
    case ActivationQuantization::kFloat8PerBlock:
      return v1::FP8_PER_BLOCK_128;
    case ActivationQuantization::kFloat8Static:
      return v1::FP8_STATIC;
  }
  return v1::ACTIVATIONS_AS_SENT;
}

void FillParts(const model::PlacedWeight& weight, v1::WeightInfo* out) {
  for (const model::WeightPart& part : weight.parts) {
    v1::WeightPart* row = out->add_parts();
    row->set_device(part.weight->device->info().id);
    row->set_column_begin(part.col_begin);
    row->set_column_end(part.col_end());
    row->set_row_begin(part.row_begin);
    row->set_row_end(part.row_end());
    row->set_bytes(part.weight->bytes());
  }
}

void FillWeight(const std::string& path, const WeightPtr& placed, v1::WeightInfo* out) {
  const model::PlacedWeight& weight = *placed;
  out->set_path(path);
  out->set_k(weight.shape.k);
  out->set_n(weight.shape.n);
  out->set_format(weight.format);
  out->set_scheme(ToString(weight.shape.scheme));
  out->set_bytes(weight.bytes());
  out->set_device(weight.devices());
  out->set_has_bias(weight.has_bias);
  out->set_activations(ToProto(weight.activations().how));
  out->set_activation_scale(weight.activations().scale);
  FillParts(weight, out);
  const DeviceWeight& first = *weight.parts.front().weight;
  out->set_has_factor(first.factor() != nullptr);
  out->set_hadamard_size(first.hadamard.size);
  out->set_layout(std::string(first.layout->name));
  FillPlan(first, out);
}

void FillStack(const std::string& path, const absl::StatusOr<StackPtr>& made, v1::StackInfo* out) {
  out->set_path(path);
  if (!made.ok()) {
    out->set_refused(std::string(made.status().message()));
    return;
  }
  const model::WeightStack& stack = **made;
  out->set_experts(static_cast<int32_t>(stack.experts.size()));
  out->set_k(stack.shape().k);
  out->set_n(stack.shape().n);
  out->set_scheme(ToString(stack.shape().scheme));
  out->set_bytes(stack.bytes());
  out->set_device(stack.devices());
  out->set_has_bias(stack.has_bias());
  out->set_format(stack.experts.front()->format);
}

// The most weights and stacks of one answer.
constexpr int kMaxPageSize = 1000;

// About the most bytes of one answer: within what gRPC takes where a client says nothing, and
// within what this server sends. Half of either, since the last weight of a page may go beyond.
size_t PageBytes(const Options& options) {
  constexpr int64_t kClientTakes = 4 << 20;
  return static_cast<size_t>(std::min(kClientTakes, options.transport.max_send_message_bytes) / 2);
}

// Where a page begins: "7:w:path", behind that weight of version 7; "7:s:path", behind a stack; or
// "7:u:path", behind an unserved weight.
struct PageStart {
  std::string kind = "w";
  std::string after;
};

absl::StatusOr<PageStart> ParsePageToken(const std::string& token, const model::Model& model) {
  if (token.empty()) return PageStart();
  const std::vector<std::string> parts = absl::StrSplit(token, absl::MaxSplits(':', 2));
  int64_t version = 0;
  if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &version) ||
      (parts[1] != "w" && parts[1] != "s" && parts[1] != "u")) {
    return wire::FieldError("page_token", "one that no answer had",
                            "next_page_token of the page before");
  }
  if (version != model.version) {
    return wire::WithField(
        absl::AbortedError(absl::StrCat("page_token: got one of version ", version,
                                        ", expected version ", model.version,
                                        ": the model was loaded anew; begin with the first page")),
        "page_token");
  }
  return PageStart{parts[1], parts[2]};
}

class Page {
 public:
  // An answer of about `max_bytes`; `page_size` as the request has it.
  Page(int64_t version, int page_size, size_t max_bytes, v1::GetModelResponse* out)
      : version_(version),
        max_bytes_(max_bytes),
        room_(page_size == 0 ? kMaxPageSize : std::min(page_size, kMaxPageSize)),
        out_(out) {}

  // The members of `all` from `start` on, each as `fill` makes a message of it. The token says where
  // it stopped. False: the page is full, and something is left.
  template <typename Map, typename Info, typename Fill>
  bool Add(absl::string_view kind, const Map& all, const PageStart& start,
           Info* (v1::GetModelResponse::*add)(), Fill fill) {
    const std::string& after = start.kind == kind ? start.after : "";
    for (auto it = after.empty() ? all.begin() : all.upper_bound(after); it != all.end(); ++it) {
      if (room_ == 0 || bytes_ >= max_bytes_) return false;
      Info* const info = (out_->*add)();
      fill(it->first, it->second, info);
      bytes_ += info->ByteSizeLong();
      --room_;
      out_->set_next_page_token(absl::StrCat(version_, ":", kind, ":", it->first));
    }
    return true;
  }

 private:
  const int64_t version_;
  const size_t max_bytes_;
  int room_;
  size_t bytes_ = 0;
  v1::GetModelResponse* const out_;
};

void FillPage(const model::Model& model, const PageStart& start, int page_size, size_t max_bytes,
              v1::GetModelResponse* out) {
  using Out = v1::GetModelResponse;
  Page page(model.version, page_size, max_bytes, out);
  const bool weights =
      start.kind != "w" || page.Add("w", model.weights, start, &Out::add_weights, FillWeight);
  const bool stacks = weights && (start.kind == "u" ||
                                  page.Add("s", model.stacks, start, &Out::add_stacks, FillStack));
  if (stacks && page.Add("u", model.unserved, start, &Out::add_unserved, FillUnserved)) {
    out->clear_next_page_token();
  }
}

absl::Status Get(const Env& env, const v1::GetModelRequest& request,
                 v1::GetModelResponse* response) {
  if (request.page_size() < 0) {
    return wire::FieldError("page_size", absl::StrCat(request.page_size()), "0 or more");
  }
  const absl::StatusOr<ModelPtr> found = env.models->Find(request.name());
  if (!found.ok()) return UnavailableWhileStarting(env, request.name(), found.status());
  const model::Model& model = **found;
  AWQD_ASSIGN_OR_RETURN(const PageStart start, ParsePageToken(request.page_token(), model));
  FillSummary(env, model, response->mutable_model());
  response->set_ignored_tensors(model.ignored_tensors);
  response->set_quant_method(model.quant_method);
  FillPage(model, start, request.page_size(), PageBytes(env.options), response);
  return absl::OkStatus();
}

absl::Status List(const Env& env, const v1::ListModelsRequest&, v1::ListModelsResponse* response) {
  for (const repository::ModelStatus& status : env.models->List()) {
    v1::ModelSummary* summary = response->add_models();
    if (status.model != nullptr) FillSummary(env, *status.model, summary);
    summary->set_name(status.name);
    summary->set_state(kStates[static_cast<int>(status.state)]);
    summary->set_message(status.message);
    summary->set_loaded_share(status.loaded_share);
    if (env.lender != nullptr) summary->set_leases(env.lender->leases(status.name));
    if (status.model == nullptr) summary->set_device_bytes(status.planned_bytes);
  }
  return absl::OkStatus();
}

absl::Status Load(const Env& env, const v1::LoadModelRequest& request,
                  v1::LoadModelResponse* response) {
  AWQD_ASSIGN_OR_RETURN(const ModelPtr model,
                        LoadModel(env, request.name(), request.require_all_weights()));
  FillSummary(env, *model, response->mutable_model());
  response->set_load_ms(model->load_ms);
  response->set_ignored_tensors(model->ignored_tensors);
  for (const auto& [path, reason] : model->unserved) {
    if (response->unserved_size() == kMaxPageSize) break;
    FillUnserved(path, reason, response->add_unserved());
  }
  return absl::OkStatus();
}

absl::Status Unload(const Env& env, const v1::UnloadModelRequest& request,
                    v1::UnloadModelResponse*) {
  return UnloadModel(env, request.name());
}

// Runs `body` on a model, and says in the log how it ended.
template <typename F>
absl::Status Logged(absl::string_view what, const std::string& name, F body) {
  const absl::Status status = wire::ForClient(CatchExceptions(body));
  obs::LogLimited(status.ok() ? obs::LogLevel::kInfo : obs::LogLevel::kWarning, what,
                  {{"model", obs::LogText(name)},
                   {"status", absl::StatusCodeToString(status.code())},
                   {"error", obs::LogText(status.message(), wire::kMaxErrorBytes)}});
  return status;
}

}  // namespace

absl::StatusOr<ModelPtr> LoadModel(const Env& env, const std::string& name,
                                   bool require_all_weights) {
  ModelPtr model;
  AWQD_RETURN_IF_ERROR(Logged("load model", name, [&]() -> absl::Status {
    AWQD_ASSIGN_OR_RETURN(model, env.models->Load(name, require_all_weights));
    return absl::OkStatus();
  }));
  return model;
}

absl::Status UnloadModel(const Env& env, const std::string& name) {
  return Logged("unload model", name, [&] { return env.models->Unload(name); });
}

absl::Status LoadModelOnDemand(const Env& env, const std::string& name) {
  return Logged("load on use", name, [&] { return env.models->LoadOnDemand(name).status(); });
}

void ServeModelRepository(const Env& env) {
  const UnaryOptions control = {
      .need = security::Need::kModelControl, .queue = env.loads.get(), .names_model = true};
  const UnaryOptions page = {.queue = env.pages.get(), .names_model = true, .loads_model = true};
  ServeUnary(env, "awqd.v1.ModelRepository/ListModels", {.queue = env.lists.get()}, List);
  ServeUnary(env, "awqd.v1.ModelRepository/GetModel", page, Get);
  ServeUnary(env, "awqd.v1.ModelRepository/LoadModel", control, Load);
  ServeUnary(env, "awqd.v1.ModelRepository/UnloadModel", control, Unload);
}

}  // namespace awqd::services
