// Reads /proc/meminfo and the cgroup's files (version 2, then 1).
#include "kernels/base/memory_facts.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace awqd {
namespace {

constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max();

// The number after `key` in a file of lines "key number [unit]"; nullopt without such a line.
std::optional<int64_t> Lookup(const std::string& path, absl::string_view key) {
  std::ifstream file(path);
  std::string word, unit;
  int64_t value = 0;
  while (file >> word >> value) {
    if (word == key) return value;
    std::getline(file, unit);
  }
  return std::nullopt;
}

std::optional<int64_t> MemInfo(const std::string& root, absl::string_view key) {
  const auto kib = Lookup(root + "/proc/meminfo", key);
  return kib ? std::optional(*kib * 1024) : std::nullopt;
}

// The number in a file; nullopt for "max" and missing files.
std::optional<int64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (!(file >> value)) return std::nullopt;
  return value;
}

// The files of one version of cgroups.
struct CgroupFiles {
  std::string limit, used, stat, inactive_file;
};

struct Cgroup {
  CgroupFiles files;
  int64_t limit = kUnknown;
};

Cgroup FindCgroup(const std::string& root) {
  const std::string v2 = root + "/sys/fs/cgroup/memory.";
  const std::string v1 = root + "/sys/fs/cgroup/memory/memory.";
  for (const CgroupFiles& files :
       {CgroupFiles{v2 + "max", v2 + "current", v2 + "stat", "inactive_file"},
        CgroupFiles{v1 + "limit_in_bytes", v1 + "usage_in_bytes", v1 + "stat",
                    "total_inactive_file"}}) {
    if (const auto limit = ReadNumber(files.limit)) return {files, *limit};
  }
  return {};
}

}  // namespace

int64_t TotalMemoryBytes(const std::string& root) {
  const int64_t least =
      std::min(MemInfo(root, "MemTotal:").value_or(kUnknown), FindCgroup(root).limit);
  return least == kUnknown ? 0 : least;
}

int64_t AvailableMemoryBytes(const std::string& root) {
  const int64_t machine = MemInfo(root, "MemAvailable:").value_or(kUnknown);
  const Cgroup cgroup = FindCgroup(root);
  if (cgroup.limit == kUnknown) return machine;
  const int64_t used = ReadNumber(cgroup.files.used).value_or(0);
  const int64_t dropped = Lookup(cgroup.files.stat, cgroup.files.inactive_file).value_or(0);
  return std::clamp<int64_t>(cgroup.limit - std::max<int64_t>(0, used - dropped), 0, machine);
}

}  // namespace awqd
