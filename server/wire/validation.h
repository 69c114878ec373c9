// Validation: requests -> the engine's works. Pure functions: no weight is looked up, nothing runs.
//
// A request is checked in two steps: by itself, before its weight is known, and then against the
// weight's shape. Every error is a FieldError. experts_wire.h and kv_wire.h have the other methods.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "awqd/v1/inference.pb.h"
#include "awqd/v1/model_repository.pb.h"
#include "kernels/base/status.h"
#include "kernels/types.h"
#include "kernels/weight.h"
#include "server/engine/matmul_work.h"
#include "server/wire/status.h"
#include "server/wire/tensor.h"

namespace awqd::wire {

// Longest request_id, in bytes.
inline constexpr int64_t kMaxRequestIdBytes = 256;
// Longest weight path, in bytes.
inline constexpr int64_t kMaxWeightPathBytes = 1024;
// Bytes of a response beyond its tensor's contents: ids, names, shape.
inline constexpr int64_t kResponseOverheadBytes = 1024;

// A result that holds codes, scales and zeros: where the latter two are.
struct KvScales {
  DType dtype = DType::kFp16;
  int64_t scale_offset = 0, zero_offset = 0;  // in the result
  int64_t bytes = 0;                          // of the scales, and of the zeros
};

// How a result becomes the tensor of an answer.
struct AnswerForm {
  DType dtype = DType::kFp16;
  std::vector<int64_t> shape;
  v1::Encoding encoding = v1::RAW;
  int64_t bytes = 0;               // of the contents in a message, at most
  std::optional<KvScales> scales;  // QuantizeKv with scales of each token and head
};

// A work without its payloads, the bytes of these, and how the answer is encoded.
template <typename Work>
struct Job {
  struct Input {
    engine::Payload Work::*payload;  // where the bytes belong
    int64_t size = 0;                // in bytes
    std::string bytes;
    // The bytes are in the slices of the message, or in shared memory.
    bool outside_request = false;
  };

