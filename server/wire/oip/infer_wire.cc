// Requests: one shape for all kinds, which is name, parameters, outputs, inputs. Answers: the
// payload goes last, as in awqd.v1's, so that the head is one slice. Errors: the fields of awqd.v1
// in the words of this protocol.
#include "server/wire/oip/infer_wire.h"

#include <type_traits>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "inference/grpc_service.pb.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/wire/matmul_wire.h"
#include "server/wire/oip/tensors.h"
#include "server/wire/status.h"
#include "server/wire/tensor.h"
#include "server/wire/validation.h"

namespace awqd::wire::oip {
namespace {

using inference::ModelInferRequest;

static_assert(int{ModelInferRequest::kRawInputContentsFieldNumber} == kRawInputs.field);

absl::StatusOr<ModelName> TakeName(const ModelInferRequest& request, Kind kind, Echo* echo) {
  constexpr int64_t kMaxVersionBytes = 32;
  AWQD_RETURN_IF_ERROR(CheckLength(request.model_name(), "model_name", kMaxNameBytes));
  AWQD_RETURN_IF_ERROR(CheckLength(request.model_version(), "model_version", kMaxVersionBytes));
  ModelName name = SplitName(request.model_name());
  // The kind was chosen by PeekKind, which reads plain strings only.
  if (name.path.empty() || name.kind != kind) {
    return FieldError("model_name", absl::StrCat("\"", obs::LogText(request.model_name()), "\""),
                      name.path.empty() ? "MODEL/WEIGHT" : "MODEL/WEIGHT as a plain string");
  }
  echo->model_name = request.model_name();
  echo->model_version = request.model_version();
  echo->kind = kind;
  return name;
}

absl::Status TakeOutputs(const ModelInferRequest& request, Echo* echo) {
  const absl::string_view only = OutputName(echo->kind);
  if (request.outputs_size() > 1) {
    return FieldError("outputs", absl::StrCat(request.outputs_size()),
                      absl::StrCat("none or one, \"", only, "\""));
  }
  if (request.outputs().empty()) return absl::OkStatus();
  const auto& output = request.outputs(0);
  if (output.name() != only) {
    return FieldError("outputs[0].name", absl::StrCat("\"", obs::LogText(output.name(), 64), "\""),
                      absl::StrCat("\"", only, "\""));
  }
  return ReadRegionRange(output.parameters(), "outputs[0]", &echo->output);
}

// The element type of the answer, as far as the request says it.
v1::DType ChooseAnswerType(v1::DType asked, const v1::Tensor& x, bool scaled) {
  if (asked != v1::DTYPE_UNSPECIFIED) return asked;
  if (x.dtype() != v1::INT8) return x.dtype();
  return scaled ? v1::FP16 : v1::INT32;
}

template <typename Request>
void SetWeightName(ModelName name, Request* out) {
  if constexpr (requires { out->mutable_mlp(); }) {
    out->mutable_mlp()->set_model(std::move(name.model));
    out->mutable_mlp()->set_path(std::move(name.path));
  } else {
    out->mutable_weight()->set_model(std::move(name.model));
    out->mutable_weight()->set_weight(std::move(name.path));
  }
}

template <typename Request>
void SetParameters(const Parameters& from, Request* to) {
  to->set_output_dtype(from.output_dtype);
  if constexpr (requires { to->set_priority(0); }) {
    to->set_priority(from.priority);
    to->set_path(from.path);
    to->set_activation_function(from.activation_function);
  }
  if constexpr (requires { to->mutable_activation_parameters(); }) {
    *to->mutable_activation_parameters() = from.activation;
    to->mutable_mlp()->set_shared_expert(from.shared_expert);
  }
  if constexpr (requires { to->mutable_router(); }) {
    if (from.router) *to->mutable_router() = *from.router;
  }
  if constexpr (requires { to->mutable_rows(); }) {
    *to->mutable_rows() = from.rows;
    *to->mutable_columns() = from.columns;
  }
  if constexpr (requires { to->set_activation_quantization({}); }) {
    to->set_activation_quantization(from.activation_quantization);
  }
}

// A tensor field is set by whoever takes its pointer, so only those of inputs that came are asked.
template <typename Request>
absl::InlinedVector<Slot, 12> ListSlots(const ModelInferRequest& from, Request* to) {
  const auto came = [&](absl::string_view name) {
    return absl::c_any_of(from.inputs(), [&](const auto& input) { return input.name() == name; });
  };
  absl::InlinedVector<Slot, 12> slots;
  const auto add = [&](absl::string_view name, auto mutable_tensor, bool payload = false) {
    slots.push_back({name, came(name) ? mutable_tensor() : nullptr, payload});
  };
  if constexpr (requires { to->mutable_activations(); }) {
    add(
        "x", [to] { return to->mutable_activations(); }, true);
  }
  if constexpr (requires { to->mutable_expert_ids(); }) {
    add("ids", [to] { return to->mutable_expert_ids(); });
    add("router_weights", [to] { return to->mutable_router_weights(); });
    add("router_logits", [to] { return to->mutable_router()->mutable_logits(); });
    add("correction_bias", [to] { return to->mutable_router()->mutable_correction_bias(); });
  }
  if constexpr (requires { to->mutable_gate_bias(); }) {
    add("gate_bias", [to] { return to->mutable_gate_bias(); });
    add("up_bias", [to] { return to->mutable_up_bias(); });
    add("down_bias", [to] { return to->mutable_down_bias(); });
    add("shared_expert_gate", [to] { return to->mutable_shared_expert_gate(); });
  }
  if constexpr (requires { to->mutable_bias(); }) {
    add("bias", [to] { return to->mutable_bias(); });
  }
  if constexpr (requires { to->mutable_activation_scales(); }) {
    add("activation_scales", [to] { return to->mutable_activation_scales(); });
  }
  if constexpr (requires { to->mutable_down_activation_scales(); }) {
    add("down_activation_scales", [to] { return to->mutable_down_activation_scales(); });
  }
  return slots;
}

template <typename Request>
v1::Encoding ChooseEncoding(const Inputs& inputs, const Request& request) {
  if constexpr (requires { request.activations(); }) {
    bool scaled = false;
    if constexpr (requires { request.activation_scales(); }) {
      scaled = request.has_activation_scales();
    }
    const v1::DType type = ChooseAnswerType(request.output_dtype(), request.activations(), scaled);
    const bool has_member = type == v1::FP32 || type == v1::INT32;
    if (inputs.typed && has_member && !request.has_output_shared_memory()) return v1::VALUES;
  }
  return v1::RAW;
}

template <typename Request>
constexpr Kind KindOf() {
  if (std::is_same_v<Request, v1::GroupedQuantizedMatmulRequest>) return Kind::kStack;
  if (std::is_same_v<Request, v1::GatedMlpRequest>) return Kind::kMlp;
  if (std::is_same_v<Request, v1::DequantizeRequest>) return Kind::kDequantize;
  return Kind::kProduct;
}

}  // namespace

absl::string_view OutputName(Kind kind) { return kind == Kind::kDequantize ? "w" : "y"; }

template <typename Request>
absl::Status Decode(Pieces pieces, const FieldScan& scan, ParsedRequest<Request>* out, Echo* echo) {
  constexpr Kind kind = KindOf<Request>();
  LocalMessage<ModelInferRequest> message;
  if (!ParseScanned(pieces, scan, &*message)) {
    return DoesNotParse(SizeOfAll(pieces), *ModelInferRequest::descriptor());
  }
  const ModelInferRequest& from = *message;
  Request& to = out->request;
  to.set_request_id(from.id());  // first: errors repeat it
  AWQD_ASSIGN_OR_RETURN(ModelName name, TakeName(from, kind, echo));
  SetWeightName(std::move(name), &to);
  Parameters parameters;
  AWQD_RETURN_IF_ERROR(ReadParameters(from.parameters(), kind, &parameters));
  SetParameters(parameters, &to);
  out->timeout = parameters.timeout;
  echo->execution = parameters.execution;
  echo->final_response = parameters.final_response;
  AWQD_RETURN_IF_ERROR(TakeOutputs(from, echo));
  if (!echo->output.region().empty()) *to.mutable_output_shared_memory() = echo->output;
  AWQD_ASSIGN_OR_RETURN(const Inputs inputs,
                        TakeInputs(&*message, scan.payloads, pieces, ListSlots(from, &to)));
  out->cut = inputs.cut;
  out->copied_bytes = inputs.copied_bytes;
  to.set_output_encoding(ChooseEncoding(inputs, to));
  return absl::OkStatus();
}
template absl::Status Decode(Pieces, const FieldScan&, ParsedRequest<v1::QuantizedMatmulRequest>*,
                             Echo*);
template absl::Status Decode(Pieces, const FieldScan&,
                             ParsedRequest<v1::GroupedQuantizedMatmulRequest>*, Echo*);
template absl::Status Decode(Pieces, const FieldScan&, ParsedRequest<v1::GatedMlpRequest>*, Echo*);
template absl::Status Decode(Pieces, const FieldScan&, ParsedRequest<v1::DequantizeRequest>*,
                             Echo*);

Kind PeekKind(Pieces pieces) {
  return ParseKind(PeekBytes(pieces, ModelInferRequest::kModelNameFieldNumber, kMaxNameBytes));
}

std::string PeekId(Pieces pieces) {
  return PeekString(pieces, ModelInferRequest::kIdFieldNumber, kMaxPeekedIdBytes);
}

// --- Answers and errors ---

namespace {

using inference::ModelInferResponse;
using Output = ModelInferResponse::InferOutputTensor;

// The field of ModelStreamInferResponse that an answer is.
constexpr int kInferResponse = 2;

void FillExecution(const engine::ExecutionReport& report, ParameterMap* out) {
  v1::Execution execution;
  wire::FillExecution(report, &execution);
  (*out)["path"].set_string_param(v1::Path_Name(execution.path()));
  (*out)["kernel"].set_string_param(execution.kernel());
  (*out)["device"].set_string_param(execution.device());
  (*out)["batch_tokens"].set_int64_param(execution.batch_tokens());
  (*out)["batch_requests"].set_int64_param(execution.batch_requests());
  (*out)["queue_us"].set_int64_param(execution.queue_us());
  (*out)["compute_us"].set_int64_param(execution.compute_us());
}

// Encodes values as FillTensor does.
void FillContents(const Answer& answer, inference::InferTensorContents* out) {
  v1::Tensor tensor;
  FillTensor(answer.result.view(), answer.form->dtype, answer.form->shape, v1::VALUES, &tensor);
  if (tensor.has_floats()) {
    out->mutable_fp32_contents()->Swap(tensor.mutable_floats()->mutable_values());
  }
  out->mutable_int_contents()->Add(tensor.ints().values().begin(), tensor.ints().values().end());
}

// A field of awqd.v1, and its name in this protocol.
struct FieldName {
  absl::string_view api, oip;
};

// Inputs, by the fields that they become.
constexpr FieldName kTensors[] = {{"activations", "x"},
                                  {"expert_ids", "ids"},
                                  {"router_weights", "router_weights"},
                                  {"router.logits", "router_logits"},
                                  {"router.correction_bias", "correction_bias"},
                                  {"gate_bias", "gate_bias"},
                                  {"up_bias", "up_bias"},
                                  {"down_bias", "down_bias"},
                                  {"shared_expert_gate", "shared_expert_gate"},
                                  {"bias", "bias"},
                                  {"activation_scales", "activation_scales"},
                                  {"down_activation_scales", "down_activation_scales"}};
// Parts of a tensor, longest first where one begins with another.
constexpr FieldName kMembers[] = {{".dtype", ".datatype"},
                                  {".floats.values", ".contents.fp32_contents"},
                                  {".floats", ".contents.fp32_contents"},
                                  {".ints.values", ".contents.int_contents"},
                                  {".ints", ".contents.int_contents"},
                                  {".shared_memory.region", ".parameters[shared_memory_region]"},
                                  {".shared_memory.offset", ".parameters[shared_memory_offset]"},
                                  {".shared_memory.size", ".parameters[shared_memory_byte_size]"},
                                  {".shared_memory", ".parameters[shared_memory_region]"}};
constexpr FieldName kOthers[] = {
    {"weight.model", "model_name"},
    {"weight.weight", "model_name"},
    {"weight", "model_name"},
    {"mlp.model", "model_name"},
    {"mlp.path", "model_name"},
    {"mlp.gate", "model_name"},
    {"mlp.up", "model_name"},
    {"mlp.down", "model_name"},
    {"request_id", "id"},
    {"output_dtype", "parameters[output_dtype]"},
    {"path", "parameters[path]"},
    {"activation_function", "parameters[activation_function]"},
    {"activation_parameters.limit", "parameters[activation_limit]"},
    {"activation_parameters.alpha", "parameters[activation_alpha]"},
    {"activation_parameters.beta", "parameters[activation_beta]"},
    {"activation_parameters.linear_beta", "parameters[activation_linear_beta]"},
    {"router.top_k", "parameters[top_k]"},
    {"router.scoring", "parameters[scoring]"},
    {"router.n_group", "parameters[n_group]"},
    {"router.topk_group", "parameters[topk_group]"},
    {"router.routed_scaling_factor", "parameters[routed_scaling_factor]"},
    {"router", "inputs[router_logits]"},
    {"mlp.shared_expert", "parameters[shared_expert]"},
    {"activation_quantization", "parameters[activation_quantization]"},
    {"rows", "parameters[row_begin, row_end]"},
    {"columns", "parameters[column_begin, column_end]"},
    {"output_shared_memory.region", "outputs[0].parameters[shared_memory_region]"},
    {"output_shared_memory.offset", "outputs[0].parameters[shared_memory_offset]"},
    {"output_shared_memory.size", "outputs[0].parameters[shared_memory_byte_size]"},
    {"output_shared_memory", "outputs[0].parameters[shared_memory_region]"}};

// Whether `text` begins with the whole of `word`, which is then taken off.
bool ConsumeWord(absl::string_view word, absl::string_view* text) {
  absl::string_view rest = *text;
  if (!absl::ConsumePrefix(&rest, word)) return false;
  if (!rest.empty() && rest.front() != '.' && rest.front() != '[' && rest.front() != ':') {
    return false;
  }
  *text = rest;
  return true;
}

std::string RenameField(absl::string_view text) {
  for (const FieldName& tensor : kTensors) {
    if (!ConsumeWord(tensor.api, &text)) continue;
    if (ConsumeWord(".raw", &text))
      return absl::StrCat("raw_input_contents[", tensor.oip, "]", text);
    absl::string_view member;
    for (const FieldName& word : kMembers) {
      if (!ConsumeWord(word.api, &text)) continue;
      member = word.oip;
      break;
    }
    return absl::StrCat("inputs[", tensor.oip, "]", member, text);
  }
  for (const FieldName& word : kOthers) {
    if (ConsumeWord(word.api, &text)) return absl::StrCat(word.oip, text);
  }
  return std::string(text);
}

}  // namespace

grpc::ByteBuffer Encode(const Echo& echo, const std::string& id,
                        const engine::ExecutionReport& report, const Answer& answer, Frame frame,
                        engine::StagingPool* staging) {
  LocalMessage<ModelInferResponse> local;
  ModelInferResponse& response = *local;
  response.set_model_name(echo.model_name);
  response.set_model_version(echo.model_version);
  response.set_id(id);
  if (echo.execution) FillExecution(report, response.mutable_parameters());
  if (echo.final_response) {
    (*response.mutable_parameters())["triton_final_response"].set_bool_param(true);
  }
  Output* const output = response.add_outputs();
  output->set_name(std::string(OutputName(echo.kind)));
  output->set_datatype(std::string(Name(answer.form->dtype)));
  output->mutable_shape()->Add(answer.form->shape.begin(), answer.form->shape.end());
  if (answer.form->encoding == v1::VALUES) FillContents(answer, output->mutable_contents());
  if (answer.written != nullptr) {
    v1::SharedMemory range = echo.output;
    range.set_size(answer.result.size());
    FillRegionRange(range, output->mutable_parameters());
  }
  return EncodeInside({nullptr, frame == Frame::kOnStream ? kInferResponse : 0}, response,
                      ModelInferResponse::kRawOutputContentsFieldNumber,
                      answer.is_raw() ? &answer.result : nullptr, staging);
}

absl::Status EncodeError(const absl::Status& status) {
  const std::string field = FieldOf(status);
  if (field.empty()) return status;
  absl::Status out(status.code(), RenameField(status.message()));
  status.ForEachPayload(
      [&out](absl::string_view url, const absl::Cord& payload) { out.SetPayload(url, payload); });
  return WithField(std::move(out), RenameField(field));
}

}  // namespace awqd::wire::oip
