// Every check on a request that does not need a device.
#include "server/wire/validate.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "server/model/model_store.h"
#include "server/obs/logging.h"
#include "server/wire/status.h"
#include "server/wire/tensor.h"

namespace awqd::wire {
namespace {

absl::Status CheckRequestId(const std::string& id) {
  if (static_cast<int64_t>(id.size()) <= kMaxRequestIdBytes) return absl::OkStatus();
  return FieldError("request_id", absl::StrCat(id.size(), " bytes"),
                    absl::StrCat("at most ", kMaxRequestIdBytes));
}

template <typename Request>
absl::Status CheckEncoding(const Request& request) {
  const v1::Encoding encoding = request.output_encoding();
  if (!v1::Encoding_IsValid(encoding)) {
    return FieldError("output_encoding",
                      absl::StrCat("the unknown value ", static_cast<int>(encoding)),
                      "RAW or VALUES");
  }
  if (encoding == v1::VALUES && request.has_output_shared_memory()) {
    return FieldError("output_encoding", "VALUES", "RAW: output_shared_memory holds raw bytes");
  }
  return absl::OkStatus();
}

absl::Status CheckPath(v1::Path path) {
  if (v1::Path_IsValid(path)) return absl::OkStatus();
  return FieldError("path", absl::StrCat("the unknown value ", static_cast<int>(path)),
                    "AUTO, FUSED or DEQUANTIZE");
}

// Unspecified means a default, which the caller knows.
absl::Status CheckOutputDType(v1::DType dtype) {
  if (dtype == v1::DTYPE_UNSPECIFIED) return absl::OkStatus();
  return ParseDType(dtype, kFloatingMask, "output_dtype").status();
}

absl::Status CheckWeightRef(const v1::WeightRef& ref) {
  if (ref.model().empty()) return FieldError("weight.model", "nothing", "the name of a model");
  if (absl::Status name = model::CheckModelName(ref.model()); !name.ok()) {
    return WithField(std::move(name), "weight.model");
  }
  if (ref.weight().empty()) {
    return FieldError("weight.weight", "nothing", "the path of a quantised linear");
  }
  if (static_cast<int64_t>(ref.weight().size()) > kMaxWeightPathBytes) {
    return FieldError("weight.weight", absl::StrCat(ref.weight().size(), " bytes"),
                      absl::StrCat("at most ", kMaxWeightPathBytes));
  }
  return absl::OkStatus();
}

template <typename Request>
absl::Status CheckSource(const Request& request) {
  switch (request.source_case()) {
    case Request::kWeight:
      return CheckWeightRef(request.weight());
    case Request::kPacked:
      return absl::OkStatus();
    case Request::SOURCE_NOT_SET:
      break;
  }
  return FieldError("weight", "nothing", "weight {model, weight}, or packed");
}

v1::Encoding EncodingOf(const v1::QuantizedMatmulRequest& request) {
  if (request.has_output_shared_memory()) return v1::RAW;
  if (request.output_encoding() != v1::ENCODING_UNSPECIFIED) return request.output_encoding();
  return request.activations().contents_case() == v1::Tensor::kFloats ? v1::VALUES : v1::RAW;
}

std::optional<Path> FromProto(v1::Path path) {
  if (path == v1::FUSED) return Path::kFused;
  if (path == v1::DEQUANTIZE) return Path::kDequantize;
  return std::nullopt;
}

// Product of the leading dimensions; CheckTensor already bounded it, except beside a zero K.
absl::StatusOr<int64_t> Tokens(const TensorInfo& x, int64_t k) {
  if (x.shape.empty() || x.shape.back() != k) {
    return FieldError("activations.shape", ShapeText(x.shape),
                      absl::StrCat("[..., ", k, "]: the weight has K = ", k));
  }
  return k == 0 ? 0 : x.elements / k;
}

absl::StatusOr<std::vector<float>> TakeBias(v1::Tensor* bias, int64_t n) {
  AWQD_ASSIGN_OR_RETURN(const TensorInfo info, CheckTensor(*bias, kFloatingMask, "bias"));
  if (info.shape.size() != 1 || info.shape[0] != n) {
    return FieldError("bias.shape", ShapeText(info.shape),
                      absl::StrCat("[", n, "]: the weight has N = ", n));
  }
  AWQD_ASSIGN_OR_RETURN(const std::string bytes, TakeBytes(bias, info, "bias"));
  return FloatsFromBytes(bytes, info.dtype);
}

// The answer's content bytes, when they fit beside the rest of a message.
absl::Status CheckAnswerFits(int64_t elements, DType dtype, v1::Encoding encoding, int64_t max_send,
                             absl::string_view advice) {
  const std::optional<int64_t> wide = CheckedMul(elements, sizeof(float));
  const int64_t room = max_send - kResponseOverheadBytes;
  if (wide && EncodedBytes(elements, dtype, encoding) <= room) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "output: got ", wide ? absl::StrCat(EncodedBytes(elements, dtype, encoding)) : "over 2^63",
      " bytes, expected at most ", room, " (the server's max_send_message_bytes is ", max_send,
      "); ", advice));
}

