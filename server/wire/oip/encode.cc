// Answers: the payload goes last, as in awqd.v1's, so that the head is one slice. Errors: the
// fields of awqd.v1 in the words of this protocol.
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "inference/grpc_service.pb.h"
#include "server/wire/oip/infer_wire.h"
#include "server/wire/oip/tensors.h"
#include "server/wire/status.h"
#include "server/wire/tensor.h"

namespace awqd::wire::oip {
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
                                  {"bias", "bias"},
                                  {"activation_scales", "activation_scales"}};
// Parts of a tensor, longest first where one begins with another.
constexpr FieldName kMembers[] = {{".dtype", ".datatype"},
                                  {".floats.values", ".contents.fp32_contents"},
                                  {".floats", ".contents.fp32_contents"},
                                  {".ints.values", ".contents.int_contents"},
                                  {".ints", ".contents.int_contents"},
                                  {".shared_memory.name", ".parameters[shared_memory_region]"},
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
    {"activation_quantization", "parameters[activation_quantization]"},
    {"rows", "parameters[row_begin, row_end]"},
    {"columns", "parameters[column_begin, column_end]"},
    {"output_shared_memory.name", "outputs[0].parameters[shared_memory_region]"},
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
    RegionRange range = echo.output;
    range.size = answer.result.size();
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
