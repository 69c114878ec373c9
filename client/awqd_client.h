// The C++ client of awqd: one channel, typed tensors, a deadline on every call.
//
//   absl::StatusOr<std::unique_ptr<Client>> client = Client::Create({.address = "127.0.0.1:8001"});
//   absl::StatusOr<Tensor> x = Tensor::FromFloats(v1::FP16, {1, k}, values);
//   absl::StatusOr<MatmulResult> y = (*client)->QuantizedMatmul(
//       {.weight = {.model = "my-model", .name = "model.layers.0.mlp.up_proj"},
//        .activations = *std::move(x)});
//   absl::StatusOr<std::vector<float>> out = y->output.ToFloats();
//
// examples/matmul.cc is the same as a program. Every error is the server's own status, code and
// message unchanged; details (google.rpc.BadRequest) are the payload kErrorDetailsPayload.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "awqd/v1/inference.pb.h"
#include "awqd/v1/model_repository.pb.h"
#include "awqd/v1/server_info.pb.h"
#include "client/security.h"
#include "client/tensor.h"

namespace awqd::client {

inline constexpr absl::string_view kErrorDetailsPayload = "type.googleapis.com/google.rpc.Status";

struct ClientOptions {
  // "host:port", "[v6 address]:port", "unix:/path/of/socket", or a gRPC target such as
  // "dns:///name:port".
  std::string address = "127.0.0.1:8001";
  // Deadline of a call that states none, counted from its start.
  absl::Duration timeout = absl::Seconds(60);
  // Longer answers are refused with RESOURCE_EXHAUSTED. At least the server's max_send_bytes.
  int64_t max_receive_bytes = int64_t{1} << 30;
  // Longest pause between two attempts to reach a server that is not there.
  absl::Duration max_reconnect_delay = absl::Seconds(2);
  // Calls of a loaded weight name it in the metadata awqd-weight, "MODEL/WEIGHT", by which a load
  // balancer can send them to the server that holds it. Not those of a stream, which has many.
  bool weight_key = true;
  Security security;
};

struct CallOptions {
  // Zero: the client's default. absl::InfiniteDuration(): no deadline.
  absl::Duration timeout = absl::ZeroDuration();
  // Waits, within the timeout, for a server that is not there yet instead of failing with
  // UNAVAILABLE. Repeating calls without it finds a server late: gRPC looks at a connection being
  // made only within calls, and every 5 s.
  bool wait_for_server = false;
};

// A weight of a loaded model.
struct WeightName {
  std::string model;
  std::string name;
};
// Such a name, or a weight that travels in the request.
using WeightSource = std::variant<WeightName, v1::PackedWeight>;

struct MatmulCall {
  WeightSource weight;
  // FP16, BF16 or FP32 [..., K]; INT8 for a weight of integers; with activation_scales INT8 or
  // FP8_E4M3.
  Tensor activations;
  std::optional<Tensor> bias = std::nullopt;   // [N], instead of the weight's own
  DType output_dtype = v1::DTYPE_UNSPECIFIED;  // the activations'
  v1::Path path = v1::AUTO;
  v1::ActivationFunction activation_function = v1::NONE;  // of the product and its bias
  // Whether the server rounds floating activations to 8 bits first; as sent: by its own default.
  v1::ActivationQuantization activation_quantization = v1::ACTIVATIONS_AS_SENT;
  // FP32: of activations of 8 bits one for each token, or one for all, or of FP8_E4M3 one for each
  // block of 128; one element for INT8_STATIC and FP8_STATIC.
  std::optional<Tensor> activation_scales = std::nullopt;
  int32_t priority = 0;
  std::string request_id = "";
  // Where the activations lie instead of in activations.bytes, and where the answer is to be
  // written instead of being sent: shared_memory.h.
  std::optional<v1::SharedMemory> shared_activations = std::nullopt;
  std::optional<v1::SharedMemory> shared_output = std::nullopt;
};

// The experts that each token goes to.
struct Routing {
  Tensor expert_ids;  // INT32 [..., top_k], from 0
  // FP16, BF16 or FP32, of that shape: the answer has one row a token then. Without them it has
  // one for each choice.
  std::optional<Tensor> router_weights = std::nullopt;
};

// Router logits, by which the server chooses the experts of each token; the answer has one row a
// token. The fields of v1::Router mean the same.
struct Router {
  Tensor logits;  // FP16, BF16 or FP32 [..., experts]
  int32_t top_k = 1;
  v1::RouterScoring scoring = v1::SOFTMAX;
  std::optional<Tensor> correction_bias = std::nullopt;  // FP16, BF16 or FP32 [experts]
  int32_t n_group = 0, topk_group = 0;
  bool norm_topk_prob = false;
  float routed_scaling_factor = 1;
};

// A product of experts: the fields that MatmulCall has too mean the same.
struct GroupedMatmulCall {
  // A stack of a loaded model, "model.layers.0.mlp.experts.*.up_proj", or one in the request.
  std::variant<WeightName, v1::PackedStack> stack;
  Tensor activations;
  Routing routing = {};
  std::optional<Router> router = std::nullopt;  // instead of `routing`
  std::optional<Tensor> bias = std::nullopt;    // [experts, N], instead of the experts' own
  DType output_dtype = v1::DTYPE_UNSPECIFIED;
  v1::Path path = v1::AUTO;
  v1::ActivationFunction activation_function = v1::NONE;
  v1::ActivationQuantization activation_quantization = v1::ACTIVATIONS_AS_SENT;  // to E4M3
  // With FP8_E4M3 activations as in MatmulCall; with FP8_STATIC [1] or [experts].
  std::optional<Tensor> activation_scales = std::nullopt;
  int32_t priority = 0;
  std::string request_id = "";
  std::optional<v1::SharedMemory> shared_activations = std::nullopt;
  std::optional<v1::SharedMemory> shared_output = std::nullopt;
};

// y = down(activation_function(gate(x)) * up(x)), or of gate and up together.
struct GatedMlpCall {
  std::variant<v1::GatedMlpRef, v1::PackedGatedMlp> mlp;
  Tensor activations;
  std::optional<Routing> routing = std::nullopt;  // of projections that are stacks of experts
  std::optional<Router> router = std::nullopt;    // instead of `routing`
  // Instead of the weights' own: [I], [I] and [N], of experts [experts, I] and [experts, N].
  std::optional<Tensor> gate_bias = std::nullopt, up_bias = std::nullopt, down_bias = std::nullopt;
  // [K]: the shared expert that `mlp` names is multiplied by sigmoid(x . shared_expert_gate).
  std::optional<Tensor> shared_expert_gate = std::nullopt;
  DType output_dtype = v1::DTYPE_UNSPECIFIED;
  v1::Path path = v1::AUTO;
  v1::ActivationFunction activation_function = v1::SILU;
  v1::ActivationParameters activation_parameters = {};  // not set: the function's defaults
  v1::ActivationQuantization activation_quantization = v1::ACTIVATIONS_AS_SENT;  // to E4M3
  // With FP8_STATIC: the scales of x, and of the rows that enter the last product. [1], or one for
  // each expert and then for the shared one. Of FP8_E4M3 x as in MatmulCall; activation_quantization
  // is then of those rows alone.
  std::optional<Tensor> activation_scales = std::nullopt, down_activation_scales = std::nullopt;
  int32_t priority = 0;
  std::string request_id = "";
  std::optional<v1::SharedMemory> shared_activations = std::nullopt;
  std::optional<v1::SharedMemory> shared_output = std::nullopt;
};

struct MatmulResult {
  // [..., N], of experts without router weights [..., top_k, N]; without bytes when they are in
  // shared_output.
  Tensor output;
  v1::Execution execution;
  std::string request_id;
};

struct DequantizeCall {
  WeightSource weight;
  DType output_dtype = v1::FP16;
  // Half-open; {0, 0} is all, {b, 0} is from b to the end.
  int64_t row_begin = 0, row_end = 0;
  int64_t column_begin = 0, column_end = 0;
  std::string request_id = "";
  std::optional<v1::SharedMemory> shared_output = std::nullopt;  // as in MatmulCall
};

struct DequantizeResult {
  Tensor output;  // [rows, columns]; without bytes when they are in shared_output
  v1::Execution execution;
};

// Keys or values of a cache to 4-bit codes.
struct QuantizeKvCall {
  Tensor block;                               // FP16, BF16 or FP32 [tokens, heads, head_dim]
  DType scale_dtype = v1::DTYPE_UNSPECIFIED;  // FP16, or that of the given scales
  // Both or neither: FP16 or FP32, [1] or [heads]. Without them each head of each token has its
  // own.
  std::optional<Tensor> scales = std::nullopt, zeros = std::nullopt;
  int32_t priority = 0;
  std::string request_id = "";
};

struct QuantizeKvResult {
  Tensor codes;                         // UINT8 [tokens, heads, ceil(head_dim / 2)]
  std::optional<Tensor> scales, zeros;  // [tokens, heads]; none where the call gave them
  v1::Execution execution;
};

// And back.
struct DequantizeKvCall {
  Tensor codes, scales, zeros;  // as QuantizeKvResult has them, or the given ones
  int64_t head_dim = 0;         // 0: twice the last dimension of the codes
  DType output_dtype = v1::FP16;
  v1::KvForm form = v1::EXACT;
  int32_t priority = 0;
  std::string request_id = "";
};

struct DequantizeKvResult {
  Tensor output;  // [tokens, heads, head_dim]
  v1::Execution execution;
};

// A block of rows of a dequantised weight, and how many rows there will be.
struct DequantizeBlock {
  int64_t first_row = 0;  // from 0 within the answer
  Tensor values;          // [rows, total_columns]
  int64_t total_rows = 0;
  int64_t total_columns = 0;
};

// Called for each block, in ascending order of rows, on the calling thread. An error ends the call,
// and is what the call returns.
using BlockSink = std::function<absl::Status(DequantizeBlock block)>;

// Many products in flight on one call. One thread may send while another receives; otherwise not
// thread-safe. Destroying it cancels what is unanswered. Must not outlive its Client.
class MatmulStream {
 public:
  virtual ~MatmulStream() = default;
  // OK once it is on its way. INVALID_ARGUMENT for a request of 2 GiB or more, which is not sent;
  // any other error means that the stream has ended: Receive says why.
  virtual absl::Status Send(MatmulCall call) = 0;
  // Says that nothing more will be sent.
  virtual absl::Status CloseSend() = 0;

