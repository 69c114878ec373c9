// Checks of single fields.
#include "server/wire/checks.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "server/repository/model_folders.h"
#include "server/wire/validate.h"

namespace awqd::wire {

absl::Status CheckRequestId(const std::string& id) {
  if (static_cast<int64_t>(id.size()) <= kMaxRequestIdBytes) return absl::OkStatus();
  return FieldError("request_id", absl::StrCat(id.size(), " bytes"),
                    absl::StrCat("at most ", kMaxRequestIdBytes));
}

absl::Status CheckModel(const std::string& name, absl::string_view field) {
  if (name.empty()) return FieldError(field, "nothing", "the name of a model");
  absl::Status status = repository::CheckModelName(name);
  return status.ok() ? status : WithField(std::move(status), field);
}

absl::Status CheckPath(const std::string& path, absl::string_view field, absl::string_view what) {
  if (path.empty()) return FieldError(field, "nothing", what);
  if (static_cast<int64_t>(path.size()) <= kMaxWeightPathBytes) return absl::OkStatus();
  return FieldError(field, absl::StrCat(path.size(), " bytes"),
                    absl::StrCat("at most ", kMaxWeightPathBytes));
}

absl::Status CheckWeightRef(const v1::WeightRef& ref, absl::string_view what) {
  AWQD_RETURN_IF_ERROR(CheckModel(ref.model(), "weight.model"));
  return CheckPath(ref.weight(), "weight.weight", what);
}

absl::Status CheckEnum(bool known, int value, absl::string_view field, absl::string_view expected) {
  if (known) return absl::OkStatus();
  return FieldError(field, absl::StrCat("the unknown value ", value), expected);
}

absl::Status CheckEncoding(v1::Encoding encoding, bool to_shared_memory) {
  AWQD_RETURN_IF_ERROR(
      CheckEnum(v1::Encoding_IsValid(encoding), encoding, "output_encoding", "RAW or VALUES"));
  if (encoding == v1::VALUES && to_shared_memory) {
    return FieldError("output_encoding", "VALUES", "RAW: output_shared_memory holds raw bytes");
  }
  return absl::OkStatus();
}

absl::StatusOr<DType> OutputDType(v1::DType dtype, DType unspecified, DTypeMask allowed) {
  if (dtype == v1::DTYPE_UNSPECIFIED) return unspecified;
  return ParseDType(dtype, allowed, "output_dtype");
}

absl::StatusOr<int64_t> Tokens(const TensorInfo& x, int64_t k) {
  if (x.shape.empty() || x.shape.back() != k) {
    return FieldError("activations.shape", ShapeText(x.shape),
                      absl::StrCat("[..., ", k, "]: the weight has K = ", k));
  }
  return k == 0 ? 0 : x.elements / k;
}

absl::StatusOr<std::vector<float>> TakeFloats(v1::Tensor* tensor, absl::Span<const int64_t> shape,
                                              absl::string_view field, absl::string_view why) {
  AWQD_ASSIGN_OR_RETURN(const TensorInfo info, CheckTensor(*tensor, kFloatingMask, field));
  if (info.shape != shape) {
    return FieldError(absl::StrCat(field, ".shape"), ShapeText(info.shape),
                      absl::StrCat(ShapeText(shape), ": ", why));
  }
  AWQD_ASSIGN_OR_RETURN(const std::string bytes, TakeBytes(tensor, info, field));
  return FloatsFromBytes(bytes, info.dtype);
}

absl::Status CheckSendable(int64_t elements, DType dtype, v1::Encoding encoding, int64_t max_send,
                           absl::string_view advice) {
  const std::optional<int64_t> wide = CheckedMul(elements, kMostEncodedBytes);
  const int64_t room = max_send - kResponseOverheadBytes;
  if (wide && EncodedBytes(elements, dtype, encoding) <= room) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "output: got ", wide ? absl::StrCat(EncodedBytes(elements, dtype, encoding)) : "over 2^63",
      " bytes, expected at most ", room, " (the server's max_send_message_bytes is ", max_send,
      "); ", advice));
}

absl::Status CheckAnswerFitsIn(std::optional<int64_t> room, const AnswerSize& answer,
                               int64_t max_send, absl::string_view advice) {
  const int64_t elements = CheckedMul(answer.rows, answer.cols).value_or(INT64_MAX);
  if (!room) return CheckSendable(elements, answer.dtype, answer.encoding, max_send, advice);
  const std::optional<int64_t> bytes = CheckedMul(elements, SizeOf(answer.dtype));
  if (bytes && *bytes <= *room) return absl::OkStatus();
  return FieldError("output_shared_memory.size", absl::StrCat(*room),
                    absl::StrCat("at least ", bytes ? absl::StrCat(*bytes) : "2^63",
                                 ", the bytes of the answer"));
}

std::optional<Path> FromProto(v1::Path path) {
  if (path == v1::FUSED) return Path::kFused;
  if (path == v1::DEQUANTIZE) return Path::kDequantize;
  return std::nullopt;
}

ActivationFunction FromProto(v1::ActivationFunction activation) {
  if (activation == v1::RELU) return ActivationFunction::kRelu;
  if (activation == v1::GELU) return ActivationFunction::kGelu;
  return activation == v1::SILU ? ActivationFunction::kSilu : ActivationFunction::kNone;
}

ActivationQuantization FromProto(v1::ActivationQuantization quantization) {
  if (quantization == v1::INT8_PER_TOKEN) return ActivationQuantization::kPerToken;
  return quantization == v1::INT8_STATIC ? ActivationQuantization::kStatic
                                         : ActivationQuantization::kNone;
}

}  // namespace awqd::wire
