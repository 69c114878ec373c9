// Linux saves AMX's registers, 8 KiB of a thread, only for processes that asked for them.
#include "kernels/cpu/amx.h"

#if defined(AWQD_CPU_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace awqd {
namespace {

bool MachineHasAmx() {
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  // Not by __builtin_cpu_supports, whose names clang 14 lacks.
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  return (edx & kTile) != 0 && (edx & kInt8) != 0;
}

// Holds for all threads, those that there are and those that come.
bool AskForRegisters() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool HasAmx() {
  static const bool has = MachineHasAmx() && AskForRegisters();
  return has;
}

}  // namespace awqd
#endif