  // One answer, in completion order. `result` holds that request's own failure, if it failed.
  struct Answer {
    std::string request_id;
    absl::StatusOr<MatmulResult> result;
  };
  // Blocks for the next answer; nullopt after the last; an error when the stream broke.
  virtual absl::StatusOr<std::optional<Answer>> Receive() = 0;
  virtual void Cancel() = 0;
};

// Holds a region of Client::ShareMemory. Must not outlive its Client.
class SharedRegion {
 public:
  virtual ~SharedRegion() = default;
  // False once the server has ended the region, as a server that stops does.
  virtual bool alive() const = 0;
};

// Thread-safe. Calls block. Nothing is retried: a call that may have reached the server is for the
// caller to repeat. A request of 2 GiB or more is INVALID_ARGUMENT and not sent.
class Client {
 public:
  // Connects lazily. INVALID_ARGUMENT for an address, a limit or a file that cannot work.
  static absl::StatusOr<std::unique_ptr<Client>> Create(const ClientOptions& options);
  virtual ~Client() = default;

  virtual absl::StatusOr<MatmulResult> QuantizedMatmul(MatmulCall call,
                                                       const CallOptions& options = {}) = 0;
  virtual absl::StatusOr<MatmulResult> GroupedQuantizedMatmul(GroupedMatmulCall call,
                                                              const CallOptions& options = {}) = 0;
  virtual absl::StatusOr<MatmulResult> GatedMlp(GatedMlpCall call,
                                                const CallOptions& options = {}) = 0;
  // The deadline covers the whole life of the stream; none unless given here.
  virtual std::unique_ptr<MatmulStream> QuantizedMatmulStream(
      const CallOptions& options = {.timeout = absl::InfiniteDuration()}) = 0;