// An answer that is written to shared memory has to fit there, and in no message.
absl::Status CheckAnswerFits(int64_t elements, DType dtype, const v1::SharedMemory& range) {
  const std::optional<int64_t> bytes = CheckedMul(elements, SizeOf(dtype));
  if (bytes && *bytes <= range.size()) return absl::OkStatus();
  return FieldError("output_shared_memory.size", absl::StrCat(range.size()),
                    absl::StrCat("at least ", bytes ? absl::StrCat(*bytes) : "2^63",
                                 ", the bytes of the answer"));
}

struct Bounds {
  int64_t begin;
  int64_t count;
};

absl::StatusOr<Bounds> ResolveRange(const v1::Range& range, int64_t size, absl::string_view field,
                                    absl::string_view axis) {
  const int64_t end = range.end() == 0 && range.begin() >= 0 ? size : range.end();
  if (range.begin() < 0 || end < range.begin() || end > size) {
    return FieldError(
        field, absl::StrCat("[", range.begin(), ", ", range.end(), ")"),
        absl::StrCat("0 <= begin <= end <= ", axis, " = ", size, " (end 0 means to the end)"));
  }
  return Bounds{range.begin(), end - range.begin()};
}

}  // namespace

absl::Status CheckRequest(const v1::QuantizedMatmulRequest& request,
                          std::optional<int64_t> cut_bytes) {
  AWQD_RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  AWQD_RETURN_IF_ERROR(CheckSource(request));
  if (!request.has_activations()) {
    return FieldError("activations", "nothing", "a tensor of shape [..., K]");
  }
  AWQD_RETURN_IF_ERROR(
      CheckTensor(request.activations(), kFloatingMask, "activations", cut_bytes).status());
  if (request.activations().shape_size() == 0) {
    return FieldError("activations.shape", "rank 0", "rank 1 to 8: [..., K]");
  }
  AWQD_RETURN_IF_ERROR(CheckOutputDType(request.output_dtype()));
  AWQD_RETURN_IF_ERROR(CheckPath(request.path()));
  return CheckEncoding(request);
}

absl::Status CheckRequest(const v1::DequantizeRequest& request) {
  AWQD_RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  AWQD_RETURN_IF_ERROR(CheckSource(request));
  AWQD_RETURN_IF_ERROR(CheckOutputDType(request.output_dtype()));
  return CheckEncoding(request);
}

absl::Status CheckName(const std::string& name) {
  if (name.empty()) return FieldError("name", "nothing", "the name of a model");
  absl::Status status = model::CheckModelName(name);
  return status.ok() ? status : WithField(std::move(status), "name");
}

