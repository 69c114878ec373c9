// Reads /proc/meminfo and the cgroup's files (version 2, then 1).
#include "kernels/cpu/memory_facts.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace awqd {
namespace {

std::optional<int64_t> MemInfo(absl::string_view key) {
  std::ifstream file("/proc/meminfo");
  std::string word, unit;
  int64_t kib = 0;
  while (file >> word >> kib) {
    if (word == key) return kib * 1024;
    std::getline(file, unit);
  }
  return std::nullopt;
}

// A number, or nothing for "max" and missing files.
std::optional<int64_t> ReadNumber(const char* path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (!(file >> value)) return std::nullopt;
  return value;
}

struct Cgroup {
  int64_t limit = std::numeric_limits<int64_t>::max();
  int64_t used = 0;
};

Cgroup ReadCgroup() {
  Cgroup out;
  if (auto limit = ReadNumber("/sys/fs/cgroup/memory.max")) {
    out = {*limit, ReadNumber("/sys/fs/cgroup/memory.current").value_or(0)};
  } else if (auto old = ReadNumber("/sys/fs/cgroup/memory/memory.limit_in_bytes")) {
    out = {*old, ReadNumber("/sys/fs/cgroup/memory/memory.usage_in_bytes").value_or(0)};
  }
  return out;
}

}  // namespace

int64_t TotalMemoryBytes() {
  return std::min(MemInfo("MemTotal:").value_or(0), ReadCgroup().limit);
}

int64_t AvailableMemoryBytes() {
  const Cgroup cgroup = ReadCgroup();
  const int64_t machine = MemInfo("MemAvailable:").value_or(0);
  return std::max<int64_t>(0, std::min(machine, cgroup.limit - cgroup.used));
}

}  // namespace awqd
