// GpuStatistics: utilisation and used memory of GPUs, from NVIDIA's management library (NVML). The
// library is opened at run time. Without it, or where it returns an error, there are no statistics.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

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

// Calls NVML on a thread of its own, and only when Read is called. Thread-safe.
class GpuStatisticsReader {
 public:
  explicit GpuStatisticsReader(GpuStatisticsOptions options);
  // Detaches its thread when a call of the driver does not return within the limit.
  ~GpuStatisticsReader();
  GpuStatisticsReader(const GpuStatisticsReader&) = delete;
  GpuStatisticsReader& operator=(const GpuStatisticsReader&) = delete;

  // Statistics by bus id, of the GPUs that have some. Empty when the driver does not answer within
  // the limit; while such a late answer is still missing, Read returns an empty map at once.
  std::map<std::string, GpuStatistics> Read();

 private:
  struct State;

  const std::shared_ptr<State> state_;  // shared with the thread
  std::thread thread_;                  // not started without GPUs
};

}  // namespace awqd::obs
