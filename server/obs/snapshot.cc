// Reads this process's statistics from /proc, and computes rates between two snapshots.
#include "server/obs/snapshot.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace awqd::obs {
namespace {

std::string ReadAll(const char* path) {
  std::ostringstream out;
  out << std::ifstream(path).rdbuf();
  return out.str();
}

// The fields of /proc/self/stat after the process's name, which may contain blanks and brackets.
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

struct Sums {
  int64_t requests = 0, tokens = 0, batches = 0, queue_ns = 0, failed = 0, used_bytes = 0;
  int64_t queued = 0;
  int64_t in_time = 0, lost = 0, refused = 0;
};

Sums AddUp(const Snapshot& snapshot) {
  Sums out;
  for (const DeviceStats& device : snapshot.devices) {
    out.requests += device.batch_requests.sum;
    out.tokens += device.batch_tokens.sum;
    out.batches += device.batch_tokens.total();
    out.queue_ns += device.queue_ns.sum;
    out.queued += device.queued_requests;
    out.refused +=
        device.queue_full + device.queue_too_late + device.queue_too_long + device.queue_expired;
    out.used_bytes += device.used_bytes;
  }
  out.refused += snapshot.in_flight_refused;
  for (const ModelStats& model : snapshot.models) {
    out.in_time += model.in_time;
    out.lost += model.lost;
  }
  for (const MethodStats& method : snapshot.methods) {
    for (int code = 1; code < MethodStats::kCodes; ++code) {
      out.failed += method.durations_ns[code].total();
    }
  }
  return out;
}

double Average(double sum, int64_t count) {
  return count > 0 ? sum / static_cast<double>(count) : std::nan("");
}

TimeSeriesPoint ComputePoint(const Snapshot& before, const Snapshot& now) {
  const Sums from = AddUp(before), to = AddUp(now);
  const double seconds = std::max(1e-3, absl::ToDoubleSeconds(now.time - before.time));
  const HistogramData calls = RequestDurations(now).Since(RequestDurations(before));
  const auto tokens = static_cast<double>(to.tokens - from.tokens);
  // A model that was unloaded takes its counts along.
  const auto rate = [seconds](int64_t from, int64_t to) {
    return static_cast<double>(std::max<int64_t>(0, to - from)) / seconds;
  };
  TimeSeriesPoint out;
  out.time = now.time;
  out.in_time_per_s = rate(from.in_time, to.in_time);
  out.lost_per_s = rate(from.lost, to.lost);
  out.refused_per_s = rate(from.refused, to.refused);
  out.requests_per_s = static_cast<double>(to.requests - from.requests) / seconds;
  out.tokens_per_s = tokens / seconds;
  out.failed_per_s = static_cast<double>(to.failed - from.failed) / seconds;
  out.p50 = EstimateQuantile(calls, 0.5);
  out.p99 = EstimateQuantile(calls, 0.99);
  out.batch_tokens = Average(tokens, to.batches - from.batches);
  out.queue_ms =
      Average(static_cast<double>(to.queue_ns - from.queue_ns) * 1e-6, to.requests - from.requests);
  out.queued = static_cast<double>(to.queued);
  out.in_flight_bytes = static_cast<double>(now.in_flight_bytes);
  out.resident_bytes = static_cast<double>(now.process.resident_bytes);
  out.device_bytes = static_cast<double>(to.used_bytes);
  return out;
}

}  // namespace

ProcessStats ReadProcess() {
  // Field numbers of proc(5) less three: two fields are left out, and proc(5) counts from 1.
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

Quantile EstimateQuantile(const HistogramData& durations_ns, double q) {
  // With fewer values above a quantile, one value more or less moves it by much of a bucket.
  constexpr double kEnoughAbove = 5;
  const int64_t values = durations_ns.total();
  if (values == 0) return {};
  const double estimate = durations_ns.Quantile(q);
  const auto last = static_cast<double>(durations_ns.bounds.back());
  const int64_t beyond = durations_ns.counts.back();
  if (static_cast<double>(values - beyond) < q * static_cast<double>(values)) {
    return {.ms = last * 1e-6, .sign = ">"};
  }
  if (static_cast<double>(values) * (1 - q) >= kEnoughAbove) return {.ms = estimate * 1e-6};
  const auto bound =
      std::lower_bound(durations_ns.bounds.begin(), durations_ns.bounds.end(), estimate);
  return {.ms = static_cast<double>(*bound) * 1e-6, .sign = "≤"};
}

HistogramData RequestDurations(const Snapshot& snapshot) {
  HistogramData out;
  for (const MethodStats& method : snapshot.methods) {
    // awqd's own protocol and the Open Inference Protocol.
    if (!absl::StrContains(method.method, "Inference/") &&
        !absl::EndsWith(method.method, "/ModelInfer")) {
      continue;
    }
    if (absl::EndsWith(method.method, "Stream")) continue;
    out.Merge(method.AllDurations());
  }
  return out;
}

void TimeSeries::AddSnapshot(const Snapshot& snapshot) {
  MutexLock lock(&mu_);
  if (last_.has_value()) points_.push_back(ComputePoint(*last_, snapshot));
  last_ = snapshot;
  while (!points_.empty() && points_.front().time < snapshot.time - kLength) points_.pop_front();
}

std::vector<TimeSeriesPoint> TimeSeries::points() const {
  MutexLock lock(&mu_);
  return {points_.begin(), points_.end()};
}

}  // namespace awqd::obs
