// v1.Tensor <-> bytes: every check on dtype, shape and size; typed values as bytes and back.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "awqd/v1/tensor.pb.h"
#include "kernels/types.h"

namespace awqd::wire {

// The element types of the API's tensors, and their names in checkpoints.
struct ElementType {
  v1::DType api;
  DType dtype;
  absl::string_view in_checkpoints;
};
inline constexpr ElementType kElementTypes[] = {
    {v1::FP16, DType::kFp16, "F16"},  {v1::BF16, DType::kBf16, "BF16"},
    {v1::FP32, DType::kFp32, "F32"},  {v1::INT8, DType::kInt8, "I8"},
    {v1::UINT8, DType::kUint8, "U8"}, {v1::INT32, DType::kInt32, "I32"},
    {v1::FP8_E4M3, DType::kE4m3, ""}};  // of activations alone

// The shape of a tensor that passed CheckTensor: elements x SizeOf(dtype) fits in 63 bits.
struct TensorInfo {
  DType dtype = DType::kFp16;
  std::vector<int64_t> shape;
  int64_t elements = 1;
  int64_t bytes = 0;
};

// `field` is the path of the enum in the request. INVALID_ARGUMENT for UNSPECIFIED, for values this
// server does not know, and for those outside `allowed`.
absl::StatusOr<DType> ParseDType(v1::DType dtype, DTypeMask allowed, absl::string_view field);
v1::DType ToProto(DType dtype);

// "[2, 3]"
std::string ShapeText(absl::Span<const int64_t> shape);

// Checks dtype (against `allowed`), rank 0 to 8, dimensions, products and that the contents have
// exactly as many bytes or values as the shape says. Errors are FieldErrors beneath `field`.
// `cut_bytes`: of contents that are not in the message: raw ones that were left out, or in shared
// memory. Without it shared memory is refused.
absl::StatusOr<TensorInfo> CheckTensor(const v1::Tensor& tensor, DTypeMask allowed,
                                       absl::string_view field,
                                       std::optional<int64_t> cut_bytes = std::nullopt);

// Contents that were typed, `floats` or `ints`, as row-major little-endian bytes of info.dtype;
// nothing for others. Values are rounded to nearest even; a finite value that would become
// infinite, or an integer outside the dtype, is refused. NaN and infinities pass.
absl::StatusOr<std::string> TypedBytes(const v1::Tensor& tensor, const TensorInfo& info,
                                       absl::string_view field);
// Typed contents as those, `raw` moved out of the tensor.
absl::StatusOr<std::string> TakeBytes(v1::Tensor* tensor, const TensorInfo& info,
                                      absl::string_view field);

// Floating-point bytes as floats, exactly.
std::vector<float> FloatsFromBytes(absl::string_view bytes, DType dtype);

// Bytes that a tensor's contents take in a message, at most.
int64_t EncodedBytes(int64_t elements, DType dtype, v1::Encoding encoding);

inline constexpr int64_t kMostEncodedBytes = 10;  // of an element: a negative integer

// Describes a result. With the encoding VALUES its contents are written as well; raw
// ones go their own way.
void FillTensor(absl::string_view bytes, DType dtype, absl::Span<const int64_t> shape,
                v1::Encoding encoding, v1::Tensor* out);

}  // namespace awqd::wire
