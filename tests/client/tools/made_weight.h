// Weights from a seed for tests of the tools: every code, zero and scale.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/formats/codes.h"
#include "kernels/weight.h"

namespace awqd::tools {

struct WeightPlanOfTest {
  int64_t k = 64, n = 32;
  QuantizationScheme scheme;
  bool bias = false;
  bool order = false;
  uint32_t seed = 1;
};

// Scales are numbers that both FP16 and BF16 hold.
inline HostWeight MakeWeight(const WeightPlanOfTest& plan) {
  std::mt19937 random(plan.seed);
  HostWeight out = {.k = plan.k, .n = plan.n, .scheme = plan.scheme, .format = "test"};
  const QuantizationScheme& d = plan.scheme;
  const auto draw = [&](int most) { return static_cast<int>(random() % (most + 1)); };
  std::vector<uint8_t> codes(plan.k * plan.n);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(draw((1 << d.bits) - 1));
  out.codes = PackCodes(codes, plan.k, plan.n, d.bits);
  const int64_t cells = out.shape().cells();
  if (d.zero_kind == ZeroKind::kStored) {
    for (int64_t i = 0; i < cells; ++i) out.zeros.push_back(draw((1 << d.bits) - 1));
  }
  for (int64_t i = 0; i < cells && d.scale_dtype; ++i) {
    const float scale = std::ldexp(static_cast<float>(1 + draw(126)), -12);
    const uint16_t half = *d.scale_dtype == DType::kFp16 ? FloatToHalf(scale) : FloatToBf16(scale);
    const auto* from = d.scale_dtype == DType::kFp32 ? reinterpret_cast<const uint8_t*>(&scale)
                                                     : reinterpret_cast<const uint8_t*>(&half);
    out.scales.insert(out.scales.end(), from, from + d.scale_bytes());
  }
  for (int64_t i = 0; i < plan.n && plan.bias; ++i) out.bias.push_back(draw(255));
  if (!plan.order) return out;
  out.order.resize(plan.k);
  std::iota(out.order.begin(), out.order.end(), 0);
  std::shuffle(out.order.begin(), out.order.end(), random);
  // Rows of a group in the order of their in-features, as a decode leaves them.
  for (int64_t at = 0; at < plan.k; at += out.group_rows()) {
    const int64_t end = std::min(plan.k, at + out.group_rows());
    std::sort(out.order.begin() + at, out.order.begin() + end);
  }
  return out;
}

}  // namespace awqd::tools
