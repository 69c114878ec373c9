// The shared page, and the counter that selects the failing call.
#include "tests/sweeps/shim.h"

#include <execinfo.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace awqd::sweeps {
namespace {

Control* control = nullptr;
thread_local bool busy = false;  // within the shim itself

// Runs before main and uses system calls, because the functions that the shim replaces would call
// it again.
__attribute__((constructor)) void Attach() {
  void* frames[4];
  backtrace(frames, 4);  // loads what it needs
  const char* path = std::getenv("AWQD_TEST_FAULTS");
  if (path == nullptr) return;
  const long fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return;
  const long page =
      syscall(SYS_mmap, nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (page != -1) control = reinterpret_cast<Control*>(page);
}

// Libraries that throw, or return null, to their callers.
bool PassesOn(const char* name) {
  for (const char* one : {"awqd_faults", "libstdc++", "libc.so", "libm.so", "libjemalloc", "libgcc",
                          "libabsl", "libprotobuf"}) {
    if (std::strstr(name, one) != nullptr) return true;
  }
  return false;
}

// The callers of an allocation.
struct Callers {
  char asked_by[64] = "nobody";
  char all[512] = "";
};

void FindCallers(Callers* out) {
  void* frames[48];
  const int count = backtrace(frames, 48);
  char last[64] = "";
  size_t used = 0;
  bool found = false;
  for (int i = 0; i < count; ++i) {
    Dl_info info;
    if (dladdr(frames[i], &info) == 0 || info.dli_fname == nullptr) continue;
    const char* slash = std::strrchr(info.dli_fname, '/');
    const char* name = slash == nullptr ? info.dli_fname : slash + 1;
    const bool awqd = std::strcmp(name, "awqd") == 0;
    if (std::strstr(name, "awqd_faults") != nullptr) continue;
    if (!awqd && std::strcmp(name, last) == 0) continue;
    std::snprintf(last, sizeof(last), "%s", name);
    if (!found && !PassesOn(name)) {
      std::snprintf(out->asked_by, sizeof(out->asked_by), "%s", name);
      found = true;
    }
    const auto offset = reinterpret_cast<uintptr_t>(frames[i]) -
                        reinterpret_cast<uintptr_t>(info.dli_fbase);  // for addr2line -Cfe awqd
    const int wrote = awqd ? std::snprintf(out->all + used, sizeof(out->all) - used, " awqd+0x%zx",
                                           static_cast<size_t>(offset))
                           : std::snprintf(out->all + used, sizeof(out->all) - used, " %s", name);
    if (wrote < 0 || used + static_cast<size_t>(wrote) >= sizeof(out->all)) return;
    used += static_cast<size_t>(wrote);
  }
}

}  // namespace

Control* TheControl() { return control; }

bool Fails(Kind kind, const char* function) {
  if (control == nullptr || busy) return false;
  const bool own = kind == kMemory && control->kind == kOwnMemory;
  if (control->kind != kind && !own) return false;
  busy = true;
  Callers callers;
  if (own) FindCallers(&callers);
  const bool counts = !own || std::strcmp(callers.asked_by, "awqd") == 0;
  const bool fails = counts && ++control->seen == control->fail_at;
  if (fails) {
    if (kind == kMemory && !own) FindCallers(&callers);
    std::snprintf(control->where, sizeof(control->where), "%s", function);
    std::memcpy(control->asked_by, callers.asked_by, sizeof(callers.asked_by));
    std::memcpy(control->callers, callers.all, sizeof(callers.all));
    ++control->failed;
  }
  busy = false;
  return fails;
}

void MaybeStall() {
  if (control == nullptr || control->stalled_thread == 0) return;
  static thread_local const int self = static_cast<int>(syscall(SYS_gettid));
  int expected = self;
  if (!control->stalled_thread.compare_exchange_strong(expected, 0)) return;
  ++control->stalls;
  const timespec time = {control->stall_ns / 1'000'000'000, control->stall_ns % 1'000'000'000};
  clock_nanosleep(CLOCK_MONOTONIC, 0, &time, nullptr);
}

}  // namespace awqd::sweeps
