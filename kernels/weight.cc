// Checks of CanonicalWeight, and look-up in a weight's plan.
#include "kernels/weight.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/half.h"
#include "kernels/base/status.h"

namespace awqd {
namespace {

absl::Status CheckBytes(absl::string_view member, size_t got, int64_t expected) {
  if (static_cast<int64_t>(got) == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(member, ": got ", got, " bytes, expected ", expected));
}

}  // namespace

float CanonicalWeight::Scale(int64_t group, int64_t col) const {
  const int64_t index = group * n + col;
  if (scheme.scale_dtype == DType::kFp32) {
    float value;
    std::memcpy(&value, scales.data() + index * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, scales.data() + index * 2, 2);
  return scheme.scale_dtype == DType::kFp16 ? HalfToFloat(bits) : Bf16ToFloat(bits);
}

absl::Status Validate(const CanonicalWeight& w) {
  AWQD_RETURN_IF_ERROR(Validate(w.scheme, w.k, w.n));
  if (!CheckedMul(w.k, w.row_bytes())) {
    return absl::InvalidArgumentError(absl::StrCat("K x N: ", w.k, " x ", w.n, " overflows"));
  }
  AWQD_RETURN_IF_ERROR(CheckBytes("codes", w.codes.size(), w.k * w.row_bytes()));
  const int64_t zeros = w.scheme.zero_kind == ZeroKind::kInteger ? w.groups() * w.n : 0;
  AWQD_RETURN_IF_ERROR(CheckBytes("zeros", w.zeros.size(), zeros));
  AWQD_RETURN_IF_ERROR(
      CheckBytes("scales", w.scales.size(), w.groups() * w.n * SizeOf(w.scheme.scale_dtype)));
  if (!w.bias.empty()) {
    AWQD_RETURN_IF_ERROR(CheckBytes("bias", w.bias.size() * sizeof(float), w.n * 4));
  }
  return absl::OkStatus();
}

const KernelRow* WeightPlan::Matmul(Path path, int64_t m) const {
  for (const PlanEntry& entry : matmul) {
    if (entry.path == path && m >= entry.min_m && (entry.max_m < 0 || m <= entry.max_m)) {
      return entry.row;
    }
  }
  return nullptr;
}

}  // namespace awqd
