// Recognises Hadamard matrices by their first column and the rows of powers of two.
#include "kernels/formats/hadamard.h"

#include <bit>
#include <cmath>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/exact.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

float InverseRoot(int64_t size) {
  return static_cast<float>(1 / std::sqrt(static_cast<double>(size)));
}

// Element i of the tensor, whose bytes were checked.
float Load(const TensorView& matrix, int64_t i) {
  if (matrix.dtype == "I8") return static_cast<int8_t>(matrix.bytes[i]);
  return LoadElement(matrix.bytes.data(), FloatType(matrix), i);
}

}  // namespace

absl::Status ReadHadamard(const Setting& object, HostWeight* out) {
  AWQD_ASSIGN_OR_RETURN(const auto size,
                        ReadInteger(object, kHadamardSize, -1, Hadamard::kMostRows));
  if (!size) return absl::OkStatus();
  out->hadamard.size = *size == -1 ? out->k : *size;
  if (out->hadamard.size == 0) return BadValue(kHadamardSize, "0", "-1 or a power of two");
  out->hadamard.scale = InverseRoot(out->hadamard.size);
  return Validate(out->hadamard, out->k);
}

absl::Status DecodeHadamard(absl::string_view name, const TensorView& matrix, HostWeight* out) {
  AWQD_RETURN_IF_ERROR(CheckTensor(name, matrix, {"I8", "F16", "BF16", "F32"}, 2));
  const int64_t size = matrix.shape[0];
  AWQD_RETURN_IF_ERROR(CheckShape(name, matrix, {size, size}, "[size, size]"));
  const float scale = std::fabs(Load(matrix, 0));
  const Hadamard hadamard = {size, matrix.dtype == "I8" ? InverseRoot(size) : scale};
  AWQD_RETURN_IF_ERROR(Validate(hadamard, out->k));
  const auto refuse = [&](int64_t row, int64_t col) {
    return BadTensor(
        name, absl::StrCat(Load(matrix, row * size + col), " at [", row, ", ", col, "]"),
        absl::StrCat("a Hadamard matrix of Sylvester with signs of rows and an order of columns, ",
                     "of elements ", scale, " and ", -scale));
  };
  std::vector<float> signs(size);
  std::vector<int32_t> columns(size);
  std::vector<bool> seen(size);
  for (int64_t i = 0; i < size; ++i) signs[i] = Load(matrix, i * size) < 0 ? -1.0f : 1.0f;
  for (int64_t j = 0; j < size; ++j) {
    for (int64_t bit = 1; bit < size; bit *= 2) {
      if (Load(matrix, bit * size + j) * signs[bit] < 0) columns[j] |= static_cast<int32_t>(bit);
    }
    if (seen[columns[j]]) return refuse(0, j);
    seen[columns[j]] = true;
  }
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t j = 0; j < size; ++j) {
      const bool odd = std::popcount(static_cast<uint64_t>(i & columns[j])) % 2 != 0;
      if (Load(matrix, i * size + j) != (odd ? -scale : scale) * signs[i]) return refuse(i, j);
    }
  }
  out->hadamard = hadamard;
  bool ordered = true, positive = true;
  for (int64_t i = 0; i < size; ++i) {
    ordered &= columns[i] == i;
    positive &= signs[i] > 0;
  }
  for (int64_t k = 0; k < out->k && !ordered; ++k) {
    out->order.push_back(static_cast<int32_t>(k - k % size) + columns[k % size]);
  }
  if (positive) return absl::OkStatus();
  out->factor.resize(out->k, 1.0f);
  for (int64_t k = 0; k < out->k; ++k) out->factor[k] *= signs[k % size];
  return absl::OkStatus();
}

}  // namespace awqd
