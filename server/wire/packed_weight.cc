// Inline weights pass the same decoder as checkpoints do, so that the two cannot differ.
#include "server/wire/packed_weight.h"

#include <array>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/base/status.h"
#include "kernels/formats/format.h"
#include "server/wire/status.h"
#include "server/wire/tensor.h"

namespace awqd::wire {
namespace {

struct Part {
  absl::string_view name;
  absl::string_view field;
  bool present;
  const v1::Tensor* tensor;
  DTypeMask dtypes;
  bool required;
};

std::array<Part, 4> PartsOf(const v1::PackedWeight& packed) {
  const DTypeMask words = MaskOf(DType::kInt32);
  return {{
      {"qweight", "packed.qweight", packed.has_qweight(), &packed.qweight(), words, true},
      {"qzeros", "packed.qzeros", packed.has_qzeros(), &packed.qzeros(), words, true},
      {"scales", "packed.scales", packed.has_scales(), &packed.scales(), MaskOf(DType::kFp16),
       true},
      {"bias", "packed.bias", packed.has_bias(), &packed.bias(), kFloatingMask, false},
  }};
}

absl::string_view SafetensorsName(DType dtype) {
  switch (dtype) {
    case DType::kFp16:
      return "F16";
    case DType::kBf16:
      return "BF16";
    case DType::kFp32:
      return "F32";
    case DType::kInt32:
      return "I32";
    default:
      return "";
  }
}

absl::StatusOr<int64_t> CheckPart(const Part& part) {
  if (!part.present) {
    if (!part.required) return 0;
    return FieldError(part.field, "nothing", "a tensor of the AutoAWQ gemm layout");
  }
  AWQD_ASSIGN_OR_RETURN(const TensorInfo info, CheckTensor(*part.tensor, part.dtypes, part.field));
  const size_t rank = part.required ? 2 : 1;
  if (info.shape.size() != rank) {
    return FieldError(absl::StrCat(part.field, ".shape"), ShapeText(info.shape),
                      absl::StrCat("rank ", rank));
  }
  return info.bytes;
}

// The decoder speaks of a checkpoint's tensors and config; a client knows the fields of its
// request.
absl::Status InClientsWords(const absl::Status& status) {
  std::string message(status.message());
  std::string field = "packed";
  for (absl::string_view name : {"qweight", "qzeros", "scales", "bias"}) {
    const std::string decoders = absl::StrCat("tensor \"", name, "\"");
    if (absl::StartsWith(message, decoders)) field = absl::StrCat("packed.", name);
    message = absl::StrReplaceAll(message, {{decoders, absl::StrCat("packed.", name)}});
  }
  if (absl::StartsWith(message, "group_size")) {
    message = absl::StrCat("packed.", message);
    field = "packed.group_size";
  }
  return WithField(absl::Status(status.code(), message), field);
}

}  // namespace

absl::Status CheckPacked(const v1::PackedWeight& packed, int64_t max_bytes) {
  if (packed.bits() != 0 && packed.bits() != 4) {
    return FieldError("packed.bits", absl::StrCat(packed.bits()), "4 (0 means 4)");
  }
  if (packed.group_size() < -1) {
    return FieldError("packed.group_size", absl::StrCat(packed.group_size()),
                      "a divisor of K, -1 for the whole of K, or 0 for K / rows of scales");
  }
  int64_t total = 0;
  for (const Part& part : PartsOf(packed)) {
    AWQD_ASSIGN_OR_RETURN(const int64_t bytes, CheckPart(part));
    total += bytes;  // each is bounded by what the message really carries
  }
  if (total > max_bytes) {
    return WithField(absl::ResourceExhaustedError(absl::StrCat(
                         "packed: got ", total, " bytes of tensors, expected at most ", max_bytes,
                         " (the server's max_inline_weight_bytes); load large weights as a model")),
                     "packed");
  }
  return absl::OkStatus();
}

absl::StatusOr<CanonicalWeight> DecodePacked(const v1::PackedWeight& packed) {
  std::map<absl::string_view, std::string> bytes;  // owns what the views point into
  LinearTensors tensors;
  for (const Part& part : PartsOf(packed)) {
    if (!part.present) continue;
    AWQD_ASSIGN_OR_RETURN(const TensorInfo info,
                          CheckTensor(*part.tensor, part.dtypes, part.field));
    v1::Tensor copy = *part.tensor;
    AWQD_ASSIGN_OR_RETURN(bytes[part.name], TakeBytes(&copy, info, part.field));
    const std::string& owned = bytes[part.name];
    tensors[std::string(part.name)] = {
        .dtype = std::string(SafetensorsName(info.dtype)),
        .shape = info.shape,
        .bytes = {reinterpret_cast<const uint8_t*>(owned.data()), owned.size()}};
  }
  const QuantConfig config = {
      .quant_method = "awq", .version = "gemm", .bits = 4, .group_size = packed.group_size()};
  AWQD_ASSIGN_OR_RETURN(const Format* format, FindFormat(config));
  absl::StatusOr<CanonicalWeight> weight = format->decode(config, tensors);
  if (!weight.ok()) return InClientsWords(weight.status());
  return weight;
}

}  // namespace awqd::wire
