// Loops and branches with numbers that the compiler knows. Everything has internal linkage.
#pragma once

#include <cstdint>

// Accumulators stay in registers only where every function between them and the loop is inlined,
// which the compiler's own limits do not promise: behind a call each FMA waits for memory and
// takes three times as long.
#define AWQD_ALWAYS_INLINE __attribute__((always_inline))

namespace awqd::cpu {
namespace {

// Arguments of __builtin_prefetch.
constexpr int kRead = 0;
constexpr int kL2Cache = 2;

template <int kNumber>
struct Number {
  static constexpr int kValue = kNumber;
  constexpr operator int() const { return kNumber; }
};

// run(Number<count>), for a count from kLeast to kMost.
template <int kLeast, int kMost, typename Run>
AWQD_ALWAYS_INLINE inline void WithCount(int64_t count, Run run) {
  if constexpr (kLeast < kMost) {
    if (count < kMost) return WithCount<kLeast, kMost - 1>(count, run);
  }
  run(Number<kMost>());
}

// act(Number<0>), act(Number<1>), ...: where they index arrays of vectors, these stay in registers.
template <int kCount, int kFrom = 0, typename Act>
AWQD_ALWAYS_INLINE inline void Times(Act act) {
  if constexpr (kFrom < kCount) {
    act(Number<kFrom>());
    Times<kCount, kFrom + 1>(act);
  }
}

}  // namespace
}  // namespace awqd::cpu
