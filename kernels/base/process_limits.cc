// Reads /proc/meminfo, the files of cgroups (version 2 and 1) and the process's affinity.
#include "kernels/base/process_limits.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <fstream>
#include <future>
#include <limits>
#include <optional>
#include <thread>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "kernels/base/unique_fd.h"

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

bool Exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

// The path of the process's cgroup in the hierarchy that has `controller` (version 1; empty:
// version 2), and in `controllers` all that this hierarchy has. "" for the root.
std::string OwnCgroup(const std::string& root, absl::string_view controller,
                      std::string* controllers) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() < 3) continue;
    const std::vector<absl::string_view> all = absl::StrSplit(fields[1], ',');
    if (absl::c_linear_search(all, controller)) {
      *controllers = fields[1];
      // The cgroup lies outside of what this container shows.
      return absl::StartsWith(fields[2], "/..") || fields[2] == "/" ? "" : fields[2];
    }
  }
  return "";
}

// Appends the folders of `cgroup` and of all above it, if the hierarchy is at `mount`; some may not
// exist. A container may show a part of the hierarchy alone, under the end of the path.
void AppendFolders(const std::string& mount, absl::string_view cgroup,
                   std::vector<std::string>* out) {
  absl::string_view shown = cgroup;
  while (!shown.empty() && !Exists(absl::StrCat(mount, shown))) {
    shown.remove_prefix(std::min(shown.find('/', 1), shown.size()));
  }
  if (!shown.empty()) cgroup = shown;
  for (;;) {
    out->push_back(absl::StrCat(mount, cgroup, "/"));
    if (cgroup.empty()) return;
    cgroup = cgroup.substr(0, cgroup.rfind('/'));
  }
}

// The folders with the limits of `controller`, of one version of cgroups.
std::vector<std::string> CgroupFolders(const std::string& root, absl::string_view controller,
                                       int version) {
  const std::string mount = root + "/sys/fs/cgroup";
  std::vector<std::string> out;
  std::string controllers(controller);
  if (version == 2) {
    const std::string cgroup = OwnCgroup(root, "", &controllers);
    AppendFolders(mount, cgroup, &out);
    AppendFolders(mount + "/unified", cgroup, &out);  // beside version 1
  } else {
    const std::string cgroup = OwnCgroup(root, controller, &controllers);
    AppendFolders(absl::StrCat(mount, "/", controller), cgroup, &out);
    if (controllers != controller) {
      AppendFolders(absl::StrCat(mount, "/", controllers), cgroup, &out);
    }
  }
  return out;
}

// The limit and the use of one cgroup.
struct CgroupMemory {
  int64_t limit;
  int64_t used = 0;
  int64_t inactive_files = 0;
};

// The process's cgroup and those above it that have a limit.
std::vector<CgroupMemory> LimitedMemory(const std::string& root) {
  std::vector<CgroupMemory> out;
  for (const std::string& folder : CgroupFolders(root, "memory", 2)) {
    if (const auto limit = ReadNumber(folder + "memory.max")) {
      out.push_back({*limit, ReadNumber(folder + "memory.current").value_or(0),
                     Lookup(folder + "memory.stat", "inactive_file").value_or(0)});
    }
  }
  for (const std::string& folder : CgroupFolders(root, "memory", 1)) {
    const std::string stat = folder + "memory.stat";
    if (const auto limit = ReadNumber(folder + "memory.limit_in_bytes")) {
      // The second limit is that of the cgroups above, also of those that a container hides.
      out.push_back({std::min(*limit, Lookup(stat, "hierarchical_memory_limit").value_or(*limit)),
                     ReadNumber(folder + "memory.usage_in_bytes").value_or(0),
                     Lookup(stat, "total_inactive_file").value_or(0)});
    }
  }
  return out;
}

// The least CPU quota of a cgroup in cores; infinite without one.
double QuotaCores(const std::string& root) {
  double least = std::numeric_limits<double>::infinity();
  const auto add = [&least](absl::string_view quota, double period) {
    double value = 0;  // "max" and -1 stand for none
    if (absl::SimpleAtod(quota, &value) && value > 0 && period > 0) {
      least = std::min(least, value / period);
    }
  };
  for (const std::string& folder : CgroupFolders(root, "cpu", 2)) {
    std::ifstream file(folder + "cpu.max");
    std::string quota;
    double period = 0;
    if (file >> quota >> period) add(quota, period);
  }
  for (const std::string& folder : CgroupFolders(root, "cpu", 1)) {
    const auto quota = ReadNumber(folder + "cpu.cfs_quota_us");
    const auto period = ReadNumber(folder + "cpu.cfs_period_us");
    if (quota && period) add(absl::StrCat(*quota), static_cast<double>(*period));
  }
  return least;
}

}  // namespace

