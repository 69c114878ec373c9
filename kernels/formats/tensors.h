// Checks of a linear's tensors that formats share, and the parts that most of them spell alike.
//
// Errors are INVALID_ARGUMENT as "tensor "name": got ..., expected ...".
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/formats/format.h"

namespace awqd {

absl::Status BadTensor(absl::string_view name, absl::string_view got, absl::string_view expected);
std::string ShapeText(absl::Span<const int64_t> shape);

// Null when there is none of that name.
const TensorView* FindTensor(const LinearTensors& tensors, absl::string_view name);
// An error when there is none; `expected` says what is missing, "I32 [K, N/8]".
absl::StatusOr<const TensorView*> NeedTensor(const LinearTensors& tensors, absl::string_view name,
                                             absl::string_view expected);

// Checks that the dtype is one of `dtypes`, the rank `rank` and every dimension at least 1, and
// that there are as many bytes as those say.
absl::Status CheckTensor(absl::string_view name, const TensorView& tensor,
                         std::initializer_list<absl::string_view> dtypes, size_t rank);
// `because` explains the shape: "[K, N/8]".
absl::Status CheckShape(absl::string_view name, const TensorView& tensor,
                        std::initializer_list<int64_t> expected, absl::string_view because);

// Scales of rank `rank`: FP16, BF16 or FP32 (`fp32`), none of them NaN.
absl::StatusOr<DType> CheckScales(absl::string_view name, const TensorView& tensor, size_t rank,
                                  bool fp32);

// Scales of one byte, E4M3 or E8M0, none of them NaN. A request has them as U8.
absl::Status CheckByteScales(absl::string_view name, const TensorView& tensor, DType type,
                             size_t rank);
// The one number of a tensor [] or [1]: F16, BF16 or F32, not NaN.
absl::StatusOr<float> ReadNumber(absl::string_view name, const TensorView& tensor);

// Element `index` of a tensor that is I64 or I32.
int64_t LoadInteger(const TensorView& tensor, int64_t index);

// The type of a tensor that is F16, BF16 or F32.
DType FloatType(const TensorView& tensor);
// Every element of a tensor of rank 1 or 2, exactly: U8, I8, I32 up to 2^24 either way, F16, BF16,
// F32 without NaN and infinity.
absl::StatusOr<std::vector<float>> ToFloats(absl::string_view name, const TensorView& tensor);

// Rows of K that share a scale, from what the settings say (-1: all of K, 0: nothing) and how many
// groups the tensor `scales` has: the two must agree. The last group may be short where `ragged`;
// groups that the settings say nothing of are equal.
absl::StatusOr<int64_t> GroupRows(int64_t said, int64_t k, int64_t groups, absl::string_view scales,
                                  bool ragged);

// QuantizationScheme::block_rows of groups of so many rows.
constexpr int64_t BlockRows(int64_t group_rows, int64_t k) {
  return group_rows == k ? 0 : group_rows;
}

// The tensor "bias" [N], FP16, BF16, FP32 or E4M3; empty without.
absl::StatusOr<std::vector<float>> DecodeBias(const LinearTensors& tensors, int64_t n);

}  // namespace awqd
