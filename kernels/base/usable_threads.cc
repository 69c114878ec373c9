// Reads the process's affinity and the cgroup's quota.
#include "kernels/base/usable_threads.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <thread>

#include "absl/strings/numbers.h"

namespace awqd {
namespace {

// Reads cgroup v2's "max 100000" or "200000 100000"; returns 0 without a quota.
int QuotaThreads() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0, value = 0;
  if (!(file >> quota >> period) || period <= 0 || !absl::SimpleAtod(quota, &value)) return 0;
  return std::max(1, static_cast<int>(std::ceil(value / period)));
}

}  // namespace

std::vector<int> UsableCores() {
  std::vector<int> cores;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &mask)) cores.push_back(core);
  }
  return cores;
}

int UsableThreads() {
  int threads = static_cast<int>(UsableCores().size());
  if (threads == 0) threads = static_cast<int>(std::thread::hardware_concurrency());
  if (const int quota = QuotaThreads(); quota > 0) threads = std::min(threads, quota);
  return std::max(threads, 1);
}

}  // namespace awqd
