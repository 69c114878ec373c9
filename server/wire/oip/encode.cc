// The payload goes last, as in awqd.v1's answers: the head is one slice.
#include "server/wire/oip/encode.h"

#include "absl/strings/str_cat.h"
#include "inference/grpc_service.pb.h"
#include "server/wire/local_message.h"
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

// As FillTensor spells them.
void FillContents(const Answer& answer, inference::InferTensorContents* out) {
  v1::Tensor tensor;
  FillTensor(answer.result.view(), answer.dtype, answer.shape, v1::VALUES, &tensor);
  if (tensor.has_floats()) {
    out->mutable_fp32_contents()->Swap(tensor.mutable_floats()->mutable_values());
  }
  out->mutable_int_contents()->Add(tensor.ints().values().begin(), tensor.ints().values().end());
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
  output->set_datatype(std::string(Name(answer.dtype)));
  output->mutable_shape()->Add(answer.shape.begin(), answer.shape.end());
  if (answer.encoding == v1::VALUES) FillContents(answer, output->mutable_contents());
  if (answer.written != nullptr) {
    RegionRange range = echo.output;
    range.size = answer.result.size();
    FillRegionRange(range, output->mutable_parameters());
  }
  return EncodeInside({nullptr, frame == Frame::kOnStream ? kInferResponse : 0}, response,
                      ModelInferResponse::kRawOutputContentsFieldNumber,
                      answer.is_raw() ? &answer.result : nullptr, staging);
}

}  // namespace awqd::wire::oip
