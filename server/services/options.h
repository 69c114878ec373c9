// What the services may take. The flags in server/flags.cc explain each, and how to choose it.
#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "server/services/shared_memory.h"
#include "server/transport/options.h"

namespace awqd::services {

struct Options {
  transport::Options transport;  // its threads are those of `rpc_threads`
  int rpc_threads = 0;           // 0: by the cores and the device
  SharedMemoryOptions shared_memory;
  bool reflection = true;
  // How long a reflection stream may be open without asking: there are few of them for all clients.
  absl::Duration reflection_idle = absl::Seconds(30);
  bool channelz = false;  // has no effect; the server warns of it
  bool orca = false;
  // Products of floating activations are INT8_PER_TOKEN unless a request says how.
  bool int8_activations = false;
  int load_threads = 2;
  int packing_threads = 1;
  int64_t max_queued_loads = 64;
  int64_t max_inline_weight_bytes = int64_t{32} << 20;
  // Requests of one QuantizedMatmulStream that may be in flight, and the bytes of their activations
  // and answers. Past either, the stream is not read until one was answered.
  int64_t stream_in_flight = 64;
  int64_t stream_in_flight_bytes = int64_t{128} << 20;
  // Bytes of requests being parsed, queued or running and of answers not yet sent, over all calls.
  // 0: no bound.
  int64_t in_flight_bytes = 0;
  // About how many bytes a chunk of DequantizeStream holds.
  int64_t chunk_bytes = int64_t{1} << 20;
  // Reported by GetServerInfo; enforced by the engine.
  int64_t max_queued_requests = 0;
  int64_t max_batch_tokens = 0;  // 0: no bound but the message size
};

}  // namespace awqd::services
