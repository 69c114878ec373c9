// Drawing activations and routing; requests of awqd.v1 and of the Open Inference Protocol.
#include "client/bench/payload.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "grpcpp/support/slice.h"
#include "inference/grpc_service.pb.h"
#include "kernels/base/status.h"

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
    return Invalid("tokens: ", tokens, " x ", k, " values do not fit one request");
  }
  const std::vector<float> values = UniformValues(std::min(count, kDrawn), seed);
  AWQD_ASSIGN_OR_RETURN(
      auto drawn, client::Tensor::FromFloats(dtype, {static_cast<int64_t>(values.size())}, values));
  const size_t bytes = static_cast<size_t>(count * client::SizeOf(dtype));
  client::Tensor tensor{dtype, {tokens, k}, ""};
  tensor.bytes.reserve(bytes);
  while (tensor.bytes.size() < bytes) {
    tensor.bytes.append(drawn.bytes, 0, bytes - tensor.bytes.size());
  }
  return tensor;
}

int64_t AnswerBytes(const Plan& plan, int64_t elements) {
  const v1::DType dtype =
      plan.output_dtype == v1::DTYPE_UNSPECIFIED ? plan.dtype : plan.output_dtype;
  return elements * client::SizeOf(dtype);
}

// Moves the activations of `call` into shared memory, and asks for the answer there.
template <typename Call>
absl::Status MoveToSharedMemory(const Plan& plan, int64_t answer_elements, Call& call,
                                Payload& payload) {
  std::string& x = call.activations.bytes;
  const auto in = static_cast<int64_t>(x.size());
  const int64_t out = AnswerBytes(plan, answer_elements);
  AWQD_ASSIGN_OR_RETURN(payload.memory,
                        client::SharedMemory::Create(plan.shared_memory_prefix, in + out));
  x.copy(payload.memory.data(), x.size());
  x.clear();
  call.shared_activations = payload.memory.Range(0, in);
  call.shared_output = payload.memory.Range(in, out);
  payload.request_bytes = in;
  payload.shared_answer_bytes = out;
  return absl::OkStatus();
}

// The same in memory of a GPU.
template <typename Call>
absl::Status MoveToDevice(const Plan& plan, int64_t answer_elements, Call& call, Payload& payload) {
  std::string& x = call.activations.bytes;
  const auto in = static_cast<int64_t>(x.size());
  const int64_t out = AnswerBytes(plan, answer_elements);
  const int64_t out_begin = AlignTensor(in);
  AWQD_ASSIGN_OR_RETURN(payload.device_memory,
                        client::DeviceMemory::Allocate(*plan.gpu, out_begin + out));
  AWQD_RETURN_IF_ERROR(payload.device_memory->Write(0, x));
  x.clear();
  static std::atomic<int> regions{0};
  payload.region = absl::StrCat("awqctl-", getpid(), "-message-", regions.fetch_add(1));
  call.shared_activations = client::DeviceMemory::Range(payload.region, 0, in);
  call.shared_output = client::DeviceMemory::Range(payload.region, out_begin, out);
  payload.request_bytes = in;
  payload.shared_answer_bytes = out;
  return absl::OkStatus();
}

client::Routing* RoutingOf(client::MatmulCall&) { return nullptr; }
client::Routing* RoutingOf(client::GroupedMatmulCall& call) { return &call.routing; }
client::Routing* RoutingOf(client::GatedMlpCall& call) {
  return call.routing ? &*call.routing : nullptr;
}

template <typename Call>
void SetRingCall(Call call, Payload& out) {
  out.x = std::exchange(call.activations.bytes, "");
  if (client::Routing* const routing = RoutingOf(call)) {
    out.ids = std::exchange(routing->expert_ids.bytes, "");
    if (routing->router_weights) {
      out.router_weights = std::exchange(routing->router_weights->bytes, "");
    }
  }
  out.prepare = [call = std::move(call)](client::Ring& ring, const std::string& region) {
    Call own = call;
    if (!region.empty()) {
      own.shared_activations = own.shared_output = client::DeviceMemory::Range(region, 0, 0);
    }
    return ring.Prepare(std::move(own));
  };
}

void SetRequest(const google::protobuf::Message& request, Payload& out) {
  const std::string bytes = request.SerializeAsString();
  const grpc::Slice slice(bytes);
  out.request = grpc::ByteBuffer(&slice, 1);
  out.request_bytes += static_cast<int64_t>(bytes.size());
}