  // The whole answer in memory, any size: one message when it is known to be small or goes to
  // shared memory, otherwise the stream.
  virtual absl::StatusOr<DequantizeResult> Dequantize(const DequantizeCall& call,
                                                      const CallOptions& options = {}) = 0;
  // Block by block, never holding more than one. OK, with what ran, only after every row. Not for
  // shared memory.
  virtual absl::StatusOr<v1::Execution> DequantizeBlocks(const DequantizeCall& call,
                                                         const BlockSink& sink,
                                                         const CallOptions& options = {}) = 0;

  virtual absl::StatusOr<QuantizeKvResult> QuantizeKv(QuantizeKvCall call,
                                                      const CallOptions& options = {}) = 0;
  virtual absl::StatusOr<DequantizeKvResult> DequantizeKv(DequantizeKvCall call,
                                                          const CallOptions& options = {}) = 0;

  // Shares memory of a GPU with a server on this machine that runs with --cuda_shared_memory:
  // shared_activations and shared_output may name the region until the result is destroyed. The
  // deadline is that of the answer.
  virtual absl::StatusOr<std::unique_ptr<SharedRegion>> ShareMemory(
      const v1::ShareMemoryRequest& request, const CallOptions& options = {}) = 0;

  virtual absl::StatusOr<v1::ListModelsResponse> ListModels(const CallOptions& options = {}) = 0;
  virtual absl::StatusOr<v1::GetModelResponse> GetModel(absl::string_view name,
                                                        const CallOptions& options = {}) = 0;
  // `require_all_weights`: the load fails where a quantised weight cannot be read. Otherwise the
  // server serves the others, unless it requires all itself; the response names the missing ones.
  virtual absl::StatusOr<v1::LoadModelResponse> LoadModel(absl::string_view name,
                                                          const CallOptions& options = {},
                                                          bool require_all_weights = false) = 0;
  virtual absl::Status UnloadModel(absl::string_view name, const CallOptions& options = {}) = 0;

  virtual absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo(
      const CallOptions& options = {}) = 0;

  // grpc.health.v1: whether `service` ("" the whole server) is SERVING. NOT_FOUND for a service the
  // server does not know.
  virtual absl::StatusOr<bool> IsServing(absl::string_view service,
                                         const CallOptions& options = {}) = 0;

  // Whether a connection stands now; after an UNAVAILABLE, false means that the server was never
  // reached.
  virtual bool connected() const = 0;
};

}  // namespace awqd::client
