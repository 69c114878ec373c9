// QuantizedMatmul and Dequantize requests, then the checks of single fields.
#include "server/wire/validation.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "server/repository/model_folders.h"

namespace awqd::wire {
namespace {

constexpr absl::string_view kWeightPath = "the path of a quantised linear";

constexpr DTypeMask kActivations = kFloatingMask | MaskOf(DType::kInt8) | MaskOf(DType::kE4m3);

// INT8 activations without scales.
bool AreIntegers(const v1::QuantizedMatmulRequest& request) {
  return request.activations().dtype() == v1::INT8 && !request.has_activation_scales();
}

DTypeMask OutputTypes(const v1::QuantizedMatmulRequest& request) {
  return AreIntegers(request) ? MaskOf(DType::kInt32) : kFloatingMask;
}

bool IsStatic(v1::ActivationQuantization how) {
  return how == v1::INT8_STATIC || how == v1::FP8_STATIC;
}
bool IsDeclared(v1::ActivationQuantization how) {
  return how == v1::INT8_AS_DECLARED || how == v1::FP8_AS_DECLARED;
}

// INT8 activations give the exact INT32 sums, and nothing is done to those.
absl::Status CheckIntegerProduct(const v1::QuantizedMatmulRequest& request) {
  if (!AreIntegers(request)) return absl::OkStatus();
  constexpr absl::string_view kWhy = " for INT8 activations";
  if (request.has_bias()) return FieldError("bias", "a tensor", absl::StrCat("none", kWhy));
  if (request.activation_function() != v1::NONE) {
    return FieldError("activation_function",
                      v1::ActivationFunction_Name(request.activation_function()),
                      absl::StrCat("NONE", kWhy));
  }
  return absl::OkStatus();
}

// The scales of activations of 8 bits: one for each token, or one for all; of E4M3 also one for each
// block.
absl::StatusOr<std::vector<float>> TakeTokenScales(v1::Tensor* tensor,
                                                   const TensorInfo& activations) {
  constexpr absl::string_view kField = "activation_scales";
  std::vector<int64_t> tokens = activations.shape, blocks = activations.shape;
  tokens.pop_back();
  std::string expected = absl::StrCat(
      ShapeText(tokens), ", the leading dimensions of the activations, or one element for all");
  if (activations.dtype != DType::kE4m3)
    return TakePositiveScales(tensor, kField, {tokens}, expected);
  blocks.back() = CeilDiv(blocks.back(), engine::kScaledBlock);
  absl::StrAppend(&expected, ", or ", ShapeText(blocks), ", one for each block of ",
                  engine::kScaledBlock);
  return TakePositiveScales(tensor, kField, {tokens, blocks}, expected);
}

// Checks the weight for activations of 8 bits, sent or made. Fills the work's output type, scales and
// quantization.
absl::Status BuildActivations(v1::QuantizedMatmulRequest* request, const TensorInfo& info,
                              const WeightShape& weight, const DeclaredActivations& declared,
                              engine::MatmulWork* work) {
  const bool int8 = info.dtype == DType::kInt8;
  const v1::ActivationQuantization how = request->activation_quantization();
  const bool as_declared = IsDeclared(how);
  work->quantization = as_declared ? declared.how : FromProto(how);
  if (as_declared && (declared.how == ActivationQuantization::kNone ||
                      IsFloat8(declared.how) != (how == v1::FP8_AS_DECLARED))) {
    return NotDeclared(how, "the weight", declared.how);
  }
  if (AreIntegers(*request)) {
    if (const std::string why = WhyNoIntegers(weight); !why.empty()) {
      return FieldError("activations.dtype", "INT8",
                        absl::StrCat("FP16, BF16 or FP32, because ", why));
    }
    work->out_dtype = DType::kInt32;
    return absl::OkStatus();
  }
  const bool float8 = info.dtype == DType::kE4m3;
  AWQD_ASSIGN_OR_RETURN(work->out_dtype,
                        OutputDType(request->output_dtype(), DefaultOutput(info.dtype)));
  if (float8) {
    AWQD_ASSIGN_OR_RETURN(SentScales sent,
                          TakeSentScales(request->mutable_activation_scales(), info));
    work->quantization = sent.how;
    work->scales = std::move(sent.scales);
    return absl::OkStatus();
  }
  if (!int8 && work->quantization == ActivationQuantization::kNone) return absl::OkStatus();
  const std::string why =
      IsFloat8(work->quantization) ? std::string() : WhyNoQuantizedActivations(weight);
  if (!why.empty()) {
    return int8 ? FieldError("activations.dtype", "INT8",
                             absl::StrCat("FP16, BF16 or FP32, because ", why))
                : FieldError("activation_quantization", v1::ActivationQuantization_Name(how),
                             absl::StrCat("ACTIVATIONS_AS_SENT, because ", why));
  }
  if (as_declared && HasGivenScales(declared.how)) {
    work->scales = {declared.scale};
  }
  if (!request->has_activation_scales()) return absl::OkStatus();
  v1::Tensor* const scales = request->mutable_activation_scales();
  AWQD_ASSIGN_OR_RETURN(work->scales, IsStatic(how)
                                          ? TakePositiveScales(scales, "activation_scales", {},
                                                               "one element, of all tokens")
                                          : TakeTokenScales(scales, info));
  return absl::OkStatus();
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

// None where they may be over 2^63.
std::optional<int64_t> CheckedEncodedBytes(int64_t elements, DType dtype, v1::Encoding encoding) {
  if (!CheckedMul(elements, kMostEncodedBytes)) return std::nullopt;
  return EncodedBytes(elements, dtype, encoding);
}

}  // namespace

absl::Status CheckRequest(const v1::QuantizedMatmulRequest& request,
                          std::optional<int64_t> cut_bytes) {
  AWQD_RETURN_IF_ERROR(CheckSource(request, kWeightPath));
  AWQD_RETURN_IF_ERROR(CheckProduct(request, cut_bytes, kActivations, OutputTypes(request)));
  AWQD_RETURN_IF_ERROR(
      CheckQuantization({request.activation_quantization(), request.activations().dtype()},
                        request.has_activation_scales()));
  return CheckIntegerProduct(request);
}

absl::Status CheckRequest(const v1::DequantizeRequest& request) {
  AWQD_RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  AWQD_RETURN_IF_ERROR(CheckSource(request, kWeightPath));
  AWQD_RETURN_IF_ERROR(OutputDType(request.output_dtype(), DType::kFp16).status());
  return CheckEncoding(request.output_encoding(), request.has_output_shared_memory());
}

absl::Status CheckName(const std::string& name) { return CheckModel(name, "name"); }

absl::StatusOr<MatmulJob> BuildMatmul(v1::QuantizedMatmulRequest* request,
                                      const WeightShape& weight, int64_t max_send_bytes,
                                      std::optional<int64_t> cut_bytes,
                                      const DeclaredActivations& declared) {
  AWQD_ASSIGN_OR_RETURN(const TensorInfo info, CheckTensor(request->activations(), kActivations,
                                                           "activations", cut_bytes));
  MatmulJob job;
  AWQD_ASSIGN_OR_RETURN(job.work.rows, CountTokens(info, weight.k));
  job.work.x_dtype = info.dtype;
  AWQD_RETURN_IF_ERROR(BuildActivations(request, info, weight, declared, &job.work));
  job.answer.shape = info.shape;
  job.answer.shape.back() = weight.n;
  if (request->has_bias()) {
    AWQD_ASSIGN_OR_RETURN(job.work.bias, TakeFloats(request->mutable_bias(), {weight.n}, "bias",
                                                    absl::StrCat("the weight has N = ", weight.n)));
  }
  AWQD_RETURN_IF_ERROR(FillProduct(request, info, job.work.rows, max_send_bytes, cut_bytes, &job));
  return job;
}

absl::StatusOr<DequantizeJob> BuildDequantize(const v1::DequantizeRequest& request,
                                              const WeightShape& weight) {
  DequantizeJob job;
  AWQD_ASSIGN_OR_RETURN(job.work.out_dtype,
                        OutputDType(request.output_dtype(), job.work.out_dtype));
  AWQD_ASSIGN_OR_RETURN(const Bounds rows, ResolveRange(request.rows(), weight.k, "rows", "K"));
  AWQD_ASSIGN_OR_RETURN(const Bounds cols,
                        ResolveRange(request.columns(), weight.n, "columns", "N"));
  job.work.row_begin = rows.begin;
  job.work.rows = rows.count;
  job.work.col_begin = cols.begin;
  job.work.cols = cols.count;
  const v1::Encoding encoding = request.output_encoding() == v1::VALUES ? v1::VALUES : v1::RAW;
  job.answer = {job.work.out_dtype, {rows.count, cols.count}, encoding};
  job.answer.bytes = EncodedBytes(rows.count * cols.count, job.work.out_dtype, encoding);
  return job;
}

absl::Status CheckFits(const v1::DequantizeRequest& request, const DequantizeJob& job,
                       int64_t max_send_bytes) {
  return CheckAnswerFits(OutputRoom(request), job.work.rows, job.answer, max_send_bytes,
                         "call DequantizeStream, or ask for fewer rows or columns");
}

absl::StatusOr<int64_t> RowsPerChunk(const DequantizeJob& job, int64_t chunk_bytes,
                                     int64_t max_send_bytes) {
  AWQD_RETURN_IF_ERROR(
      CheckSendable(CheckedEncodedBytes(job.work.cols, job.work.out_dtype, job.answer.encoding),
                    max_send_bytes, "ask for fewer columns"));
  const int64_t row_bytes = EncodedBytes(job.work.cols, job.work.out_dtype, job.answer.encoding);
  const int64_t budget = std::min(chunk_bytes, max_send_bytes - kResponseOverheadBytes);
  return std::max<int64_t>(1, budget / std::max<int64_t>(1, row_bytes));
}

// --- Checks of single fields ---

absl::Status CheckLength(absl::string_view text, absl::string_view field, int64_t max_bytes) {
  if (static_cast<int64_t>(text.size()) <= max_bytes) return absl::OkStatus();
  return FieldError(field, absl::StrCat(text.size(), " bytes"),
                    absl::StrCat("at most ", max_bytes));
}

absl::Status CheckRequestId(const std::string& id) {
  return CheckLength(id, "request_id", kMaxRequestIdBytes);
}

absl::Status CheckModel(const std::string& name, absl::string_view field) {
  if (name.empty()) return FieldError(field, "nothing", "the name of a model");
  absl::Status status = repository::CheckModelName(name);
  return status.ok() ? status : WithField(std::move(status), field);
}

absl::Status CheckPath(const std::string& path, absl::string_view field, absl::string_view what) {
  if (path.empty()) return FieldError(field, "nothing", what);
  return CheckLength(path, field, kMaxWeightPathBytes);
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

absl::Status CheckActivationFunction(v1::ActivationFunction activation, bool gated) {
  const absl::string_view expected =
      gated ? "RELU, GELU, SILU, GELU_TANH, SWIGLU_OAI or SITU, of gate and up"
            : "NONE, RELU, GELU, SILU or GELU_TANH";
  AWQD_RETURN_IF_ERROR(CheckEnum(v1::ActivationFunction_IsValid(activation), activation,
                                 "activation_function", expected));
  const bool of_two = activation == v1::SWIGLU_OAI || activation == v1::SITU;
  if (gated ? activation != v1::NONE : !of_two) return absl::OkStatus();
  return FieldError("activation_function", v1::ActivationFunction_Name(activation), expected);
}

absl::Status CheckQuantization(const QuantizationFields& fields, bool has_scales,
                               absl::string_view scales_field) {
  constexpr absl::string_view kField = "activation_quantization";
  const v1::ActivationQuantization how = fields.how;
  const absl::string_view expected =
      fields.float8_only
          ? "ACTIVATIONS_AS_SENT, ACTIVATIONS_FLOATING, FP8_PER_TOKEN, FP8_PER_BLOCK_128, "
            "FP8_STATIC or FP8_AS_DECLARED"
          : "ACTIVATIONS_AS_SENT, INT8_PER_TOKEN, INT8_STATIC, INT8_AS_DECLARED, "
            "ACTIVATIONS_FLOATING, FP8_PER_TOKEN, FP8_PER_BLOCK_128, FP8_STATIC or "
            "FP8_AS_DECLARED";
  AWQD_RETURN_IF_ERROR(CheckEnum(v1::ActivationQuantization_IsValid(how), how, kField, expected));
  const std::string name = v1::ActivationQuantization_Name(how);
  const bool to_int8 =
      how == v1::INT8_PER_TOKEN || how == v1::INT8_STATIC || how == v1::INT8_AS_DECLARED;
  if (fields.float8_only && to_int8) return FieldError(kField, name, expected);
  const bool int8 = fields.activations == v1::INT8;
  const bool float8 = fields.activations == v1::FP8_E4M3;
  if ((int8 || float8) && how != v1::ACTIVATIONS_AS_SENT) {
    return FieldError(kField, name,
                      absl::StrCat("ACTIVATIONS_AS_SENT: the activations are ",
                                   v1::DType_Name(fields.activations), " already"));
  }
  if (has_scales) {
    if (int8 || float8 || IsStatic(how)) return absl::OkStatus();
    const bool own = FromProto(how) != ActivationQuantization::kNone;
    return FieldError(scales_field, "a tensor",
                      own ? absl::StrCat("none with ", name, ": each token has its own")
                      : IsDeclared(how)
                          ? absl::StrCat("none with ", name, ": the checkpoint has them")
                          : absl::StrCat("none with floating activations that are multiplied as "
                                         "they are; activation_quantization ",
                                         fields.float8_only ? "FP8_STATIC rounds them to E4M3"
                                                            : "INT8_STATIC rounds them to INT8"));
  }
  if (float8) return FieldError(scales_field, "nothing", "the scales of FP8_E4M3 activations");
  if (!IsStatic(how)) return absl::OkStatus();
  return FieldError(scales_field, "nothing", "an FP32 tensor of one element");
}

absl::StatusOr<std::vector<float>> TakePositiveScales(v1::Tensor* tensor, absl::string_view field,
                                                      absl::Span<const std::vector<int64_t>> shapes,
                                                      absl::string_view expected) {
  AWQD_ASSIGN_OR_RETURN(const TensorInfo info, CheckTensor(*tensor, MaskOf(DType::kFp32), field));
  if (info.elements != 1 && absl::c_find(shapes, info.shape) == shapes.end()) {
    return FieldError(absl::StrCat(field, ".shape"), ShapeText(info.shape), expected);
  }
  AWQD_ASSIGN_OR_RETURN(const std::string bytes, TakeBytes(tensor, info, field));
  std::vector<float> scales = FloatsFromBytes(bytes, info.dtype);
  for (size_t i = 0; i < scales.size(); ++i) {
    if (scales[i] > 0 && std::isfinite(scales[i])) continue;
    return FieldError(field, absl::StrCat(scales[i], " at element ", i), "positive finite numbers");
  }
  // Any scale will do where there are no tokens.
  if (scales.empty()) scales = {1};
  return scales;
}

absl::StatusOr<SentScales> TakeSentScales(v1::Tensor* tensor, const TensorInfo& activations) {
  const bool blocks = static_cast<size_t>(tensor->shape_size()) == activations.shape.size();
  AWQD_ASSIGN_OR_RETURN(std::vector<float> scales, TakeTokenScales(tensor, activations));
  const bool per_block = blocks && scales.size() > 1;
  return SentScales{
      per_block ? ActivationQuantization::kFloat8PerBlock : ActivationQuantization::kFloat8Static,
      std::move(scales)};
}

absl::Status NotDeclared(v1::ActivationQuantization how, absl::string_view weight,
                         ActivationQuantization declared) {
  return FieldError("activation_quantization", v1::ActivationQuantization_Name(how),
                    absl::StrCat("another: ", weight, "'s checkpoint declares ",
                                 declared == ActivationQuantization::kNone ? "none"
                                 : IsFloat8(declared)                      ? "FP8"
                                                                           : "INT8"));
}

absl::StatusOr<DType> OutputDType(v1::DType dtype, DType unspecified, DTypeMask allowed) {
  if (dtype == v1::DTYPE_UNSPECIFIED) return unspecified;
  return ParseDType(dtype, allowed, "output_dtype");
}

absl::StatusOr<int64_t> CountTokens(const TensorInfo& x, int64_t k) {
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

v1::Encoding ChooseEncoding(v1::Encoding asked, const v1::Tensor& in) {
  if (asked != v1::ENCODING_UNSPECIFIED) return asked;
  return in.has_floats() || in.has_ints() ? v1::VALUES : v1::RAW;
}

absl::Status CheckSendable(std::optional<int64_t> bytes, int64_t max_send,
                           absl::string_view advice) {
  const int64_t room = max_send - kResponseOverheadBytes;
  if (bytes && *bytes <= room) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "output: got ", bytes ? absl::StrCat(*bytes) : "over 2^63", " bytes, expected at most ", room,
      " (the server's max_send_message_bytes is ", max_send, "); ", advice));
}

absl::Status CheckAnswerFits(std::optional<int64_t> room, int64_t rows, const AnswerForm& form,
                             int64_t max_send, absl::string_view advice) {
  const int64_t elements = CheckedMul(rows, form.shape.back()).value_or(INT64_MAX);
  if (!room) {
    return CheckSendable(CheckedEncodedBytes(elements, form.dtype, form.encoding), max_send,
                         advice);
  }
  const std::optional<int64_t> bytes = CheckedMul(elements, SizeOf(form.dtype));
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
  switch (activation) {
    case v1::RELU:
      return ActivationFunction::kRelu;
    case v1::GELU:
      return ActivationFunction::kGelu;
    case v1::SILU:
      return ActivationFunction::kSilu;
    case v1::GELU_TANH:
      return ActivationFunction::kGeluTanh;
    case v1::SWIGLU_OAI:
      return ActivationFunction::kSwigluOai;
    case v1::SITU:
      return ActivationFunction::kSitu;
    default:
      return ActivationFunction::kNone;
  }
}

ActivationQuantization FromProto(v1::ActivationQuantization quantization) {
  switch (quantization) {
    case v1::INT8_PER_TOKEN:
      return ActivationQuantization::kPerToken;
    case v1::INT8_STATIC:
      return ActivationQuantization::kStatic;
    case v1::FP8_PER_TOKEN:
      return ActivationQuantization::kFloat8PerToken;
    case v1::FP8_PER_BLOCK_128:
      return ActivationQuantization::kFloat8PerBlock;
    case v1::FP8_STATIC:
      return ActivationQuantization::kFloat8Static;
    default:
      return ActivationQuantization::kNone;
  }
}

}  // namespace awqd::wire