  Work work;
  absl::InlinedVector<Input, 3> inputs;
  AnswerForm answer;
};
using MatmulJob = Job<engine::MatmulWork>;
using DequantizeJob = Job<engine::DequantizeWork>;

// --- QuantizedMatmul and Dequantize ---

// Checks what holds for any weight: source, id, enums, and tensors that agree with themselves.
// `cut_bytes`: of the activations' contents, when they are not in the message.
absl::Status CheckRequest(const v1::QuantizedMatmulRequest& request,
                          std::optional<int64_t> cut_bytes = std::nullopt);
absl::Status CheckRequest(const v1::DequantizeRequest& request);

// Checks a name in ModelRepository requests, before it goes anywhere near a file system.
absl::Status CheckName(const std::string& name);

// Moves the payload out of a request that passed CheckRequest. RESOURCE_EXHAUSTED when the answer
// is to be sent and would pass `max_send_bytes`. work.weight stays null.
absl::StatusOr<MatmulJob> BuildMatmul(v1::QuantizedMatmulRequest* request,
                                      const WeightShape& weight, int64_t max_send_bytes,
                                      std::optional<int64_t> cut_bytes = std::nullopt,
                                      const DeclaredActivations& declared = {});

// A block of a weight. work.weight stays null.
absl::StatusOr<DequantizeJob> BuildDequantize(const v1::DequantizeRequest& request,
                                              const WeightShape& weight);

// RESOURCE_EXHAUSTED, with a hint to DequantizeStream, when the block is to be sent and does not
// fit in one message.
absl::Status CheckFits(const v1::DequantizeRequest& request, const DequantizeJob& job,
                       int64_t max_send_bytes);

// Rows per chunk of a stream, at least 1: about `chunk_bytes` each. RESOURCE_EXHAUSTED when a
// single row passes `max_send_bytes`.
absl::StatusOr<int64_t> RowsPerChunk(const DequantizeJob& job, int64_t chunk_bytes,
                                     int64_t max_send_bytes);

// --- Checks that several methods share, for the files of this room ---

absl::Status CheckLength(absl::string_view text, absl::string_view field, int64_t max_bytes);
absl::Status CheckRequestId(const std::string& id);
absl::Status CheckModel(const std::string& name, absl::string_view field);
// Checks the path of a weight, or of what else a model holds: `what`.
absl::Status CheckPath(const std::string& path, absl::string_view field, absl::string_view what);
absl::Status CheckWeightRef(const v1::WeightRef& ref, absl::string_view what);

// Checks `weight` or `packed`. `what` says in errors which path the weight has.
template <typename Request>
absl::Status CheckSource(const Request& request, absl::string_view what) {
  if (request.has_weight()) return CheckWeightRef(request.weight(), what);
  if (request.has_packed()) return absl::OkStatus();
  return FieldError("weight", "nothing", "weight {model, weight}, or packed");
}

// `known`: as the generated <Enum>_IsValid says.
absl::Status CheckEnum(bool known, int value, absl::string_view field, absl::string_view expected);
absl::Status CheckEncoding(v1::Encoding encoding, bool to_shared_memory);
// `gated`: of gate and up. NONE is refused of these, and what is theirs alone of others.
absl::Status CheckActivationFunction(v1::ActivationFunction activation, bool gated);
// The encoding of an answer: as asked for, else as the tensor `in` of the request is encoded.
v1::Encoding ChooseEncoding(v1::Encoding asked, const v1::Tensor& in);

// Checks that the way in which activations of that type are quantised suits them, and has scales
// where it needs any.
struct QuantizationFields {
  v1::ActivationQuantization how = v1::ACTIVATIONS_AS_SENT;
  v1::DType activations = v1::FP16;
  bool float8_only = false;  // of experts and of gated MLPs, which are not rounded to INT8
};
absl::Status CheckQuantization(const QuantizationFields& fields, bool has_scales,
                               absl::string_view scales_field = "activation_scales");

// Moves positive finite FP32 scales out: one element, or as many as one of the shapes says.
// `expected`: the shapes in words. Empty scales become one.
absl::StatusOr<std::vector<float>> TakePositiveScales(v1::Tensor* tensor, absl::string_view field,
                                                      absl::Span<const std::vector<int64_t>> shapes,
                                                      absl::string_view expected);

// The scales that FP8_E4M3 activations were sent with, and what each is of: kFloat8Static of a token,
// where one may stand for all, or kFloat8PerBlock of 128 of its in-features. Moves them out.
struct SentScales {
  ActivationQuantization how = ActivationQuantization::kFloat8Static;
  std::vector<float> scales;
};
absl::StatusOr<SentScales> TakeSentScales(v1::Tensor* tensor, const TensorInfo& activations);

// The output type of activations with a request that names none.
constexpr DType DefaultOutput(DType activations) {
  return IsFloating(activations) ? activations : DType::kFp16;
}

// The error of a request for what the checkpoint of a weight does not declare.
absl::Status NotDeclared(v1::ActivationQuantization how, absl::string_view weight,
                         ActivationQuantization declared);

absl::StatusOr<DType> OutputDType(v1::DType dtype, DType unspecified,
                                  DTypeMask allowed = kFloatingMask);

// The tokens of activations: the product of the leading dimensions. CheckTensor has bounded it,
// except beside a zero K.
absl::StatusOr<int64_t> CountTokens(const TensorInfo& x, int64_t k);

// A floating-point tensor of exactly that shape; `why` says where it comes from. Moves it out.
absl::StatusOr<std::vector<float>> TakeFloats(v1::Tensor* tensor, absl::Span<const int64_t> shape,
                                              absl::string_view field, absl::string_view why);

// RESOURCE_EXHAUSTED when an answer of so many bytes, or of over 2^63 where there are none, does
// not fit beside the rest of a message.
absl::Status CheckSendable(std::optional<int64_t> bytes, int64_t max_send,
                           absl::string_view advice);

// The API's enums as the kernels have them.
std::optional<Path> FromProto(v1::Path path);
ActivationFunction FromProto(v1::ActivationFunction activation);
ActivationQuantization FromProto(v1::ActivationQuantization quantization);

// The bytes of the shared memory that the answer goes to; none: the answer is sent.
template <typename Request>
std::optional<int64_t> OutputRoom(const Request& request) {
  if (!request.has_output_shared_memory()) return std::nullopt;
  return request.output_shared_memory().size();
}
// Checks an answer of `rows` rows of form.shape.back(). One that is written to shared memory has to
// fit into `room`, and into no message.
absl::Status CheckAnswerFits(std::optional<int64_t> room, int64_t rows, const AnswerForm& form,
                             int64_t max_send, absl::string_view advice);

// The fields that all requests for products have, but for their source.
template <typename Request>
absl::Status CheckProduct(const Request& request, std::optional<int64_t> cut_bytes,
                          DTypeMask activations, DTypeMask outputs) {
  AWQD_RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  if (!request.has_activations()) {
    return FieldError("activations", "nothing", "a tensor of shape [..., K]");
  }
  AWQD_RETURN_IF_ERROR(
      CheckTensor(request.activations(), activations, "activations", cut_bytes).status());
  if (request.activations().shape_size() == 0) {
    return FieldError("activations.shape", "rank 0", "rank 1 to 8: [..., K]");
  }
  AWQD_RETURN_IF_ERROR(OutputDType(request.output_dtype(), DType::kFp16, outputs).status());
  AWQD_RETURN_IF_ERROR(CheckEnum(v1::Path_IsValid(request.path()), request.path(), "path",
                                 "AUTO, FUSED or DEQUANTIZE"));
  constexpr bool kGated = requires { request.activation_parameters(); };
  AWQD_RETURN_IF_ERROR(CheckActivationFunction(request.activation_function(), kGated));
  return CheckEncoding(request.output_encoding(), request.has_output_shared_memory());
}

// Fills what all jobs of products have, once their work says its rows and element types, and moves
// the payload out of the request. The answer has `rows` rows of job->answer.shape.back().
template <typename Request, typename Work>
absl::Status FillProduct(Request* request, const TensorInfo& x, int64_t rows,
                         int64_t max_send_bytes, std::optional<int64_t> cut_bytes, Job<Work>* job) {
  job->work.path = FromProto(request->path());
  job->work.activation = FromProto(request->activation_function());
  AnswerForm& form = job->answer;
  form.dtype = job->work.out_dtype;
  form.encoding = request->has_output_shared_memory()
                      ? v1::RAW
                      : ChooseEncoding(request->output_encoding(), request->activations());
  AWQD_RETURN_IF_ERROR(CheckAnswerFits(OutputRoom(*request), rows, form, max_send_bytes,
                                       "send fewer tokens per request"));
  form.bytes = EncodedBytes(rows * form.shape.back(), form.dtype, form.encoding);
  v1::Tensor* activations = request->mutable_activations();
  auto& input = job->inputs.emplace_back();
  input.payload = &Work::x;
  input.size = x.bytes;
  input.outside_request = activations->has_shared_memory() || (cut_bytes && activations->has_raw());
  if (input.outside_request) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(input.bytes, TakeBytes(activations, x, "activations"));
  return absl::OkStatus();
}

}  // namespace awqd::wire
