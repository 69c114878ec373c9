// Drawing activations and routing; requests of awqd.v1 and of the Open Inference Protocol.
#include "client/bench/payload.h"

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "client/tensor.h"
#include "grpcpp/support/slice.h"

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

// Drawn values that are repeated when a tensor needs more: 8 MiB of activations take longer to draw
// than to send.
constexpr int64_t kDrawn = 1 << 20;

// With its header a request must stay below Protocol Buffers' 2 GiB.
constexpr int64_t kMaxActivationBytes = (int64_t{1} << 31) - 65536;

absl::StatusOr<client::Tensor> Activations(v1::DType dtype, int64_t tokens, int64_t k,
                                           uint64_t seed) {
  int64_t count = 0;
  if (__builtin_mul_overflow(tokens, k, &count) ||
      count > kMaxActivationBytes / client::SizeOf(dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens: ", tokens, " x ", k, " values do not fit one request"));
  }
  const std::vector<float> values = UniformValues(std::min(count, kDrawn), seed);
  auto drawn = client::Tensor::FromFloats(dtype, {static_cast<int64_t>(values.size())}, values);
  if (!drawn.ok()) return drawn.status();
  const size_t bytes = static_cast<size_t>(count * client::SizeOf(dtype));
  client::Tensor tensor{dtype, {tokens, k}, ""};
  tensor.bytes.reserve(bytes);
  while (tensor.bytes.size() < bytes) {
    tensor.bytes.append(drawn->bytes, 0, bytes - tensor.bytes.size());
  }
  return tensor;
}

// Moves the activations of `request` into shared memory, and asks for the answer there.
template <typename Request>
absl::Status MoveToSharedMemory(const Plan& plan, int64_t answer_elements, Request& request,
                                Payload& payload) {
  const std::string x = request.activations().raw();
  const v1::DType dtype =
      plan.output_dtype == v1::DTYPE_UNSPECIFIED ? plan.dtype : plan.output_dtype;
  const auto in = static_cast<int64_t>(x.size());
  payload.shared_answer_bytes = answer_elements * client::SizeOf(dtype);
  auto memory =
      client::SharedMemory::Create(plan.shared_memory_prefix, in + payload.shared_answer_bytes);
  if (!memory.ok()) return memory.status();
  payload.memory = *std::move(memory);
  x.copy(payload.memory.data(), x.size());
  *request.mutable_activations()->mutable_shared_memory() = payload.memory.Range(0, in);
  *request.mutable_output_shared_memory() = payload.memory.Range(in, payload.shared_answer_bytes);
  payload.request_bytes = in;
  return absl::OkStatus();
}

void SetRequest(const google::protobuf::Message& request, Payload* out) {
  const std::string bytes = request.SerializeAsString();
  const grpc::Slice slice(bytes);
  out->request = grpc::ByteBuffer(&slice, 1);
  out->request_bytes += static_cast<int64_t>(bytes.size());
}

// `request` has its source.
template <typename Request>
absl::StatusOr<Payload> Finish(const Plan& plan, const WeightShare& weight, int64_t tokens,
                               const char* method, Request request) {
  auto activations = Activations(plan.dtype, tokens, weight.k, plan.seed);
  if (!activations.ok()) return activations.status();
  *request.mutable_activations() = client::ToProto(*std::move(activations));
  request.set_output_dtype(plan.output_dtype);
  request.set_path(plan.path);
  request.set_priority(plan.priority);
  Payload payload = {
      .method = method, .weight_key = client::WeightKeyOf(request), .tokens = tokens};
  if (!plan.shared_memory_prefix.empty()) {
    absl::Status status = MoveToSharedMemory(plan, tokens * weight.n, request, payload);
    if (!status.ok()) return status;
  }
  SetRequest(request, &payload);
  return payload;
}

template <typename Request>
absl::Status Route(const Plan& plan, const WeightShare& weight, int64_t tokens, Request& request) {
  auto routing = RandomRouting(tokens, plan.top_k, weight.experts, plan.seed);
  if (!routing.ok()) return routing.status();
  *request.mutable_expert_ids() = client::ToProto(std::move(routing->expert_ids));
  *request.mutable_router_weights() = client::ToProto(*std::move(routing->router_weights));
  return absl::OkStatus();
}

template <typename Request>
Request MakeRequest(const WeightShare& weight) {
  Request request;
  request.mutable_weight()->set_model(weight.model);
  request.mutable_weight()->set_weight(weight.weight);
  return request;
}

absl::StatusOr<Payload> InferPayload(const Plan& plan, const WeightShare& weight, int64_t tokens) {
  auto x = Activations(plan.dtype, tokens, weight.k, plan.seed);
  if (!x.ok()) return x.status();
  std::optional<client::Routing> routing;
  if (weight.experts > 0) {
    auto drawn = RandomRouting(tokens, plan.top_k, weight.experts, plan.seed);
    if (!drawn.ok()) return drawn.status();
    routing = *std::move(drawn);
  }
  Payload payload = {.method = kModelInfer,
                     .protocol = Protocol::kInference,
                     .weight_key = client::WeightKey(weight.model, weight.weight),
                     .tokens = tokens};
  SetRequest(InferRequest(plan, weight, *std::move(x), std::move(routing)), &payload);
  return payload;
}

absl::StatusOr<Payload> MakePayload(const Plan& plan, const WeightShare& weight, int64_t tokens) {
  if (plan.protocol == Protocol::kInference) return InferPayload(plan, weight, tokens);
  if (weight.mlp) {
    v1::GatedMlpRequest request;
    request.mutable_mlp()->set_model(weight.model);
    request.mutable_mlp()->set_path(weight.weight);
    request.set_activation_function(v1::SILU);
    if (weight.experts > 0) {
      if (auto status = Route(plan, weight, tokens, request); !status.ok()) return status;
    }
    return Finish(plan, weight, tokens, "/awqd.v1.QuantizedInference/GatedMlp", request);
  }
  if (weight.experts > 0) {
    auto request = MakeRequest<v1::GroupedQuantizedMatmulRequest>(weight);
    if (auto status = Route(plan, weight, tokens, request); !status.ok()) return status;
    return Finish(plan, weight, tokens, "/awqd.v1.QuantizedInference/GroupedQuantizedMatmul",
                  request);
  }
  return Finish(plan, weight, tokens, "/awqd.v1.QuantizedInference/QuantizedMatmul",
                MakeRequest<v1::QuantizedMatmulRequest>(weight));
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

std::vector<float> UniformValues(int64_t count, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    value = static_cast<float>(static_cast<double>(engine() >> 11) * 0x1p-52 - 1.0);
  }
  return values;
}

absl::StatusOr<client::Routing> RandomRouting(int64_t tokens, int64_t top_k, int64_t experts,
                                              uint64_t seed) {
  if (top_k > experts) {
    return absl::InvalidArgumentError(absl::StrCat("top_k: got ", top_k, ", expected at most ",
                                                   experts, ", the number of experts"));
  }
  std::mt19937_64 random(seed);
  std::vector<int32_t> all(experts), ids;
  for (int64_t e = 0; e < experts; ++e) all[e] = static_cast<int32_t>(e);
  std::vector<float> weights;
  for (int64_t token = 0; token < tokens; ++token) {
    float sum = 0;
    for (int64_t j = 0; j < top_k; ++j) {
      std::swap(all[j], all[j + static_cast<int64_t>(random() % (experts - j))]);
      ids.push_back(all[j]);
      weights.push_back(1 + static_cast<float>(random() % 1024) / 1024);
      sum += weights.back();
    }
    for (int64_t j = 0; j < top_k; ++j) weights[token * top_k + j] /= sum;
  }
  const std::vector<int64_t> shape = {tokens, top_k};
  auto router = client::Tensor::FromFloats(v1::FP32, shape, weights);
  if (!router.ok()) return router.status();
  std::string bytes(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int32_t));
  return client::Routing{{v1::INT32, shape, std::move(bytes)}, *std::move(router)};
}

absl::StatusOr<Payloads> Payloads::Make(const Plan& plan) {
  Payloads made;
  double sum = 0;
  for (const WeightShare& weight : plan.weights) {
    for (const TokensShare& tokens : plan.tokens) {
      auto payload = MakePayload(plan, weight, tokens.tokens);
      if (!payload.ok()) return payload.status();
      made.payloads_.push_back(*std::move(payload));
      sum += weight.share * tokens.share;
      made.until_.push_back(sum);
    }
  }
  if (made.payloads_.empty()) return absl::InvalidArgumentError("weight: expected at least one");
  for (double& until : made.until_) until /= sum;
  made.until_.back() = 1;
  return made;
}

const Payload& Payloads::Pick(double uniform) const {
  const auto found = std::upper_bound(until_.begin(), until_.end(), uniform);
  const size_t index = static_cast<size_t>(found - until_.begin());
  return payloads_[std::min(index, payloads_.size() - 1)];
}

}  // namespace awqd::bench
