// A snapshot with some of everything, for tests of its renderings.
#pragma once

#include <string>

#include "server/obs/snapshot.h"

namespace awqd::obs {

inline HistogramData Durations(std::initializer_list<int64_t> values_ns) {
  Histogram histogram(kLatencyBounds);
  for (const int64_t value : values_ns) histogram.Observe(value);
  return histogram.data();
}

inline Snapshot Everything() {
  Snapshot out;
  out.time = absl::FromUnixSeconds(1000);
  out.version = "1.2.3";
  out.serving = true;
  Histogram sizes(kSizeBounds), counts(kCountBounds), loads(kLoadBounds);
  sizes.Observe(2000);
  counts.Observe(8);
  loads.Observe(2'000'000'000);
  MethodStats& method = out.methods.emplace_back();
  method.method = "awqd.v1.QuantizedInference/QuantizedMatmul";
  method.started = 4;
  for (HistogramData& durations : method.durations_ns) durations = Durations({});
  method.durations_ns[0] = Durations({200'000, 5'000'000});
  method.durations_ns[5] = Durations({20'000});
  method.received_bytes = method.sent_bytes = sizes.data();
  DeviceStats& device = out.devices.emplace_back();
  device.id = "cpu:0";
  device.name = "a \"quoted\" name";
  device.memory_bytes = 1000;
  device.free_bytes = 400;
  device.used_bytes = 300;
  device.queue_full = 3;
  device.batch_tokens = device.batch_requests = counts.data();
  device.compute_ns = device.queue_ns = Durations({1'000'000});
  device.kernels = {{"cpu/qmatmul_a16", 7, absl::Seconds(2)}};
  ModelStats& model = out.models.emplace_back();
  model.unserved_weights = 3;
  model.name = "m";
  model.state = "ready";
  model.format = "awq";
  model.requests = 5;
  model.tokens = 9;
  model.bytes = {{"cpu:0", 600}};
  model.kernels = {"cpu/dense", "cpu/qmatmul_a16"};
  ModelStats& failed = out.failed_models.emplace_back();
  failed.name = "broken";
  failed.state = "failed";
  failed.message = "no config.json";
  out.unloaded_models = 2;
  out.loads_ns = out.failed_loads_ns = loads.data();
  out.in_flight_bytes = 77;
  out.in_flight_refused = 2;
  out.dropped_spans = 6;
  out.process = ReadProcess();
  return out;
}

}  // namespace awqd::obs
