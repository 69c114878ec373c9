// Exponential or equal gaps.
#include "client/bench/arrivals.h"

#include <cmath>

namespace awqd::bench {

Arrivals::Arrivals(double rate, bool poisson, uint64_t seed, double phase)
    : gap_ns_(1e9 / rate),
      poisson_(poisson),
      engine_(seed),
      at_ns_(poisson ? 0 : -phase * 1e9 / rate) {}

int64_t Arrivals::NextNs() {
  double gaps = 1;
  if (poisson_) {
    // Never 0, whose logarithm has no value.
    const double uniform = (static_cast<double>(engine_() >> 11) + 1) * 0x1p-53;
    gaps = -std::log(uniform);
  }
  at_ns_ += gaps * gap_ns_;
  return static_cast<int64_t>(at_ns_);
}

}  // namespace awqd::bench
