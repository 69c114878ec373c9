// Shapes of blocks, codes, scales and zeros.
#include "server/wire/kv_wire.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"

namespace awqd::wire {
namespace {

constexpr absl::string_view kAdvice = "send fewer tokens per request";
constexpr DTypeMask kScaleTypes = MaskOf(DType::kFp16) | MaskOf(DType::kFp32);

template <typename Request>
absl::Status CheckCommon(const Request& request) {
  AWQD_RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  AWQD_RETURN_IF_ERROR(CheckEncoding(request.output_encoding(), /*to_shared_memory=*/false));
  if (request.has_scales() == request.has_zeros()) return absl::OkStatus();
  return request.has_scales() ? FieldError("zeros", "nothing", "a tensor beside the scales")
                              : FieldError("scales", "nothing", "a tensor beside the zeros");
}

// [tokens, heads, last] of the tensor.
absl::StatusOr<TensorInfo> CheckBlock(const v1::Tensor& tensor, bool there, DTypeMask types,
                                      absl::string_view field, absl::string_view last) {
  const std::string expected = absl::StrCat("[tokens, heads, ", last, "]");
  if (!there) return FieldError(field, "nothing", absl::StrCat("a tensor ", expected));
  AWQD_ASSIGN_OR_RETURN(TensorInfo info, CheckTensor(tensor, types, field));
  if (info.shape.size() == 3 && info.shape[1] > 0 && info.shape[2] > 0) return info;
  return FieldError(absl::StrCat(field, ".shape"), ShapeText(info.shape),
                    absl::StrCat(expected, " with at least one head and one element of it"));
}

// The granularity of scales of that shape. `rows`: whether there may be one for each head and
// token.
absl::StatusOr<Kv4Per> ReadGranularity(const std::vector<int64_t>& shape, const Kv4Shape& block,
                                       bool rows) {
  if (shape == std::vector<int64_t>{1}) return Kv4Per::kTensor;
  if (shape == std::vector<int64_t>{block.heads}) return Kv4Per::kHead;
  const std::vector<int64_t> all = {block.tokens, block.heads};
  if (rows && shape == all) return Kv4Per::kRow;
  return FieldError("scales.shape", ShapeText(shape),
                    absl::StrCat(rows ? absl::StrCat(ShapeText(all), ", ") : "", "[", block.heads,
                                 "] or [1]: there are ", block.heads, " heads"));
}

// Adds the bytes that belong in `payload`; none leave it empty.
template <typename Work>
void AddInput(engine::Payload Work::*payload, std::string bytes, Job<Work>* job) {
  if (bytes.empty()) return;
  const auto size = static_cast<int64_t>(bytes.size());
  job->inputs.push_back({payload, size, std::move(bytes)});
}

// The bytes of scales and zeros.
struct ScaleBytes {
  std::string scales, zeros;
};

// Moves given scales and zeros, which are alike, out of the request. Fills the granularity and the
// element type of the work.
template <typename Request, typename Work>
absl::StatusOr<ScaleBytes> TakeScales(Request* request, bool rows, Work* work) {
  AWQD_ASSIGN_OR_RETURN(const TensorInfo scales,
                        CheckTensor(request->scales(), kScaleTypes, "scales"));
  AWQD_ASSIGN_OR_RETURN(const TensorInfo zeros,
                        CheckTensor(request->zeros(), kScaleTypes, "zeros"));
  if (zeros.dtype != scales.dtype) {
    return FieldError("zeros.dtype", Name(zeros.dtype),
                      absl::StrCat(Name(scales.dtype), ", that of the scales"));
  }
  if (zeros.shape != scales.shape) {
    return FieldError("zeros.shape", ShapeText(zeros.shape),
                      absl::StrCat(ShapeText(scales.shape), ", that of the scales"));
  }
  AWQD_ASSIGN_OR_RETURN(work->per, ReadGranularity(scales.shape, work->shape, rows));
  work->scale_dtype = scales.dtype;
  ScaleBytes out;
  AWQD_ASSIGN_OR_RETURN(out.scales, TakeBytes(request->mutable_scales(), scales, "scales"));
  AWQD_ASSIGN_OR_RETURN(out.zeros, TakeBytes(request->mutable_zeros(), zeros, "zeros"));
  return out;
}

AnswerForm DescribeAnswer(const engine::Kv4StoreWork& work, v1::Encoding encoding) {
  AnswerForm out = {
      DType::kUint8, {work.shape.tokens, work.shape.heads, work.shape.row_bytes()}, encoding};
  out.bytes = EncodedBytes(work.shape.code_bytes(), DType::kUint8, encoding);
  if (work.per != Kv4Per::kRow) return out;
  out.bytes += 2 * EncodedBytes(work.shape.rows(), work.scale_dtype, encoding);
  out.scales = {work.scale_dtype, work.scale_offset(), work.zero_offset(), work.scale_bytes()};
  return out;
}

AnswerForm DescribeAnswer(const engine::Kv4LoadWork& work, v1::Encoding encoding) {
  const Kv4Shape& block = work.shape;
  AnswerForm out = {work.out_dtype, {block.tokens, block.heads, block.head_dim}, encoding};
  out.bytes = EncodedBytes(block.rows() * block.head_dim, work.out_dtype, encoding);
  return out;
}

}  // namespace

absl::Status CheckRequest(const v1::QuantizeKvRequest& request) { return CheckCommon(request); }

absl::Status CheckRequest(const v1::DequantizeKvRequest& request) { return CheckCommon(request); }

absl::StatusOr<QuantizeKvJob> BuildKv(v1::QuantizeKvRequest* request, int64_t max_send_bytes) {
  AWQD_ASSIGN_OR_RETURN(const TensorInfo x, CheckBlock(request->block(), request->has_block(),
                                                       kFloatingMask, "block", "head_dim"));
  QuantizeKvJob job;
  job.work.shape = {x.shape[0], x.shape[1], x.shape[2]};
  job.work.x_dtype = x.dtype;
  if (request->scale_dtype() != v1::DTYPE_UNSPECIFIED) {
    AWQD_ASSIGN_OR_RETURN(job.work.scale_dtype,
                          ParseDType(request->scale_dtype(), kScaleTypes, "scale_dtype"));
  }
  ScaleBytes given;
  if (request->has_scales()) {
    const DType asked = job.work.scale_dtype;
    AWQD_ASSIGN_OR_RETURN(given, TakeScales(request, /*rows=*/false, &job.work));
    if (request->scale_dtype() != v1::DTYPE_UNSPECIFIED && asked != job.work.scale_dtype) {
      return FieldError("scale_dtype", Name(asked),
                        absl::StrCat(Name(job.work.scale_dtype), ", that of the scales"));
    }
  }
  job.answer =
      DescribeAnswer(job.work, ChooseEncoding(request->output_encoding(), request->block()));
  AWQD_RETURN_IF_ERROR(CheckSendable(job.answer.bytes, max_send_bytes, kAdvice));
  AWQD_ASSIGN_OR_RETURN(std::string bytes, TakeBytes(request->mutable_block(), x, "block"));
  AddInput(&engine::Kv4StoreWork::x, std::move(bytes), &job);
  AddInput(&engine::Kv4StoreWork::given_scale, std::move(given.scales), &job);
  AddInput(&engine::Kv4StoreWork::given_zero, std::move(given.zeros), &job);
  return job;
}

absl::StatusOr<DequantizeKvJob> BuildKv(v1::DequantizeKvRequest* request, int64_t max_send_bytes) {
  AWQD_ASSIGN_OR_RETURN(const TensorInfo codes,
                        CheckBlock(request->codes(), request->has_codes(), MaskOf(DType::kUint8),
                                   "codes", "ceil(head_dim / 2)"));
  const int64_t head_dim = request->head_dim() == 0 ? 2 * codes.shape[2] : request->head_dim();
  if (CeilDiv(head_dim, 2) != codes.shape[2]) {
    return FieldError("head_dim", absl::StrCat(head_dim),
                      absl::StrCat(2 * codes.shape[2] - 1, " or ", 2 * codes.shape[2],
                                   ": a head has ", codes.shape[2], " bytes of codes"));
  }
  if (!request->has_scales()) return FieldError("scales", "nothing", "a tensor");
  DequantizeKvJob job;
  job.work.shape = {codes.shape[0], codes.shape[1], head_dim};
  AWQD_ASSIGN_OR_RETURN(ScaleBytes given, TakeScales(request, /*rows=*/true, &job.work));
  AWQD_ASSIGN_OR_RETURN(job.work.out_dtype, OutputDType(request->output_dtype(), DType::kFp16));
  AWQD_RETURN_IF_ERROR(
      CheckEnum(v1::KvForm_IsValid(request->form()), request->form(), "form", "EXACT or FMA"));
  if (request->form() == v1::FMA) {
    job.work.form = Kv4Form::kFused;
    if (job.work.out_dtype != DType::kFp16) {
      return FieldError("form", "FMA", "EXACT: the output is not FP16");
    }
  }
  job.answer =
      DescribeAnswer(job.work, ChooseEncoding(request->output_encoding(), request->codes()));
  AWQD_RETURN_IF_ERROR(CheckSendable(job.answer.bytes, max_send_bytes, kAdvice));
  AWQD_ASSIGN_OR_RETURN(std::string bytes, TakeBytes(request->mutable_codes(), codes, "codes"));
  AddInput(&engine::Kv4LoadWork::codes, std::move(bytes), &job);
  AddInput(&engine::Kv4LoadWork::scale, std::move(given.scales), &job);
  AddInput(&engine::Kv4LoadWork::zero, std::move(given.zeros), &job);
  return job;
}

void FillScales(Answer* answer, v1::QuantizeKvResponse* response) {
  if (!answer->form->scales) return;
  const KvScales& scales = *answer->form->scales;
  const engine::Payload result = answer->result;
  const std::vector<int64_t>& codes = answer->form->shape;
  const auto fill = [&](int64_t offset, v1::Tensor* tensor) {
    const absl::string_view bytes = result.view().substr(offset, scales.bytes);
    FillTensor(bytes, scales.dtype, {{codes[0], codes[1]}}, answer->form->encoding, tensor);
    if (answer->form->encoding != v1::VALUES) tensor->set_raw(std::string(bytes));
  };
  fill(scales.scale_offset, response->mutable_scales());
  fill(scales.zero_offset, response->mutable_zeros());
  answer->result = result.Slice(0, codes[0] * codes[1] * codes[2]);
}

}  // namespace awqd::wire
