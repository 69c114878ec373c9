// Waiting in a loop for a word that another thread will change.
#pragma once

#include <sched.h>

namespace awqd {

// Lets the other thread of a core, and the memory, have this moment.
inline void CpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// After `looks` in vain, in a row. The thread that is waited for may be waiting for this core: after
// some microseconds it gets it.
inline void Relax(int looks) {
  constexpr int kLooks = 64;
  if (looks > kLooks) {
    sched_yield();
  } else {
    CpuRelax();
  }
}

}  // namespace awqd