// A request of awqd.v1. `call` has its weight and its operands.
template <typename Call>
absl::StatusOr<Payload> MakePayload(const Plan& plan, const WeightShare& weight, const char* method,
                                    Call call) {
  const int64_t tokens = call.activations.shape[0];
  call.output_dtype = plan.output_dtype;
  call.path = plan.path;
  call.priority = plan.priority;
  Payload payload = {.method = method, .tokens = tokens};
  if (!plan.ring_path.empty()) SetRingCall(call, payload);
  if (!plan.shared_memory_prefix.empty()) {
    AWQD_RETURN_IF_ERROR(MoveToSharedMemory(plan, tokens * weight.n, call, payload));
  } else if (plan.gpu && plan.ring_path.empty()) {
    AWQD_RETURN_IF_ERROR(MoveToDevice(plan, tokens * weight.n, call, payload));
  }
  const auto request = client::ToRequest(std::move(call));
  payload.weight_key = client::WeightKeyOf(request);
  SetRequest(request, payload);
  return payload;
}

// The same product in the Open Inference Protocol, with tensors in raw_input_contents.
inference::ModelInferRequest InferRequest(const Plan& plan, const WeightShare& weight,
                                          client::Tensor x,
                                          std::optional<client::Routing> routing) {
  inference::ModelInferRequest out;
  // "m/layer", "m/mlp:gated_mlp"
  out.set_model_name(
      absl::StrCat(weight.model, "/", weight.weight, weight.mlp ? ":gated_mlp" : ""));
  AddInput("x", std::move(x), &out);
  if (routing) {
    AddInput("ids", std::move(routing->expert_ids), &out);
    AddInput("router_weights", *std::move(routing->router_weights), &out);
  }
  if (plan.output_dtype != v1::DTYPE_UNSPECIFIED) {
    SetParameter("output_dtype", v1::DType_Name(plan.output_dtype), &out);
  }
  if (plan.path != v1::AUTO) SetParameter("path", v1::Path_Name(plan.path), &out);
  if (weight.mlp) SetParameter("activation_function", "SILU", &out);
  return out;
}

absl::StatusOr<Payload> MakePayload(const Plan& plan, const WeightShare& weight, int64_t tokens) {
  AWQD_ASSIGN_OR_RETURN(client::Tensor x, Activations(plan.dtype, tokens, weight.k, plan.seed));
  std::optional<client::Routing> routing;
  if (weight.experts > 0) {
    AWQD_ASSIGN_OR_RETURN(routing, RandomRouting(tokens, plan.top_k, weight.experts, plan.seed));
  }
  if (plan.protocol == Protocol::kInference) {
    Payload payload = {.method = "/inference.GRPCInferenceService/ModelInfer",
                       .protocol = Protocol::kInference,
                       .weight_key = client::WeightKey(weight.model, weight.weight),
                       .tokens = tokens};
    SetRequest(InferRequest(plan, weight, std::move(x), std::move(routing)), payload);
    return payload;
  }
  if (weight.mlp) {
    v1::GatedMlpRef mlp;
    mlp.set_model(weight.model);
    mlp.set_path(weight.weight);
    return MakePayload(plan, weight, "/awqd.v1.QuantizedInference/GatedMlp",
                       client::GatedMlpCall{
                           .mlp = mlp, .activations = std::move(x), .routing = std::move(routing)});
  }
  const client::WeightName name = {weight.model, weight.weight};
  if (routing) {
    return MakePayload(
        plan, weight, "/awqd.v1.QuantizedInference/GroupedQuantizedMatmul",
        client::GroupedMatmulCall{
            .stack = name, .activations = std::move(x), .routing = *std::move(routing)});
  }
  return MakePayload(plan, weight, "/awqd.v1.QuantizedInference/QuantizedMatmul",
                     client::MatmulCall{.weight = name, .activations = std::move(x)});
}

}  // namespace

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
    return Invalid("top_k: got ", top_k, ", expected at most ", experts, ", the number of experts");
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
  AWQD_ASSIGN_OR_RETURN(auto router, client::Tensor::FromFloats(v1::FP32, shape, weights));
  std::string bytes(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int32_t));
  return client::Routing{{v1::INT32, shape, std::move(bytes)}, std::move(router)};
}

absl::StatusOr<Payloads> Payloads::Make(const Plan& plan) {
  Payloads made;
  double sum = 0;
  for (const WeightShare& weight : plan.weights) {
    for (const TokensShare& tokens : plan.tokens) {
      AWQD_ASSIGN_OR_RETURN(auto payload, MakePayload(plan, weight, tokens.tokens));
      made.payloads_.push_back(std::move(payload));
      sum += weight.share * tokens.share;
      made.until_.push_back(sum);
    }
  }
  if (made.payloads_.empty()) return Invalid("weight: expected at least one");
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
