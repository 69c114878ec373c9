// Tensors and parameters of a ModelInferRequest.
#include "client/bench/infer_request.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace awqd::bench {
namespace {

void AddInput(const char* name, client::Tensor tensor, inference::ModelInferRequest* out) {
  auto* const input = out->add_inputs();
  input->set_name(name);
  input->set_datatype(v1::DType_Name(tensor.dtype));
  input->mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
  out->add_raw_input_contents(std::move(tensor.bytes));
}

void SetParameter(const char* name, std::string value, inference::ModelInferRequest* out) {
  (*out->mutable_parameters())[name].set_string_param(std::move(value));
}

}  // namespace

std::string InferName(const WeightShare& weight) {
  return absl::StrCat(weight.model, "/", weight.weight, weight.mlp ? ":gated_mlp" : "");
}

inference::ModelInferRequest InferRequest(const Plan& plan, const WeightShare& weight,
                                          client::Tensor x,
                                          std::optional<client::Routing> routing) {
  inference::ModelInferRequest out;
  out.set_model_name(InferName(weight));
  AddInput("x", std::move(x), &out);
  if (routing) {
    AddInput("ids", std::move(routing->expert_ids), &out);
    if (routing->router_weights) {
      AddInput("router_weights", *std::move(routing->router_weights), &out);
    }
  }
  if (plan.output_dtype != v1::DTYPE_UNSPECIFIED) {
    SetParameter("output_dtype", v1::DType_Name(plan.output_dtype), &out);
  }
  if (plan.path != v1::AUTO) SetParameter("path", v1::Path_Name(plan.path), &out);
  if (weight.mlp) SetParameter("activation_function", "SILU", &out);
  return out;
}

}  // namespace awqd::bench
