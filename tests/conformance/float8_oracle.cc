// The oracle of E4M3 activations.
#include "tests/conformance/float8_oracle.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/float8.h"
#include "kernels/cpu/reference.h"
#include "kernels/exact.h"

namespace awqd::testing {
namespace {

constexpr int64_t kBlock = 128;

// x' of a token: times the factor, transformed, by stored rows.
std::vector<float> Staged(const HostWeight& weight, const std::vector<uint8_t>& x, DType dtype,
                          int64_t m) {
  std::vector<float> by_feature(weight.k), out(weight.k);
  for (int64_t k = 0; k < weight.k; ++k) {
    by_feature[k] = GetElement(x, dtype, m * weight.k + k);
    if (!weight.factor.empty()) by_feature[k] *= weight.factor[k];
  }
  for (int64_t k = 0; k < weight.k && weight.hadamard.size > 0; k += weight.hadamard.size) {
    TransformBlock(weight.hadamard, by_feature.data() + k);
  }
  for (int64_t i = 0; i < weight.k; ++i) {
    out[i] = by_feature[weight.order.empty() ? i : weight.order[i]];
  }
  return out;
}

}  // namespace

float NearestE4m3(float value) {
  float best = 0;
  bool even = true;
  for (int code = 0; code < 0x7f; ++code) {
    const float magnitude = E4m3ToFloat(static_cast<uint8_t>(code));
    const double here = std::abs(static_cast<double>(magnitude) - std::abs(value));
    const double there = std::abs(static_cast<double>(best) - std::abs(value));
    if (here < there || (here == there && !even)) best = magnitude, even = code % 2 == 0;
  }
  return std::copysign(best, value);
}

std::vector<float> RoundToE4m3(const HostWeight& weight, const std::vector<uint8_t>& x, DType dtype,
                               int64_t rows, const Quantized& how) {
  std::vector<float> out;
  for (int64_t m = 0; m < rows; ++m) {
    const std::vector<float> token = Staged(weight, x, dtype, m);
    const int64_t step = how.how == ActivationQuantization::kFloat8PerBlock ? kBlock : weight.k;
    for (int64_t begin = 0; begin < weight.k; begin += step) {
      const int64_t end = std::min(begin + step, weight.k);
      float scale = 0;
      for (int64_t i = begin; i < end; ++i) scale = std::max(scale, std::abs(token[i]));
      scale = how.scales.empty() ? scale / 448 : how.scales[m];
      if (scale == 0) scale = 1;
      for (int64_t i = begin; i < end; ++i) out.push_back(NearestE4m3(token[i] / scale) * scale);
    }
  }
  return out;
}

std::vector<double> ProductOfStaged(HostWeight weight, const std::vector<float>& x,
                                    ActivationFunction activation) {
  weight.order.clear();
  weight.factor.clear();
  weight.hadamard = {};
  const int64_t rows = static_cast<int64_t>(x.size()) / weight.k;
  return ReferenceProduct(weight, {.x = {x.data(), DType::kFp32, rows, weight.k},
                                   .bias = weight.bias.empty() ? nullptr : weight.bias.data(),
                                   .activation = activation});
}

}  // namespace awqd::testing