absl::StatusOr<MatmulJob> BuildMatmul(v1::QuantizedMatmulRequest* request,
                                      const WeightShape& weight, int64_t max_send_bytes,
                                      std::optional<int64_t> cut_bytes) {
  v1::Tensor* x = request->mutable_activations();
  AWQD_ASSIGN_OR_RETURN(const TensorInfo info,
                        CheckTensor(*x, kFloatingMask, "activations", cut_bytes));
  MatmulJob job;
  AWQD_ASSIGN_OR_RETURN(job.work.rows, Tokens(info, weight.k));
  job.work.x_dtype = info.dtype;
  job.work.out_dtype = info.dtype;
  if (request->output_dtype() != v1::DTYPE_UNSPECIFIED) {
    AWQD_ASSIGN_OR_RETURN(job.work.out_dtype,
                          ParseDType(request->output_dtype(), kFloatingMask, "output_dtype"));
  }
  job.work.path = FromProto(request->path());
  job.encoding = EncodingOf(*request);
  job.output_shape = info.shape;
  job.output_shape.back() = weight.n;
  const std::optional<int64_t> elements = CheckedMul(job.work.rows, weight.n);
  AWQD_RETURN_IF_ERROR(request->has_output_shared_memory()
                           ? CheckAnswerFits(elements.value_or(INT64_MAX), job.work.out_dtype,
                                             request->output_shared_memory())
                           : CheckAnswerFits(elements.value_or(INT64_MAX), job.work.out_dtype,
                                             job.encoding, max_send_bytes,
                                             "send fewer tokens per request"));
  job.answer_bytes = EncodedBytes(*elements, job.work.out_dtype, job.encoding);
  if (request->has_bias()) {
    AWQD_ASSIGN_OR_RETURN(job.work.bias, TakeBias(request->mutable_bias(), weight.n));
  }
  job.x_bytes = info.bytes;
  const bool elsewhere = x->has_shared_memory() || (cut_bytes && x->has_raw());
  if (!elsewhere) {
    AWQD_ASSIGN_OR_RETURN(job.x, TakeBytes(x, info, "activations"));
  }
  return job;
}

absl::StatusOr<DequantizeJob> BuildDequantize(const v1::DequantizeRequest& request,
                                              const WeightShape& weight) {
  DequantizeJob job;
  if (request.output_dtype() != v1::DTYPE_UNSPECIFIED) {
    AWQD_ASSIGN_OR_RETURN(job.work.out_dtype,
                          ParseDType(request.output_dtype(), kFloatingMask, "output_dtype"));
  }
  AWQD_ASSIGN_OR_RETURN(const Bounds rows, ResolveRange(request.rows(), weight.k, "rows", "K"));
  AWQD_ASSIGN_OR_RETURN(const Bounds cols,
                        ResolveRange(request.columns(), weight.n, "columns", "N"));
  job.work.row_begin = rows.begin;
  job.work.rows = rows.count;
  job.work.col_begin = cols.begin;
  job.work.cols = cols.count;
  if (request.output_encoding() == v1::VALUES) job.encoding = v1::VALUES;
  return job;
}

absl::Status CheckFits(const v1::DequantizeRequest& request, const DequantizeJob& job,
                       int64_t max_send_bytes) {
  const std::optional<int64_t> elements = CheckedMul(job.work.rows, job.work.cols);
  if (request.has_output_shared_memory()) {
    return CheckAnswerFits(elements.value_or(INT64_MAX), job.work.out_dtype,
                           request.output_shared_memory());
  }
  return CheckAnswerFits(elements.value_or(INT64_MAX), job.work.out_dtype, job.encoding,
                         max_send_bytes, "call DequantizeStream, or ask for fewer rows or columns");
}

absl::StatusOr<int64_t> RowsPerChunk(const DequantizeJob& job, int64_t chunk_bytes,
                                     int64_t max_send_bytes) {
  AWQD_RETURN_IF_ERROR(CheckAnswerFits(job.work.cols, job.work.out_dtype, job.encoding,
                                       max_send_bytes, "ask for fewer columns"));
  const int64_t row_bytes = EncodedBytes(job.work.cols, job.work.out_dtype, job.encoding);
  const int64_t budget = std::min(chunk_bytes, max_send_bytes - kResponseOverheadBytes);
  return std::max<int64_t>(1, budget / std::max<int64_t>(1, row_bytes));
}

}  // namespace awqd::wire
