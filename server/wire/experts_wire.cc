// Expert ids, router weights, and the shapes of three projections.
#include "server/wire/experts_wire.h"

#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace awqd::wire {
namespace {

constexpr DTypeMask kIds = MaskOf(DType::kInt32);

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

// expert_ids and router_weights by themselves.
template <typename Request>
absl::Status CheckRouting(const Request& request) {
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

// Everything but the weights: tokens, routing, output and payload. `in` is the weight that the
// activations go to, `n` how wide the answer is.
template <typename Request, typename Work>
absl::Status FillRouted(Request* request, const WeightShape& in, int64_t n, int64_t experts,
                        int64_t max_send_bytes, std::optional<int64_t> cut_bytes, Job<Work>* job) {
  AWQD_ASSIGN_OR_RETURN(const TensorInfo x, CheckTensor(request->activations(), kFloatingMask,
                                                        "activations", cut_bytes));
  Work& work = job->work;
  AWQD_ASSIGN_OR_RETURN(work.rows, CountTokens(x, in.k));
  work.x_dtype = x.dtype;
  AWQD_ASSIGN_OR_RETURN(work.out_dtype, OutputDType(request->output_dtype(), x.dtype));
  job->answer.shape = x.shape;
  job->answer.shape.back() = n;
  int64_t answer_rows = work.rows;
  if (request->has_expert_ids()) {
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

absl::Status CheckFit(absl::string_view field, const model::WeightStack& stack, int64_t k,
                      int64_t n, size_t experts) {
  const WeightShape& shape = stack.shape();
  if (stack.experts.size() != experts) {
    return FieldError(field, absl::StrCat(stack.experts.size(), " experts"),
                      absl::StrCat(experts, ", as many as the gate has"));
  }
  if (shape.k == k && (n < 0 || shape.n == n)) return absl::OkStatus();
  return FieldError(field, absl::StrCat("[", shape.k, ", ", shape.n, "]"),
                    absl::StrCat("[", k, ", ", n < 0 ? "N" : absl::StrCat(n),
                                 "]: the gate decides which shapes fit"));
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
  AWQD_RETURN_IF_ERROR(CheckProduct(request, cut_bytes, kFloatingMask, kFloatingMask));
  if (!request.has_expert_ids()) {
    return FieldError("expert_ids", "nothing", "an INT32 tensor of shape [..., top_k]");
  }
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
  } else if (!request.has_packed()) {
    return FieldError("mlp", "nothing", "mlp {model, path}, or packed");
  }
  AWQD_RETURN_IF_ERROR(CheckProduct(request, cut_bytes, kFloatingMask, kFloatingMask));
  if (request.activation_function() == v1::NONE) {
    return FieldError("activation_function", "NONE", "SILU, GELU or RELU, of the gate");
  }
  return CheckRouting(request);
}

absl::StatusOr<Job<engine::GroupedMatmulWork>> BuildGroupedMatmul(
    v1::GroupedQuantizedMatmulRequest* request, StackPtr stack, int64_t max_send_bytes,
    std::optional<int64_t> cut_bytes) {
  Job<engine::GroupedMatmulWork> job;
  const WeightShape& shape = stack->shape();
  const auto experts = static_cast<int64_t>(stack->experts.size());
  AWQD_RETURN_IF_ERROR(
      FillRouted(request, shape, shape.n, experts, max_send_bytes, cut_bytes, &job));
  if (request->has_bias()) {
    AWQD_ASSIGN_OR_RETURN(
        job.work.bias,
        TakeFloats(request->mutable_bias(), {experts, shape.n}, "bias",
                   absl::StrCat("there are ", experts, " experts with N = ", shape.n)));
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
  if (stacks.experts != request->has_expert_ids()) {
    return stacks.experts
               ? FieldError(
                     "expert_ids", "nothing",
                     "an INT32 tensor of shape [..., top_k]: the projections are stacks of experts")
               : FieldError("expert_ids", "a tensor", "none: the projections have no experts");
  }
  const int64_t n = stacks.down->shape().n;
  Job<engine::GatedMlpWork> job = {
      .work = {std::move(stacks.gate), std::move(stacks.up), std::move(stacks.down)}};
  AWQD_RETURN_IF_ERROR(
      FillRouted(request, gate, n, static_cast<int64_t>(experts), max_send_bytes, cut_bytes, &job));
  return job;
}

absl::Status CheckPacked(const v1::PackedStack& packed, int64_t max_bytes) {
  int64_t bytes = 0;
  return CheckStack(packed, "packed", max_bytes, &bytes);
}

absl::Status CheckPacked(const v1::PackedGatedMlp& packed, int64_t max_bytes) {
  int64_t bytes = 0;
  AWQD_RETURN_IF_ERROR(CheckStack(packed.gate(), "packed.gate", max_bytes, &bytes));
  AWQD_RETURN_IF_ERROR(CheckStack(packed.up(), "packed.up", max_bytes, &bytes));
  return CheckStack(packed.down(), "packed.down", max_bytes, &bytes);
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

absl::StatusOr<PackedSize> MeasurePacked(const v1::PackedGatedMlp& packed,
                                         const DeviceInfo& device) {
  AWQD_ASSIGN_OR_RETURN(PackedSize out, MeasurePacked(packed.gate(), device, "packed.gate"));
  AWQD_ASSIGN_OR_RETURN(const PackedSize up, MeasurePacked(packed.up(), device, "packed.up"));
  AWQD_ASSIGN_OR_RETURN(const PackedSize down, MeasurePacked(packed.down(), device, "packed.down"));
  out += up;
  out += down;
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