int64_t TotalMemoryBytes(const std::string& root) {
  int64_t least = MemInfo(root, "MemTotal:").value_or(kUnknown);
  for (const CgroupMemory& cgroup : LimitedMemory(root)) least = std::min(least, cgroup.limit);
  return least == kUnknown ? 0 : least;
}

int64_t AvailableMemoryBytes() {
  // Cgroups are 10 to 20 files, whose reading may take a millisecond. A load asks several times for
  // each of its weights, which may be tens of thousands.
  constexpr std::chrono::steady_clock::duration kFresh = std::chrono::milliseconds(10);
  static std::atomic<int64_t> bytes{0};
  static std::atomic<std::chrono::steady_clock::duration> read_at{-kFresh};
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  if (now - read_at.load() < kFresh) return bytes;
  const int64_t read = ReadAvailableMemoryBytes("");
  bytes = read;
  read_at = now;
  return read;
}

int64_t ReadAvailableMemoryBytes(const std::string& root) {
  int64_t least = MemInfo(root, "MemAvailable:").value_or(kUnknown);
  for (const CgroupMemory& cgroup : LimitedMemory(root)) {
    const int64_t used = std::max<int64_t>(0, cgroup.used - cgroup.inactive_files);
    least = std::min(least, std::max<int64_t>(0, cgroup.limit - used));
  }
  return least;
}

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

int UsableThreads(const std::string& root) {
  int threads = static_cast<int>(UsableCores().size());
  if (threads == 0) threads = static_cast<int>(std::thread::hardware_concurrency());
  const double quota = std::ceil(QuotaCores(root));
  if (quota < threads) threads = static_cast<int>(quota);
  return std::max(threads, 1);
}

namespace {

bool HasAddressSpace(size_t bytes) {
  void* const at =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at != MAP_FAILED && munmap(at, bytes) == 0;
}

}  // namespace

absl::Status TryThreads(int count, int64_t buffer_bytes) {
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(count));
  std::string reason;
  try {
    while (threads.size() < threads.capacity()) threads.emplace_back([ended] { ended.wait(); });
  } catch (const std::exception& error) {
    reason = error.what();
  }
  const size_t started = threads.size();
  const bool has_buffers = buffer_bytes <= 0 || HasAddressSpace(static_cast<size_t>(buffer_bytes));
  end.set_value();
  for (std::thread& thread : threads) thread.join();
  if (reason.empty() && !has_buffers) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot have ", buffer_bytes >> 20, " MiB of address space beside ", count,
                     " threads; raise the limit of memory (ulimit -v)"));
  }
  if (reason.empty()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "cannot start ", count, " threads, only ", started, ": ", reason,
      "; raise the limit of processes (ulimit -u, TasksMax=, pids.max) or memory (ulimit -v)"));
}

absl::Status TryDescriptors(int count) {
  std::vector<UniqueFd> held(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    held[i].Reset(fcntl(0, F_DUPFD_CLOEXEC, 0));
    if (held[i].ok()) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        "cannot open ", count, " files or connections, only ", i, ": ", std::strerror(errno),
        "; raise the limit of open files (ulimit -n, LimitNOFILE=)"));
  }
  return absl::OkStatus();
}

void OpenStandardDescriptors() {
  // The system call itself, because functions of sanitizers may not work yet.
  for (int fd = 0; fd <= 2; ++fd) {
    if (fcntl(fd, F_GETFD) != -1) continue;
    // The lowest free number is `fd`. Any other file keeps it as well where there is no /dev/null.
    const int flags = fd == 0 ? O_RDONLY : O_WRONLY;
    if (syscall(SYS_openat, AT_FDCWD, "/dev/null", flags) < 0) {
      syscall(SYS_openat, AT_FDCWD, "/", O_RDONLY);
    }
  }
}

}  // namespace awqd
