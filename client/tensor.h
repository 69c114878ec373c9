// Tensor: a dense row-major array in host memory, as the client sends and receives it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "awqd/v1/tensor.pb.h"

namespace awqd::client {

using DType = v1::DType;

// Bytes of one element; 0 for DTYPE_UNSPECIFIED.
int64_t SizeOf(DType dtype);
// "FP16", "BF16", "FP32", "INT8", "UINT8", "INT32", "FP8_E4M3".
absl::string_view Name(DType dtype);
// Case-insensitive; INVALID_ARGUMENT for anything else.
absl::StatusOr<DType> ParseDType(absl::string_view name);

// Product of the dimensions; 1 for rank 0. INVALID_ARGUMENT for a rank above 8, a negative
// dimension or a product past 2^63 - 1.
absl::StatusOr<int64_t> ElementCount(absl::Span<const int64_t> shape);

// "[2, 3]"
std::string ShapeString(absl::Span<const int64_t> shape);

struct Tensor {
  DType dtype = v1::FP32;
  std::vector<int64_t> shape;
  std::string bytes;  // little-endian, product(shape) * SizeOf(dtype) of them

  // Each value rounded once, to nearest even, to FP16, BF16 or FP32. INVALID_ARGUMENT for another
  // dtype, or when the number of values is not that of the shape.
  static absl::StatusOr<Tensor> FromFloats(DType dtype, std::vector<int64_t> shape,
                                           absl::Span<const float> values);
  // Exact for every floating dtype and for INT8 and UINT8; others are refused.
  absl::StatusOr<std::vector<float>> ToFloats() const;

  // OK when the shape is legal and the bytes are as many as shape and dtype say.
  absl::Status Check() const;
};

// Another floating dtype, one rounding per element.
absl::StatusOr<Tensor> Convert(const Tensor& tensor, DType dtype);

// Contents as `raw`. The rvalue form moves the bytes.
v1::Tensor ToProto(Tensor tensor);
// INTERNAL unless the message is a well-formed raw tensor: what arrives from a server is checked.
absl::StatusOr<Tensor> FromProto(v1::Tensor proto);

}  // namespace awqd::client
