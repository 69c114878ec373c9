// CPUID, and the environment's word on it.
#include "kernels/cpu/isa.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/string_view.h"

namespace awqd {
namespace {

CpuIsa MachineIsa() {
#if defined(AWQD_CPU_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) return CpuIsa::kAvx512;
  if (avx2) return CpuIsa::kAvx2;
#endif
  return CpuIsa::kPortable;
}

}  // namespace

CpuIsa DetectIsa() {
  const CpuIsa best = MachineIsa();
  const char* wish = std::getenv("AWQD_CPU_ISA");
  if (wish == nullptr) return best;
  for (const CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (Name(isa) == absl::string_view(wish)) return std::min(isa, best);
  }
  return best;
}

}  // namespace awqd
