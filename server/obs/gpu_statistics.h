// GpuStatistics: utilisation and used memory of GPUs, from NVIDIA's management library (NVML). The
// library is opened at run time. Without it, or where it returns an error, there are no statistics.
#pragma once

#include <chrono>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"

namespace awqd::obs {

// One whole GPU, used by all processes together.
struct GpuStatistics {
  double utilization = 0;  // fraction of NVML's last sample in which a kernel ran, from 0 to 1
  int64_t memory_used_bytes = 0;
};

struct GpuStatisticsOptions {
  std::vector<std::string> pci_bus_ids;  // "0000:1b:00.0"; empty ones are ignored
  // The longest time that Read waits for the driver.
  absl::Duration limit = absl::Milliseconds(200);
  std::string nvml = "libnvidia-ml.so.1";
};

class Nvml;

// Calls NVML on a thread of its own, and only when Read is called. Thread-safe.
class GpuStatisticsReader {
 public:
  using Statistics = std::map<std::string, GpuStatistics>;  // by bus id

  explicit GpuStatisticsReader(GpuStatisticsOptions options);
  // Leaves a thread behind when a call of the driver does not return within the limit.
  ~GpuStatisticsReader();
  GpuStatisticsReader(const GpuStatisticsReader&) = delete;
  GpuStatisticsReader& operator=(const GpuStatisticsReader&) = delete;

  // Statistics of the GPUs that have some. Empty when the driver does not answer within the limit;
  // while such a late answer is still missing, Read returns an empty map at once.
  Statistics Read();

 private:
  const absl::Duration limit_;
  const std::shared_ptr<Nvml> nvml_;  // null without GPUs; shared with the thread
  Mutex mu_;
  std::shared_future<Statistics> answer_ ABSL_GUARDED_BY(mu_);  // the last one that was asked for
  std::chrono::steady_clock::time_point late_ ABSL_GUARDED_BY(mu_);  // Read waits no longer for it
};

}  // namespace awqd::obs
