// QuantScheme: the arithmetic that is left once a checkpoint format has been decoded.
//
//   W[k,n] = (q[k,n] - z[k/g,n]) * s[k/g,n]
//
// AWQ, GPTQ and compressed-tensors int4 are the same scheme. Printed as "a16w4g128z": 16-bit
// activations, 4-bit codes, groups of 128 along K, integer zero points.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/types.h"

namespace awqd {

enum class ZeroKind : uint8_t {
  kInteger,    // one stored unsigned integer per group and column; printed "z"
  kSymmetric,  // no stored zeros: z = 2^(bits-1) everywhere; printed "s"
};

enum class Activation : uint8_t {
  kA16,  // FP16, BF16 or FP32 activations, weights decoded to floating point
  kA8,   // INT8 activations, integer accumulation
};

struct QuantScheme {
  int bits = 4;            // 1..8
  int64_t group_size = 0;  // rows of K per scale; divides K; equals K for one group
  ZeroKind zero_kind = ZeroKind::kInteger;
  DType scale_dtype = DType::kFp16;  // as stored: FP16, BF16 or FP32
  Activation activation = Activation::kA16;

  friend bool operator==(const QuantScheme&, const QuantScheme&) = default;
};

// Bits a code occupies in CanonicalWeight and in the layout "plain": the scheme's bits rounded up
// to 2, 4 or 8.
constexpr int CodeBits(int scheme_bits) { return scheme_bits <= 2 ? 2 : scheme_bits <= 4 ? 4 : 8; }

// INVALID_ARGUMENT naming the offending member, what was got and what was expected.
// `k`, `n`: in and out features; every legal N is a multiple of 8.
absl::Status Validate(const QuantScheme& scheme, int64_t k, int64_t n);

// "a16w4g128z". Scales other than FP16 add "b" (BF16) or "f" (FP32): "a16w4g128zb".
std::string ToString(const QuantScheme& scheme);

// Inverse of ToString.
absl::StatusOr<QuantScheme> ParseScheme(absl::string_view text);

}  // namespace awqd
