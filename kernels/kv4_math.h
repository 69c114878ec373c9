// The arithmetic of KV4, the 4-bit key and value cache: the only definition, used by the CPU, GPUs
// and tests.
//
// It is QServe's (mit-han-lab/omniserve, kernels/csrc/fused_attention). For the elements x of one
// head of one token:
//
//   scale = round((max - min) / 15)           round: to the type of the scales, FP16 or FP32
//   zero  = round(-15 * min / (max - min))    a real number, of the max - min before rounding;
//                                             never -0
//   u     = half_even(x * (1 / scale) + zero) of the rounded scale and zero, then to 0 .. 15
//   exact = (u - zero) * scale
//   fused = fma(u, half(scale), half(-scale * zero))    in FP16 arithmetic
//
// Each operation is one FP32 rounding to nearest even, in this order; `exact` is rounded once more
// to its output type, `fused` is FP16.
//
// Cases that QServe leaves undefined:
// - A code beyond 0 .. 15 saturates. QServe saturates at 255 and keeps the lower four bits.
// - A NaN has code 0, and counts neither for min nor for max. Infinities saturate and do not count
//   either, so that one of them does not take the others' precision. Without any finite element
//   scale is 1 and zero is 0.
// - min and max are moved to +-7.5 times the largest scale, which is then finite; elements beyond
//   saturate. FP16 elements never are, and with FP32 scales none below 2^123.
// - A scale is at least the smallest FP16 number, 2^-24, or for FP32 scales 2^-126, so that 1 /
//   scale is finite.
// - Where zero is not finite all elements are one number c, or differ by less than FP16 zeros can
//   tell (a 4096th of c). Then scale = |c| and zero = 1 for negative c, else 0: an element is code
//   1 or 0, and c is reproduced as exactly as the type of the scales can hold it. Beyond the
//   largest scale: |c| / 15, or the largest scale, with zero 15 or 0. Nothing but zeros: scale 1,
//   zero 0.
// - QServe is compiled with fast math: its reciprocal is an approximation, and the product and the
//   sum of u are fused. So a value within some 2^-20 of a tie may have another code there.
#pragma once

#include <cstdint>

// Inlined even without optimisation: CPU kernels are compiled with flags that other machines cannot
// run, and must not leave an out-of-line copy that these might use.
#ifdef __CUDACC__
#define AWQD_KV4_INLINE __host__ __device__ __forceinline__
#else
#define AWQD_KV4_INLINE [[gnu::always_inline]] inline
#endif

