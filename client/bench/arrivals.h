// Arrivals: when the requests of an open loop are due, whatever the server does.
#pragma once

#include <cstdint>
#include <random>

namespace awqd::bench {

class Arrivals {
 public:
  // `rate` per second, more than 0. Poisson: independent exponential gaps, the same for the same
  // seed. Otherwise equal gaps, the first one short by `phase` (0 to 1) of a gap, so that several
  // streams interleave.
  Arrivals(double rate, bool poisson, uint64_t seed, double phase);

  // Nanoseconds from the start to the next arrival; never decreases.
  int64_t NextNs();

 private:
  const double gap_ns_;
  const bool poisson_;
  std::mt19937_64 engine_;
  double at_ns_;
};

}  // namespace awqd::bench
