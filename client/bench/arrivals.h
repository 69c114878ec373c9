// Arrivals: when the requests of an open loop are due, whatever the server does.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>

namespace awqd::bench {

class Arrivals {
 public:
  // `rate` per second, more than 0. Poisson: independent exponential gaps, the same for the same
  // seed. Otherwise equal gaps, the first one short by `phase` (0 to 1) of a gap, so that several
  // streams interleave.
  Arrivals(double rate, bool poisson, uint64_t seed, double phase)
      : gap_ns_(1e9 / rate),
        poisson_(poisson),
        engine_(seed),
        at_ns_(poisson ? 0 : -phase * 1e9 / rate) {}

  // Nanoseconds from the start to the next arrival; never decreases.
  int64_t NextNs() {
    // Uniform above 0, which has no logarithm, to 1.
    const auto uniform = [this] { return (static_cast<double>(engine_() >> 11) + 1) * 0x1p-53; };
    at_ns_ += (poisson_ ? -std::log(uniform()) : 1) * gap_ns_;
    return static_cast<int64_t>(at_ns_);
  }

 private:
  const double gap_ns_;
  const bool poisson_;
  std::mt19937_64 engine_;
  double at_ns_;
};

}  // namespace awqd::bench
