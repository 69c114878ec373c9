// Weights for tests of the tiles.
#pragma once

#include <cstdint>

#include "kernels/weight.h"

namespace awqd::cuda {

inline WeightShape Shape(int64_t k, int64_t n, int64_t group = 128) {
  WeightShape shape{k, n, {}};
  shape.scheme = Asymmetric(4, group);
  return shape;
}

}  // namespace awqd::cuda
