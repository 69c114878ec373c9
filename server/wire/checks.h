// What the checks of several methods share. For the files of this room that check requests.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "awqd/v1/inference.pb.h"
#include "kernels/base/status.h"
#include "kernels/types.h"
#include "server/wire/status.h"
#include "server/wire/tensor.h"

namespace awqd::wire {

absl::Status CheckRequestId(const std::string& id);
absl::Status CheckModel(const std::string& name, absl::string_view field);
// The path of a weight, or of what else a model holds: `what`.
absl::Status CheckPath(const std::string& path, absl::string_view field, absl::string_view what);
absl::Status CheckWeightRef(const v1::WeightRef& ref, absl::string_view what);

// `known`: as the generated <Enum>_IsValid says.
absl::Status CheckEnum(bool known, int value, absl::string_view field, absl::string_view expected);
absl::Status CheckEncoding(v1::Encoding encoding, bool to_shared_memory);

absl::StatusOr<DType> OutputDType(v1::DType dtype, DType unspecified,
                                  DTypeMask allowed = kFloatingMask);

// Of activations, product of the leading dimensions; CheckTensor already bounded it, except beside
// a zero K.
absl::StatusOr<int64_t> Tokens(const TensorInfo& x, int64_t k);

// A floating-point tensor of exactly that shape; `why` says where it comes from. Moves it out.
absl::StatusOr<std::vector<float>> TakeFloats(v1::Tensor* tensor, absl::Span<const int64_t> shape,
                                              absl::string_view field, absl::string_view why);

// An answer that is sent has to fit beside the rest of a message.
absl::Status CheckSendable(int64_t elements, DType dtype, v1::Encoding encoding, int64_t max_send,
                           absl::string_view advice);

std::optional<Path> FromProto(v1::Path path);
ActivationFunction FromProto(v1::ActivationFunction activation);
ActivationQuantization FromProto(v1::ActivationQuantization quantization);

// A [rows, cols] answer.
struct AnswerSize {
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kFp16;
  v1::Encoding encoding = v1::RAW;
};

// One that is written to shared memory has to fit there, and in no message. `room`: bytes of the
// shared memory that the answer goes to; none: it is sent.
absl::Status CheckAnswerFitsIn(std::optional<int64_t> room, const AnswerSize& answer,
                               int64_t max_send, absl::string_view advice);

template <typename Request>
absl::Status CheckAnswerFits(const Request& request, const AnswerSize& answer, int64_t max_send,
                             absl::string_view advice) {
  const auto room = request.has_output_shared_memory()
                        ? std::make_optional<int64_t>(request.output_shared_memory().size())
                        : std::nullopt;
  return CheckAnswerFitsIn(room, answer, max_send, advice);
}

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
  const v1::ActivationFunction activation = request.activation_function();
  AWQD_RETURN_IF_ERROR(CheckEnum(v1::ActivationFunction_IsValid(activation), activation,
                                 "activation_function", "NONE, RELU, GELU or SILU"));
  return CheckEncoding(request.output_encoding(), request.has_output_shared_memory());
}

template <typename Request>
v1::Encoding EncodingOf(const Request& request) {
  if (request.has_output_shared_memory()) return v1::RAW;
  if (request.output_encoding() != v1::ENCODING_UNSPECIFIED) return request.output_encoding();
  const bool typed = request.activations().has_floats() || request.activations().has_ints();
  return typed ? v1::VALUES : v1::RAW;
}

// Fills what all jobs of products have, once their work says its rows and element types, and moves
// the payload out of the request. The answer has `rows` rows of job->output_shape.back().
template <typename Request, typename Job>
absl::Status FillProduct(Request* request, const TensorInfo& x, int64_t rows,
                         int64_t max_send_bytes, std::optional<int64_t> cut_bytes, Job* job) {
  job->work.path = FromProto(request->path());
  job->work.activation = FromProto(request->activation_function());
  job->encoding = EncodingOf(*request);
  const AnswerSize answer = {rows, job->output_shape.back(), job->work.out_dtype, job->encoding};
  AWQD_RETURN_IF_ERROR(
      CheckAnswerFits(*request, answer, max_send_bytes, "send fewer tokens per request"));
  job->answer_bytes = EncodedBytes(rows * answer.cols, answer.dtype, answer.encoding);
  job->x_bytes = x.bytes;
  v1::Tensor* activations = request->mutable_activations();
  if (activations->has_shared_memory() || (cut_bytes && activations->has_raw())) {
    return absl::OkStatus();  // they are not in the message
  }
  AWQD_ASSIGN_OR_RETURN(job->x, TakeBytes(activations, x, "activations"));
  return absl::OkStatus();
}

}  // namespace awqd::wire
