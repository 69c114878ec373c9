// What /proc says of this process, and arithmetic of histograms.
#include "server/obs/snapshot.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace awqd::obs {
namespace {

std::string ReadAll(const char* path) {
  std::ostringstream out;
  out << std::ifstream(path).rdbuf();
  return out.str();
}

// Of /proc/self/stat from the state on: the name before it may hold blanks and brackets.
std::vector<std::string> StatFields() {
  const std::string text = ReadAll("/proc/self/stat");
  const size_t end = text.rfind(')');
  if (end == std::string::npos || end + 2 >= text.size()) return {};
  return absl::StrSplit(text.substr(end + 2), ' ');
}

int64_t Number(const std::vector<std::string>& fields, size_t index) {
  int64_t value = 0;
  return index < fields.size() && absl::SimpleAtoi(fields[index], &value) ? value : 0;
}

int64_t OpenFiles() {
  DIR* const folder = opendir("/proc/self/fd");
  if (folder == nullptr) return 0;
  int64_t count = -3;  // ".", "..", and the folder itself
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

absl::Time BootTime() {
  const std::string text = ReadAll("/proc/stat");
  const size_t at = text.find("btime ");
  if (at == std::string::npos) return absl::UnixEpoch();
  const std::string line = text.substr(at + 6, text.find('\n', at) - at - 6);
  int64_t seconds = 0;
  return absl::SimpleAtoi(line, &seconds) ? absl::FromUnixSeconds(seconds) : absl::UnixEpoch();
}

}  // namespace

ProcessStats ReadProcess() {
  // Places in proc(5), less the three that StatFields leaves out.
  constexpr size_t kUser = 11, kSystem = 12, kThreads = 17, kStart = 19, kVirtual = 20, kPages = 21;
  const std::vector<std::string> fields = StatFields();
  const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  ProcessStats out;
  out.cpu =
      absl::Seconds(static_cast<double>(Number(fields, kUser) + Number(fields, kSystem)) / ticks);
  static const absl::Time boot = BootTime();
  out.started = boot + absl::Seconds(static_cast<double>(Number(fields, kStart)) / ticks);
  out.virtual_bytes = Number(fields, kVirtual);
  out.resident_bytes = Number(fields, kPages) * sysconf(_SC_PAGESIZE);
  out.threads = Number(fields, kThreads);
  out.open_fds = OpenFiles();
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) out.max_fds = static_cast<int64_t>(limit.rlim_cur);
  return out;
}

double Quantile(const HistogramData& data, double share) {
  const int64_t total = data.total();
  if (total == 0) return 0;
  const double wanted = share * static_cast<double>(total);
  double before = 0;
  for (size_t i = 0; i < data.bounds.size(); ++i) {
    const auto count = static_cast<double>(data.counts[i]);
    if (before + count >= wanted && count > 0) {
      const double low = i == 0 ? 0 : static_cast<double>(data.bounds[i - 1]);
      return low + (static_cast<double>(data.bounds[i]) - low) * (wanted - before) / count;
    }
    before += count;
  }
  return static_cast<double>(data.bounds.back());
}

HistogramData Since(const HistogramData& before, const HistogramData& now) {
  HistogramData out = now;
  for (size_t i = 0; i < before.counts.size(); ++i) out.counts[i] -= before.counts[i];
  out.sum -= before.sum;
  return out;
}

}  // namespace awqd::obs
