// Snapshot: everything that a server counts, as it was at one moment. Plain numbers: the rooms that
// count know nothing of who shows them, and who shows them knows no room.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/obs/gpu_statistics.h"
#include "server/obs/histogram.h"

namespace awqd::obs {

// The calls of one method. Names come from the server's table: all methods that it does not have
// are one.
struct MethodStats {
  static constexpr int kCodes = 17;  // of gRPC, OK first

  std::string method;  // "awqd.v1.ServerInfo/GetServerInfo"
  int64_t started = 0;
  std::array<HistogramData, kCodes> durations_ns;  // by code; their totals are calls that ended
  HistogramData received_bytes, sent_bytes;        // of each call
};

// Batches that ran the same kernel rows.
struct KernelStats {
  std::string kernel;
  int64_t batches = 0;
  absl::Duration compute;
};

struct DeviceStats {
  std::string id, name;
  std::string pci_bus_id;     // empty: it has none
  std::optional<GpuUse> gpu;  // only in what /metrics shows
  bool healthy = true;
  int64_t memory_bytes = 0, free_bytes = 0, weights_bytes = 0;
  int64_t queued_requests = 0;
  int64_t queue_expired = 0, queue_cancelled = 0, queue_full = 0, queue_draining = 0;
  int64_t batches_failed = 0, merged_requests = 0;
  HistogramData batch_tokens, batch_requests, compute_ns;  // of each batch
  HistogramData queue_ns;                                  // of each request
  std::vector<KernelStats> kernels;
  int64_t staging_lent_bytes = 0, staging_kept_bytes = 0, staging_misses = 0, staging_copied = 0;
};

// A model that is served or being loaded.
struct ModelStats {
  std::string name, state, format;
  float loaded_share = 0;
  int64_t version = 0, weights = 0;
  int64_t requests = 0, failed = 0, tokens = 0;
  absl::Duration queue;
  std::vector<std::pair<std::string, int64_t>> bytes;  // by device
  std::vector<std::string> kernels;                    // of its plans; only where asked for
};

// What the operating system says of the process; 0 where it says nothing.
struct ProcessStats {
  absl::Duration cpu;
  absl::Time started;
  int64_t resident_bytes = 0, virtual_bytes = 0;
  int64_t open_fds = 0, max_fds = 0, threads = 0;
};
ProcessStats ReadProcess();

struct Snapshot {
  absl::Time time;
  std::string version;  // of awqd
  bool serving = false;
  std::vector<MethodStats> methods;
  std::vector<DeviceStats> devices;
  std::vector<ModelStats> models;
  HistogramData loads_ns, failed_loads_ns;
  int64_t in_flight_bytes = 0, in_flight_limit_bytes = 0;  // 0: no limit
  int64_t in_flight_refused = 0;
  int64_t turned_away = 0;  // calls, while the server stopped
  int64_t queue_limit_requests = 0;
  absl::Duration loop_hold_wall, loop_hold_processor;  // the longest of the last minute
  int64_t exported_spans = 0, dropped_spans = 0;
  ProcessStats process;
};

// The value that `share` of the values do not pass, between two bounds as if they lay evenly. 0
// without values; the last bound where it lies above.
double Quantile(const HistogramData& data, double share);

// What was counted after `before` was taken, of the same histogram.
HistogramData Since(const HistogramData& before, const HistogramData& now);

}  // namespace awqd::obs
