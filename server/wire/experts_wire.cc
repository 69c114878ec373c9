// Expert ids, router weights, and the shapes of three projections.
#include "server/wire/experts_wire.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/wire/router.h"

namespace awqd::wire {
namespace {

constexpr DTypeMask kIds = MaskOf(DType::kInt32);
constexpr DTypeMask kExpertActivations = kFloatingMask | MaskOf(DType::kE4m3);

// [..., top_k] with the leading dimensions of the activations.
absl::Status CheckIdsShape(const v1::Tensor& ids, const v1::Tensor& activations) {
  const std::vector<int64_t> got(ids.shape().begin(), ids.shape().end());
  std::vector<int64_t> leading(activations.shape().begin(), activations.shape().end());
  leading.pop_back();
  const bool fits =
      got.size() == leading.size() + 1 && std::equal(leading.begin(), leading.end(), got.begin());
  if (!fits || got.back() < 1 || got.back() > kMaxTopK) {
    std::string expected = ShapeText(leading);
    expected.pop_back();
    return FieldError(
        "expert_ids.shape", ShapeText(got),
        absl::StrCat(expected, leading.empty() ? "" : ", ",
                     "top_k], leading dimensions as in the activations and top_k 1 to ", kMaxTopK));
  }
  return absl::OkStatus();
}

// Whether `number` of groups, or of what is chosen, is from 1 to `most`.
absl::Status CheckCount(absl::string_view field, int64_t number, int64_t most,
                        absl::string_view why) {
  if (number >= 1 && number <= most) return absl::OkStatus();
  return FieldError(absl::StrCat("router.", field), absl::StrCat(number),
                    absl::StrCat("1 to ", most, why));
}

// A router by itself. Groups that are not set are one.
absl::Status CheckRouter(const v1::Router& router, const v1::Tensor& activations) {
  if (!router.has_logits()) {
    return FieldError("router.logits", "nothing", "a tensor of shape [..., experts]");
  }
  AWQD_ASSIGN_OR_RETURN(const TensorInfo logits,
                        CheckTensor(router.logits(), kFloatingMask, "router.logits"));
  std::vector<int64_t> expected(activations.shape().begin(), activations.shape().end());
  const int64_t experts = logits.shape.empty() ? 0 : logits.shape.back();
  expected.back() = experts;
  if (experts < 1 || logits.shape != expected) {
    expected.pop_back();
    return FieldError("router.logits.shape", ShapeText(logits.shape),
                      absl::StrCat(ShapeText(expected),
                                   " and experts: leading dimensions as in the activations"));
  }
  AWQD_RETURN_IF_ERROR(CheckEnum(v1::RouterScoring_IsValid(router.scoring()), router.scoring(),
                                 "router.scoring", "SOFTMAX, SIGMOID or SQRTSOFTPLUS"));
  if (router.has_correction_bias()) {
    AWQD_ASSIGN_OR_RETURN(
        const TensorInfo bias,
        CheckTensor(router.correction_bias(), kFloatingMask, "router.correction_bias"));
    if (bias.shape != std::vector<int64_t>{experts}) {
      return FieldError("router.correction_bias.shape", ShapeText(bias.shape),
                        absl::StrCat("[", experts, "], as many as the logits have"));
    }
  }
  int64_t eligible = experts;
  if (router.n_group() != 0 || router.topk_group() != 0) {
    AWQD_RETURN_IF_ERROR(CheckCount("n_group", router.n_group(), experts, ""));
    if (experts % router.n_group() != 0) {
      return FieldError("router.n_group", absl::StrCat(router.n_group()),
                        absl::StrCat("a divisor of ", experts, ", the number of experts"));
    }
    AWQD_RETURN_IF_ERROR(
        CheckCount("topk_group", router.topk_group(), router.n_group(), ", the number of groups"));
    eligible = router.topk_group() * (experts / router.n_group());
  }
  AWQD_RETURN_IF_ERROR(CheckCount("top_k", router.top_k(), std::min(eligible, kMaxTopK),
                                  ", of the experts that may be chosen"));
  if (std::isfinite(router.routed_scaling_factor())) return absl::OkStatus();
  return FieldError("router.routed_scaling_factor", absl::StrCat(router.routed_scaling_factor()),
                    "a finite number");
}

// expert_ids and router_weights by themselves, or the router.
template <typename Request>
absl::Status CheckRouting(const Request& request) {
  if (request.has_router()) {
    for (const auto& [field, given] : {std::pair("expert_ids", request.has_expert_ids()),
                                       {"router_weights", request.has_router_weights()}}) {
      if (given) return FieldError(field, "a tensor", "none with a router");
    }
    return CheckRouter(request.router(), request.activations());
  }
  if (!request.has_expert_ids()) {
    if (!request.has_router_weights()) return absl::OkStatus();
    return FieldError("router_weights", "a tensor", "none without expert_ids");
  }
  AWQD_RETURN_IF_ERROR(CheckTensor(request.expert_ids(), kIds, "expert_ids").status());
  AWQD_RETURN_IF_ERROR(CheckIdsShape(request.expert_ids(), request.activations()));
  if (!request.has_router_weights()) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(const TensorInfo info,
                        CheckTensor(request.router_weights(), kFloatingMask, "router_weights"));
  const auto& ids = request.expert_ids().shape();
  if (std::equal(ids.begin(), ids.end(), info.shape.begin(), info.shape.end())) {
    return absl::OkStatus();
  }
  return FieldError("router_weights.shape", ShapeText(info.shape),
                    absl::StrCat(ShapeText(std::vector<int64_t>(ids.begin(), ids.end())),
                                 ", that of expert_ids"));
}

// Where element `index` is, as "[3, 1]".
std::string PlaceText(int64_t index, absl::Span<const int64_t> shape) {
  std::vector<int64_t> place(shape.size());
  for (size_t i = shape.size(); i-- > 0; index /= shape[i]) place[i] = index % shape[i];
  return ShapeText(place);
}

absl::Status TakeIds(v1::Tensor* tensor, int64_t experts, engine::RoutedWork* work) {
  AWQD_ASSIGN_OR_RETURN(const TensorInfo info, CheckTensor(*tensor, kIds, "expert_ids"));
  AWQD_ASSIGN_OR_RETURN(const std::string bytes, TakeBytes(tensor, info, "expert_ids"));
  work->of_experts = true;
  work->top_k = info.shape.back();
  work->ids.resize(info.elements);
  if (!bytes.empty()) std::memcpy(work->ids.data(), bytes.data(), bytes.size());
  for (int64_t i = 0; i < info.elements; ++i) {
    const int32_t id = work->ids[i];
    if (id >= 0 && id < experts) continue;
    return FieldError("expert_ids", absl::StrCat(id, " at ", PlaceText(i, info.shape)),
                      absl::StrCat("0 to ", experts - 1, ": there are ", experts, " experts"));
  }
  return absl::OkStatus();
}

RouterScoring ScoringOf(v1::RouterScoring scoring) {
  if (scoring == v1::SIGMOID) return RouterScoring::kSigmoid;
  return scoring == v1::SQRTSOFTPLUS ? RouterScoring::kSqrtSoftplus : RouterScoring::kSoftmax;
}

// Chooses the experts of a router that CheckRouter has passed.
absl::Status TakeRouter(v1::Router* from, int64_t experts, engine::RoutedWork* work) {
  std::vector<int64_t> shape(from->logits().shape().begin(), from->logits().shape().end());
  shape.back() = experts;
  const std::string why = absl::StrCat("there are ", experts, " experts");
  AWQD_ASSIGN_OR_RETURN(const std::vector<float> logits,
                        TakeFloats(from->mutable_logits(), shape, "router.logits", why));
  Router router = {.scoring = ScoringOf(from->scoring()),
                   .experts = experts,
                   .top_k = from->top_k(),
                   .n_group = std::max(1, from->n_group()),
                   .topk_group = std::max(1, from->topk_group()),
                   .norm_topk_prob = from->norm_topk_prob()};
  if (from->has_routed_scaling_factor()) {
    router.routed_scaling_factor = from->routed_scaling_factor();
  }
  if (from->has_correction_bias()) {
    AWQD_ASSIGN_OR_RETURN(
        router.correction_bias,
        TakeFloats(from->mutable_correction_bias(), {experts}, "router.correction_bias", why));
  }
  RoutedChoices choices = ChooseExperts(router, logits);
  work->of_experts = work->summed = true;
  work->top_k = router.top_k;
  work->ids = std::move(choices.ids);
  work->router_weights = std::move(choices.weights);
  return absl::OkStatus();
}

template <typename Request>
QuantizationFields QuantizationOf(const Request& request) {
  return {request.activation_quantization(), request.activations().dtype(), true};
}

// Everything but the weights: tokens, routing, output and payload. `in` is the weight that the
// activations go to, `n` how wide the answer is.
template <typename Request, typename Work>
absl::Status FillRouted(Request* request, const WeightShape& in, int64_t n, int64_t experts,
                        int64_t max_send_bytes, std::optional<int64_t> cut_bytes, Job<Work>* job) {
  AWQD_ASSIGN_OR_RETURN(const TensorInfo x, CheckTensor(request->activations(), kExpertActivations,
                                                        "activations", cut_bytes));
  Work& work = job->work;
  AWQD_ASSIGN_OR_RETURN(work.rows, CountTokens(x, in.k));
  work.x_dtype = x.dtype;
  AWQD_ASSIGN_OR_RETURN(work.out_dtype,
                        OutputDType(request->output_dtype(), DefaultOutput(x.dtype)));
  // One scale stands for all tokens.
  if (work.token_scales.size() == 1) work.token_scales.resize(work.rows, work.token_scales[0]);
  job->answer.shape = x.shape;
  job->answer.shape.back() = n;
  int64_t answer_rows = work.rows;
  if (request->has_router()) {
    AWQD_RETURN_IF_ERROR(TakeRouter(request->mutable_router(), experts, &work));
  } else if (request->has_expert_ids()) {
    AWQD_RETURN_IF_ERROR(TakeIds(request->mutable_expert_ids(), experts, &work));
    if (request->has_router_weights()) {
      const std::vector<int64_t> shape(request->expert_ids().shape().begin(),
                                       request->expert_ids().shape().end());
      work.summed = true;
      AWQD_ASSIGN_OR_RETURN(work.router_weights, TakeFloats(request->mutable_router_weights(),
                                                            shape, "router_weights", ""));
    } else {
      job->answer.shape.insert(job->answer.shape.end() - 1, work.top_k);
      answer_rows = work.rows * work.top_k;  // as many as there are ids
    }
  }
  return FillProduct(request, x, answer_rows, max_send_bytes, cut_bytes, job);
}

// The constants of the activation function: those of the request, or their defaults.
absl::StatusOr<GateParameters> GateParametersOf(const v1::GatedMlpRequest& request) {
  const v1::ActivationParameters& given = request.activation_parameters();
  const v1::ActivationFunction function = request.activation_function();
  const bool oai = function == v1::SWIGLU_OAI, situ = function == v1::SITU;
  GateParameters out;
  if (oai) out = {.limit = 7.0f, .alpha = 1.702f};
  if (situ) out = {.beta = 4.0f, .linear_beta = 25.0f};
  const auto take = [&](bool has, float value, absl::string_view name, bool is_known,
                        absl::string_view range, bool in_range, float* to) -> absl::Status {
    if (!has) return absl::OkStatus();
    const std::string field = absl::StrCat("activation_parameters.", name);
    if (!is_known) {
      return FieldError(
          field, absl::StrCat(value),
          absl::StrCat("none: ", v1::ActivationFunction_Name(function), " has no such constant"));
    }
    if (!std::isfinite(value) || !in_range) return FieldError(field, absl::StrCat(value), range);
    *to = value;
    return absl::OkStatus();
  };
  constexpr absl::string_view kPositive = "a finite number above 0";
  const float limit = given.limit(), beta = given.beta(), linear_beta = given.linear_beta();
  AWQD_RETURN_IF_ERROR(
      take(given.has_limit(), limit, "limit", !situ, kPositive, limit > 0, &out.limit));
  AWQD_RETURN_IF_ERROR(
      take(given.has_alpha(), given.alpha(), "alpha", oai, "a finite number", true, &out.alpha));
  AWQD_RETURN_IF_ERROR(take(given.has_beta(), beta, "beta", situ, kPositive, beta > 0, &out.beta));
  AWQD_RETURN_IF_ERROR(take(given.has_linear_beta(), linear_beta, "linear_beta", situ,
                            "a finite number of at least 0", linear_beta >= 0, &out.linear_beta));
  return out;
}

absl::string_view SharedField(const v1::GatedMlpRequest& request) {
  return request.has_packed() ? "packed.shared_expert" : "mlp.shared_expert";
}

// A bias of the request for all experts of a projection, or nothing.
absl::StatusOr<std::vector<float>> TakeBias(v1::Tensor* tensor, const MlpStacks& stacks, int64_t n,
                                            absl::string_view field) {
  const auto experts = static_cast<int64_t>(stacks.gate->experts.size());
  if (!stacks.experts) return TakeFloats(tensor, {n}, field, absl::StrCat("N = ", n));
  return TakeFloats(tensor, {experts, n}, field,
                    absl::StrCat("there are ", experts, " experts with N = ", n));
}

absl::Status CheckFit(absl::string_view field, const model::WeightStack& stack, int64_t k,
                      int64_t n, size_t experts) {
  const WeightShape& shape = stack.shape();
  if (stack.experts.size() != experts) {
    return FieldError(field, absl::StrCat(stack.experts.size(), " experts"),
                      experts == 1 ? "1" : absl::StrCat(experts, ", as many as the gate has"));
  }
  if (shape.k == k && (n < 0 || shape.n == n)) return absl::OkStatus();
  return FieldError(field, absl::StrCat("[", shape.k, ", ", shape.n, "]"),
                    absl::StrCat("[", k, ", ", n < 0 ? "N" : absl::StrCat(n),
                                 "]: the gate decides which shapes fit"));
}

// --- How activations are rounded to E4M3 ---

using engine::Rounding;
using MlpProjections = engine::GatedMlpWork::Stacks;

// As the checkpoint of each expert says. `weight`: what the stack is called in errors.
absl::StatusOr<Rounding> DeclaredRounding(const model::WeightStack& stack,
                                          absl::string_view weight) {
  Rounding out = {.how = stack.experts.front()->activations().how};
  if (out.how != ActivationQuantization::kNone && !IsFloat8(out.how)) {
    return NotDeclared(v1::FP8_AS_DECLARED, weight, out.how);
  }
  for (const auto& expert : stack.experts) {
    const DeclaredActivations& own = expert->activations();
    if (own.how != out.how) {
      return FieldError("activation_quantization", "FP8_AS_DECLARED",
                        absl::StrCat("another: the experts of ", weight, " declare several"));
    }
    if (HasGivenScales(own.how)) out.scales.push_back(own.scale);
  }
  return out;
}

absl::Status NothingDeclared(absl::string_view weight) {
  return NotDeclared(v1::FP8_AS_DECLARED, weight, ActivationQuantization::kNone);
}

// Those of all projections, of which some may declare nothing.
absl::Status FillDeclared(MlpProjections* mlp, absl::string_view prefix, bool* any) {
  for (const auto& [name, stack, rounding] : {std::tuple("gate", &mlp->gate, &mlp->of_gate),
                                              {"up", &mlp->up, &mlp->of_up},
                                              {"down", &mlp->down, &mlp->of_down}}) {
    AWQD_ASSIGN_OR_RETURN(*rounding, DeclaredRounding(**stack, absl::StrCat(prefix, name)));
    *any = *any || rounding->how != ActivationQuantization::kNone;
  }
  return absl::OkStatus();
}

absl::Status FillDeclared(MlpProjections* mlp, MlpProjections* shared) {
  bool any = false;
  AWQD_RETURN_IF_ERROR(FillDeclared(mlp, "", &any));
  if (shared->gate != nullptr) AWQD_RETURN_IF_ERROR(FillDeclared(shared, "shared_expert.", &any));
  return any ? absl::OkStatus() : NothingDeclared("the gated MLP");
}

// The scales of FP8_STATIC: one for all, or one for each of `experts` and then the shared one's.
absl::StatusOr<std::vector<float>> TakeExpertScales(v1::Tensor* tensor, absl::string_view field,
                                                    int64_t experts, bool shared) {
  return TakePositiveScales(tensor, field, {{experts + (shared ? 1 : 0)}},
                            absl::StrCat("one element, or ", experts, ", one for each expert",
                                         shared ? ", and one for the shared one" : ""));
}

// The scales that E4M3 activations were sent with; kNone of others.
template <typename Request>
absl::StatusOr<SentScales> TakeSent(Request* request, std::optional<int64_t> cut_bytes) {
  AWQD_ASSIGN_OR_RETURN(const TensorInfo x, CheckTensor(request->activations(), kExpertActivations,
                                                        "activations", cut_bytes));
  if (x.dtype != DType::kE4m3) return SentScales{ActivationQuantization::kNone, {}};
  return TakeSentScales(request->mutable_activation_scales(), x);
}

template <typename Request>
absl::StatusOr<Rounding> RoundingOf(Request* request, const model::WeightStack& stack) {
  const v1::ActivationQuantization how = request->activation_quantization();
  if (how == v1::FP8_AS_DECLARED) {
    AWQD_ASSIGN_OR_RETURN(Rounding out, DeclaredRounding(stack, "the stack"));
    if (out.how == ActivationQuantization::kNone) return NothingDeclared("the stack");
    return out;
  }
  Rounding out = {.how = FromProto(how), .from_request = how == v1::FP8_STATIC};
  if (!out.from_request) return out;
  AWQD_ASSIGN_OR_RETURN(out.scales,
                        TakeExpertScales(request->mutable_activation_scales(), "activation_scales",
                                         static_cast<int64_t>(stack.experts.size()), false));
  return out;
}

// The roundings of activations that are not E4M3 already, and of what enters down.
absl::Status FillRoundings(v1::GatedMlpRequest* request, MlpProjections* mlp,
                           MlpProjections* shared) {
  const v1::ActivationQuantization how = request->activation_quantization();
  if (how == v1::FP8_AS_DECLARED) return FillDeclared(mlp, shared);
  Rounding all = {.how = FromProto(how), .from_request = how == v1::FP8_STATIC};
  for (MlpProjections* each : {mlp, shared}) each->of_gate = each->of_up = each->of_down = all;
  if (!all.from_request) return absl::OkStatus();
  const auto experts = static_cast<int64_t>(mlp->gate->experts.size());
  const bool has_shared = shared->gate != nullptr;
  std::vector<float> in = {1};  // those of E4M3 activations have been taken
  if (request->activations().dtype() != v1::FP8_E4M3) {
    AWQD_ASSIGN_OR_RETURN(in, TakeExpertScales(request->mutable_activation_scales(),
                                               "activation_scales", experts, has_shared));
  }
  AWQD_ASSIGN_OR_RETURN(std::vector<float> middle,
                        TakeExpertScales(request->mutable_down_activation_scales(),
                                         "down_activation_scales", experts, has_shared));
  for (const auto& [scales, of] :
       {std::tuple(&in, &MlpProjections::of_gate), {&middle, &MlpProjections::of_down}}) {
    (shared->*of).scales = {scales->back()};
    if (has_shared && scales->size() > 1) scales->pop_back();
    (mlp->*of).scales = std::move(*scales);
  }
  for (MlpProjections* each : {mlp, shared}) each->of_up = each->of_gate;
  return absl::OkStatus();
}

// The errors of a weight in a list name its place in the request.
absl::Status RenameField(const absl::Status& status, absl::string_view field) {
  constexpr absl::string_view kAlone = "packed";
  const auto renamed = [&](absl::string_view text) {
    return absl::StartsWith(text, kAlone) ? absl::StrCat(field, text.substr(kAlone.size()))
                                          : absl::StrCat(field, ": ", text);
  };
  return WithField(absl::Status(status.code(), renamed(status.message())),
                   renamed(FieldOf(status)));
}

std::string ExpertField(absl::string_view field, int expert) {
  return absl::StrCat(field, ".experts[", expert, "]");
}

// `bytes`: of the stacks that were checked before; this one's are added.
absl::Status CheckStack(const v1::PackedStack& packed, absl::string_view field, int64_t max_bytes,
                        int64_t* bytes) {
  if (packed.experts().empty() || packed.experts_size() > kMaxInlineExperts) {
    return FieldError(absl::StrCat(field, ".experts"), absl::StrCat(packed.experts_size()),
                      absl::StrCat("1 to ", kMaxInlineExperts, " weights"));
  }
  for (int i = 0; i < packed.experts_size(); ++i) {
    const absl::Status status = CheckPacked(packed.experts(i), max_bytes, bytes);
    if (!status.ok()) return RenameField(status, ExpertField(field, i));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckRequest(const v1::GroupedQuantizedMatmulRequest& request,
                          std::optional<int64_t> cut_bytes) {
  AWQD_RETURN_IF_ERROR(CheckSource(request, "the path of a stack of experts"));
  AWQD_RETURN_IF_ERROR(CheckProduct(request, cut_bytes, kExpertActivations, kFloatingMask));
  if (!request.has_expert_ids() && !request.has_router()) {
    return FieldError("expert_ids", "nothing",
                      "an INT32 tensor of shape [..., top_k], or a router");
  }
  AWQD_RETURN_IF_ERROR(CheckQuantization(QuantizationOf(request), request.has_activation_scales()));
  return CheckRouting(request);
}

absl::Status CheckRequest(const v1::GatedMlpRequest& request, std::optional<int64_t> cut_bytes) {
  if (request.has_mlp()) {
    const v1::GatedMlpRef& mlp = request.mlp();
    AWQD_RETURN_IF_ERROR(CheckModel(mlp.model(), "mlp.model"));
    const bool common = !mlp.path().empty();
    if (common) AWQD_RETURN_IF_ERROR(CheckPath(mlp.path(), "mlp.path", ""));
    const auto check = [&](const std::string& path, absl::string_view field) {
      if (path.empty() && common) return absl::OkStatus();
      return CheckPath(path, field, "the path of a projection, or mlp.path");
    };
    AWQD_RETURN_IF_ERROR(check(mlp.gate(), "mlp.gate"));
    AWQD_RETURN_IF_ERROR(check(mlp.up(), "mlp.up"));
    AWQD_RETURN_IF_ERROR(check(mlp.down(), "mlp.down"));
    AWQD_RETURN_IF_ERROR(
        CheckLength(mlp.shared_expert(), "mlp.shared_expert", kMaxWeightPathBytes));
  } else if (!request.has_packed()) {
    return FieldError("mlp", "nothing", "mlp {model, path}, or packed");
  }
  AWQD_RETURN_IF_ERROR(CheckProduct(request, cut_bytes, kExpertActivations, kFloatingMask));
  QuantizationFields in = QuantizationOf(request), middle = in;
  middle.activations = v1::FP32;
  // With E4M3 activations the field says how the input of down is rounded.
  if (in.activations == v1::FP8_E4M3) in.how = v1::ACTIVATIONS_AS_SENT;
  AWQD_RETURN_IF_ERROR(CheckQuantization(in, request.has_activation_scales()));
  AWQD_RETURN_IF_ERROR(
      CheckQuantization(middle, request.has_down_activation_scales(), "down_activation_scales"));
  AWQD_RETURN_IF_ERROR(GateParametersOf(request).status());
  if (request.has_gate_bias() != request.has_up_bias()) {
    const bool gate = request.has_gate_bias();
    return FieldError(gate ? "up_bias" : "gate_bias", "nothing",
                      gate ? "a tensor with gate_bias" : "a tensor with up_bias");
  }
  AWQD_RETURN_IF_ERROR(CheckRouting(request));
  const bool shared = request.has_packed() ? request.packed().has_shared_expert()
                                           : !request.mlp().shared_expert().empty();
  const bool summed = request.has_router() || request.has_router_weights();
  if (shared && !summed) {
    return FieldError(SharedField(request), "a gated MLP",
                      "none without router_weights or a router: it is added to their sum");
  }
  if (request.has_shared_expert_gate() && !shared) {
    return FieldError("shared_expert_gate", "a tensor",
                      absl::StrCat("none without ", SharedField(request)));
  }
  return absl::OkStatus();
}

absl::StatusOr<Job<engine::GroupedMatmulWork>> BuildGroupedMatmul(
    v1::GroupedQuantizedMatmulRequest* request, StackPtr stack, int64_t max_send_bytes,
    std::optional<int64_t> cut_bytes) {
  Job<engine::GroupedMatmulWork> job;
  const WeightShape& shape = stack->shape();
  const auto experts = static_cast<int64_t>(stack->experts.size());
  AWQD_ASSIGN_OR_RETURN(SentScales sent, TakeSent(request, cut_bytes));
  job.work.token_scales = std::move(sent.scales);
  AWQD_RETURN_IF_ERROR(
      FillRouted(request, shape, shape.n, experts, max_send_bytes, cut_bytes, &job));
  if (request->has_bias()) {
    AWQD_ASSIGN_OR_RETURN(
        job.work.bias,
        TakeFloats(request->mutable_bias(), {experts, shape.n}, "bias",
                   absl::StrCat("there are ", experts, " experts with N = ", shape.n)));
  }
  job.work.rounding.how = sent.how;
  if (sent.how == ActivationQuantization::kNone) {
    AWQD_ASSIGN_OR_RETURN(job.work.rounding, RoundingOf(request, *stack));
  }
  job.work.stack = std::move(stack);
  return job;
}

absl::StatusOr<Job<engine::GatedMlpWork>> BuildGatedMlp(v1::GatedMlpRequest* request,
                                                        MlpStacks stacks, int64_t max_send_bytes,
                                                        std::optional<int64_t> cut_bytes) {
  const WeightShape& gate = stacks.gate->shape();
  const size_t experts = stacks.gate->experts.size();
  const auto field = [&](absl::string_view projection) {
    return absl::StrCat(request->has_packed() ? "packed." : "mlp.", projection);
  };
  AWQD_RETURN_IF_ERROR(CheckFit(field("up"), *stacks.up, gate.k, gate.n, experts));
  AWQD_RETURN_IF_ERROR(CheckFit(field("down"), *stacks.down, gate.n, -1, experts));
  const bool router = request->has_router();
  if (stacks.experts != (request->has_expert_ids() || router)) {
    return stacks.experts
               ? FieldError(
                     "expert_ids", "nothing",
                     "an INT32 tensor of shape [..., top_k]: the projections are stacks of experts")
               : FieldError(router ? "router" : "expert_ids", router ? "one" : "a tensor",
                            "none: the projections have no experts");
  }
  const int64_t n = stacks.down->shape().n;
  const engine::GatedMlpWork::Stacks& shared = stacks.shared;
  if (shared.gate != nullptr) {
    const absl::string_view common = SharedField(*request);
    const int64_t middle = shared.gate->shape().n;
    AWQD_RETURN_IF_ERROR(CheckFit(absl::StrCat(common, ".gate"), *shared.gate, gate.k, -1, 1));
    AWQD_RETURN_IF_ERROR(CheckFit(absl::StrCat(common, ".up"), *shared.up, gate.k, middle, 1));
    AWQD_RETURN_IF_ERROR(CheckFit(absl::StrCat(common, ".down"), *shared.down, middle, n, 1));
  }
  MlpProjections mlp = {stacks.gate, stacks.up, stacks.down};
  AWQD_ASSIGN_OR_RETURN(SentScales sent, TakeSent(request, cut_bytes));
  AWQD_RETURN_IF_ERROR(FillRoundings(request, &mlp, &stacks.shared));
  for (MlpProjections* each : {&mlp, &stacks.shared}) {
    if (sent.how != ActivationQuantization::kNone) each->of_gate = each->of_up = {.how = sent.how};
  }
  Job<engine::GatedMlpWork> job = {.work = {std::move(mlp), std::move(stacks.shared)}};
  engine::GatedMlpWork& work = job.work;
  work.token_scales = std::move(sent.scales);
  AWQD_RETURN_IF_ERROR(
      FillRouted(request, gate, n, static_cast<int64_t>(experts), max_send_bytes, cut_bytes, &job));
  AWQD_ASSIGN_OR_RETURN(work.parameters, GateParametersOf(*request));
  if (request->has_gate_bias()) {
    AWQD_ASSIGN_OR_RETURN(work.gate_up_bias,
                          TakeBias(request->mutable_gate_bias(), stacks, gate.n, "gate_bias"));
    AWQD_ASSIGN_OR_RETURN(const std::vector<float> of_up,
                          TakeBias(request->mutable_up_bias(), stacks, gate.n, "up_bias"));
    work.gate_up_bias.insert(work.gate_up_bias.end(), of_up.begin(), of_up.end());
  }
  if (request->has_down_bias()) {
    AWQD_ASSIGN_OR_RETURN(work.down_bias,
                          TakeBias(request->mutable_down_bias(), stacks, n, "down_bias"));
  }
  if (request->has_shared_expert_gate()) {
    AWQD_ASSIGN_OR_RETURN(work.shared_expert_gate,
                          TakeFloats(request->mutable_shared_expert_gate(), {gate.k},
                                     "shared_expert_gate", absl::StrCat("K = ", gate.k)));
  }
  return job;
}

bool DeclaresFloat8(const model::WeightStack& stack) {
  const absl::StatusOr<Rounding> declared = DeclaredRounding(stack, "");
  return declared.ok() && declared->how != ActivationQuantization::kNone;
}

bool DeclaresFloat8(const MlpStacks& stacks) {
  MlpProjections mlp = {stacks.gate, stacks.up, stacks.down}, shared = stacks.shared;
  return FillDeclared(&mlp, &shared).ok();
}

absl::Status CheckPacked(const v1::PackedStack& packed, int64_t max_bytes) {
  int64_t bytes = 0;
  return CheckStack(packed, "packed", max_bytes, &bytes);
}

absl::Status CheckPacked(const v1::PackedGatedMlp& packed, int64_t max_bytes) {
  int64_t bytes = 0;
  const auto check = [&](const v1::PackedGatedMlp& mlp, absl::string_view field) -> absl::Status {
    for (const auto& [stack, name] :
         {std::pair(&mlp.gate(), "gate"), {&mlp.up(), "up"}, {&mlp.down(), "down"}}) {
      AWQD_RETURN_IF_ERROR(CheckStack(*stack, absl::StrCat(field, ".", name), max_bytes, &bytes));
    }
    return absl::OkStatus();
  };
  AWQD_RETURN_IF_ERROR(check(packed, "packed"));
  if (!packed.has_shared_expert()) return absl::OkStatus();
  if (packed.shared_expert().has_shared_expert()) {
    return FieldError("packed.shared_expert.shared_expert", "a gated MLP", "none");
  }
  return check(packed.shared_expert(), "packed.shared_expert");
}

absl::StatusOr<PackedSize> MeasurePacked(const v1::PackedStack& packed, const DeviceInfo& device,
                                         absl::string_view field) {
  PackedSize out;
  for (int i = 0; i < packed.experts_size(); ++i) {
    const absl::StatusOr<PackedSize> size = MeasurePacked(packed.experts(i), device);
    if (!size.ok()) return RenameField(size.status(), ExpertField(field, i));
    out += *size;
  }
  return out;
}

absl::StatusOr<PackedSize> MeasurePacked(const v1::PackedGatedMlp& packed, const DeviceInfo& device,
                                         absl::string_view field) {
  PackedSize out;
  for (const auto& [stack, name] :
       {std::pair(&packed.gate(), "gate"), {&packed.up(), "up"}, {&packed.down(), "down"}}) {
    AWQD_ASSIGN_OR_RETURN(const PackedSize size,
                          MeasurePacked(*stack, device, absl::StrCat(field, ".", name)));
    out += size;
  }
  if (!packed.has_shared_expert()) return out;
  AWQD_ASSIGN_OR_RETURN(const PackedSize shared,
                        MeasurePacked(packed.shared_expert(), device, "packed.shared_expert"));
  out += shared;
  return out;
}

absl::StatusOr<std::vector<HostWeight>> DecodePacked(const v1::PackedStack& packed,
                                                     absl::string_view field) {
  std::vector<HostWeight> out;
  for (int i = 0; i < packed.experts_size(); ++i) {
    absl::StatusOr<HostWeight> weight = DecodePacked(packed.experts(i));
    if (!weight.ok()) return RenameField(weight.status(), ExpertField(field, i));
    out.push_back(*std::move(weight));
  }
  return out;
}

}  // namespace awqd::wire
