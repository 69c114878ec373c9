// Loops that the compiler unrolls whatever its limits. Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/register_tile.h"

namespace awqd::cpu {
namespace {

// act(0), act(1), ..., with numbers that the compiler knows: where they index arrays of vectors,
// these stay in registers.
template <int kCount, int kFrom = 0, typename Act>
AWQD_ALWAYS_INLINE inline void Times(Act act) {
  if constexpr (kFrom < kCount) {
    act(Number<kFrom>());
    Times<kCount, kFrom + 1>(act);
  }
}

}  // namespace
}  // namespace awqd::cpu