namespace awqd::kv4 {

inline constexpr float kLargestFloat = 0x1.fffffep127f;
inline constexpr float kInfinity = __builtin_inff();

AWQD_KV4_INLINE float FloatOf(uint32_t bits) { return __builtin_bit_cast(float, bits); }
AWQD_KV4_INLINE uint32_t BitsOf(float value) { return __builtin_bit_cast(uint32_t, value); }

// Each is one rounding. GPU compilers would fuse * and + otherwise; CPU files that include this are
// compiled without contraction.
AWQD_KV4_INLINE float Mul(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
AWQD_KV4_INLINE float Add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
AWQD_KV4_INLINE float Div(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// The smaller and the larger; `b` if `a` is a NaN.
AWQD_KV4_INLINE float Smaller(float a, float b) {
#ifdef __CUDA_ARCH__
  return fminf(a, b);
#else
  return a < b ? a : b;
#endif
}
AWQD_KV4_INLINE float Larger(float a, float b) {
#ifdef __CUDA_ARCH__
  return fmaxf(a, b);
#else
  return a > b ? a : b;
#endif
}

AWQD_KV4_INLINE bool IsFinite(float v) { return v <= kLargestFloat && v >= -kLargestFloat; }

// The least and the greatest element so far; +infinity and -infinity without elements.
struct Range {
  float min = kInfinity;
  float max = -kInfinity;
};

// The largest and smallest values of the scales' type.
struct ScaleLimits {
  float smallest;
  float largest;
  float reach;  // the largest magnitude of min and max
};
AWQD_KV4_INLINE ScaleLimits LimitsOf(bool fp16) {
  return fp16 ? ScaleLimits{0x1p-24f, 65504.0f, 7.5f * 65504.0f}
              : ScaleLimits{0x1p-126f, kLargestFloat, 0x1p123f};
}

struct RowScale {
  float scale = 1;
  float zero = 0;
};

// Scale and zero before rounding for a row's finite elements, unless IsSpecial.
AWQD_KV4_INLINE RowScale ScaleBeforeRounding(Range finite, ScaleLimits limits) {
  const float min = Smaller(Larger(finite.min, -limits.reach), limits.reach);
  const float max = Smaller(Larger(finite.max, -limits.reach), limits.reach);
  const float width = Add(max, -min);
  // + 0 removes the sign of a zero: which zero is the least of a row depends on the order of
  // comparison.
  return {Larger(Div(width, 15), limits.smallest), Add(Div(Mul(-15, min), width), 0)};
}

// Whether a row has no finite elements, or only equal ones. `zero`: rounded.
AWQD_KV4_INLINE bool IsSpecial(Range finite, float zero) {
  return !(finite.min <= finite.max) || !IsFinite(zero);
}

// Scale and zero of such a row. `round` rounds to the type of the scales and back.
template <typename Round>
AWQD_KV4_INLINE RowScale SpecialScale(Range finite, ScaleLimits limits, Round round) {
  if (!(finite.min <= finite.max)) return {};
  const float c = Add(0.5f * finite.min, 0.5f * finite.max);
  if (c == 0) return {};
  const float size = c < 0 ? -c : c;
  const bool beyond = size > limits.largest;
  const float part = Smaller(beyond ? Div(size, 15) : size, limits.largest);
  return {round(Larger(part, limits.smallest)), c > 0 ? 0.0f : beyond ? 15.0f : 1.0f};
}

// Scale and zero of any row.
template <typename Round>
AWQD_KV4_INLINE RowScale ScaleOf(Range finite, ScaleLimits limits, Round round) {
  const RowScale exact = ScaleBeforeRounding(finite, limits);
  const RowScale rounded = {round(exact.scale), round(exact.zero)};
  return IsSpecial(finite, rounded.zero) ? SpecialScale(finite, limits, round) : rounded;
}

// A code plus kCodeMagic. `inverse`: Div(1, scale). Adding 1.5 * 2^23 rounds to an integer.
inline constexpr uint32_t kCodeMagic = 0x4B400000;  // the bits of 1.5 * 2^23
AWQD_KV4_INLINE uint32_t CodeAndMagic(float x, float inverse, float zero) {
  const float real = Add(Mul(x, inverse), zero);
  return BitsOf(Add(Smaller(Larger(real, 0), 15), 0x1.8p23f));
}

AWQD_KV4_INLINE uint32_t CodeOf(float x, float inverse, float zero) {
  return CodeAndMagic(x, inverse, zero) & 15;
}

// The element of code `u`, before it is rounded to the output type.
AWQD_KV4_INLINE float Exact(float u, float scale, float zero) { return Mul(Add(u, -zero), scale); }

// The addend of `fused`, before it is rounded to FP16.
AWQD_KV4_INLINE float OffsetOf(float scale, float zero) { return Mul(-scale, zero); }

// A float that rounds to FP16 just as fma(u, scale, offset) does. `scale` and `offset` are FP16
// numbers: the product is exact, and the sum is rounded to odd. For hosts only, because GPUs have
// the instruction.
AWQD_KV4_INLINE float FusedToOdd(float u, float scale, float offset) {
  const float product = Mul(u, scale);
  const float sum = Add(product, offset);
  const float from_offset = Add(sum, -product);
  const float error = Add(Add(product, -Add(sum, -from_offset)), Add(offset, -from_offset));
  // Rounds toward zero if the sign of the error differs. The error of an infinity or a NaN is a
  // NaN.
  const uint32_t bits = BitsOf(sum);
  const uint32_t odd = (bits - ((bits ^ BitsOf(error)) >> 31)) | 1;
  return FloatOf(BitsOf(error) & 0x7fffffffu) > 0 ? FloatOf(odd) : sum;
}

}  // namespace awqd::kv4
