// One shape for all kinds: name, parameters, outputs, inputs.
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "inference/grpc_service.pb.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/wire/field_scan.h"
#include "server/wire/oip/infer_wire.h"
#include "server/wire/oip/tensors.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"

namespace awqd::wire::oip {
namespace {

using inference::ModelInferRequest;

absl::Status CheckLength(absl::string_view text, absl::string_view field, int64_t max) {
  if (static_cast<int64_t>(text.size()) <= max) return absl::OkStatus();
  return FieldError(field, absl::StrCat(text.size(), " bytes"), absl::StrCat("at most ", max));
}

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
absl::InlinedVector<Slot, 5> ListSlots(const ModelInferRequest& from, Request* to) {
  const auto came = [&](absl::string_view name) {
    for (const auto& input : from.inputs()) {
      if (input.name() == name) return true;
    }
    return false;
  };
  absl::InlinedVector<Slot, 5> slots;
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
  }
  if constexpr (requires { to->mutable_bias(); }) {
    add("bias", [to] { return to->mutable_bias(); });
  }
  if constexpr (requires { to->mutable_activation_scales(); }) {
    add("activation_scales", [to] { return to->mutable_activation_scales(); });
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
absl::Status DecodeAs(Kind kind, Pieces pieces, ParsedRequest<Request>* out, Echo* echo) {
  InferMessage message;
  if (!ParseInfer(pieces, &message)) {
    return DoesNotParse(SizeOfAll(pieces), *ModelInferRequest::descriptor());
  }
  const ModelInferRequest& from = *message.request;
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
  if (!echo->output.region.empty()) {
    v1::SharedMemory* const shared = to.mutable_output_shared_memory();
    shared->set_name(echo->output.region);
    shared->set_offset(echo->output.offset);
    shared->set_size(echo->output.size);
  }
  AWQD_ASSIGN_OR_RETURN(const Inputs inputs, TakeInputs(&message, pieces, ListSlots(from, &to)));
  out->cut = inputs.cut;
  out->copied_bytes = inputs.copied_bytes;
  to.set_output_encoding(ChooseEncoding(inputs, to));
  return absl::OkStatus();
}

}  // namespace

absl::string_view OutputName(Kind kind) { return kind == Kind::kDequantize ? "w" : "y"; }

absl::Status Decode(Pieces pieces, ParsedRequest<v1::QuantizedMatmulRequest>* out, Echo* echo) {
  return DecodeAs(Kind::kProduct, pieces, out, echo);
}
absl::Status Decode(Pieces pieces, ParsedRequest<v1::GroupedQuantizedMatmulRequest>* out,
                    Echo* echo) {
  return DecodeAs(Kind::kStack, pieces, out, echo);
}
absl::Status Decode(Pieces pieces, ParsedRequest<v1::GatedMlpRequest>* out, Echo* echo) {
  return DecodeAs(Kind::kMlp, pieces, out, echo);
}
absl::Status Decode(Pieces pieces, ParsedRequest<v1::DequantizeRequest>* out, Echo* echo) {
  return DecodeAs(Kind::kDequantize, pieces, out, echo);
}

Kind PeekKind(Pieces pieces) {
  return ParseKind(PeekBytes(pieces, ModelInferRequest::kModelNameFieldNumber, kMaxNameBytes));
}

std::string PeekId(Pieces pieces) {
  return PeekString(pieces, ModelInferRequest::kIdFieldNumber, kMaxPeekedIdBytes);
}

}  // namespace awqd::wire::oip
