// GpuMeter: how busy GPUs are and how much of their memory is taken, by NVIDIA's management library
// (NVML). The library is opened at run time: without it, or where it has no answer, there is
// nothing to tell.
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

// Of a whole GPU, whoever uses it.
struct GpuUse {
  double utilization = 0;  // share of the last sample's time in which a kernel ran, from 0 to 1
  int64_t memory_used_bytes = 0;
};

struct GpuMeterOptions {
  std::vector<std::string> pci_bus_ids;  // "0000:1b:00.0"; empty ones are left out
  // Read waits no longer, whatever the driver does.
  absl::Duration limit = absl::Milliseconds(200);
  std::string nvml = "libnvidia-ml.so.1";
};

// Asks the driver on a thread of its own, and only when somebody reads. Thread-safe.
class GpuMeter {
 public:
  explicit GpuMeter(GpuMeterOptions options);
  // A thread that the driver does not give back is left to itself.
  ~GpuMeter();
  GpuMeter(const GpuMeter&) = delete;
  GpuMeter& operator=(const GpuMeter&) = delete;

  // By bus id; without those that nothing is known of. Empty when the time is over, and at once
  // while an earlier question still waits for the driver after its time was over.
  std::map<std::string, GpuUse> Read();

 private:
  struct State;

  const std::shared_ptr<State> state_;  // the thread's too
  std::thread thread_;                  // none without GPUs
};

}  // namespace awqd::obs
