// RpcEnv: what every handler may use. Everything in it outlives the gRPC server.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "server/engine/engine.h"
#include "server/model/model_store.h"
#include "server/rpc/byte_budget.h"
#include "server/rpc/call_gate.h"
#include "server/rpc/shared_memory.h"
#include "server/rpc/worker.h"

namespace awqd {

// Bounds that handlers enforce. The flags in server/flags.cc explain each.
struct RpcLimits {
  int64_t max_receive_message_bytes = int64_t{64} << 20;
  int64_t max_send_message_bytes = int64_t{64} << 20;
  int64_t max_inline_weight_bytes = int64_t{32} << 20;
  // Requests of one QuantizedMatmulStream that may be in flight, and the bytes of their activations
  // and answers; past either, the stream is not read until one was answered.
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

struct RpcEnv {
  Engine* engine = nullptr;
  ModelStore* models = nullptr;
  CallGate* gate = nullptr;
  Worker* loads = nullptr;     // LoadModel, UnloadModel
  Worker* packings = nullptr;  // inline weights
  ByteBudget* in_flight = nullptr;
  SharedMemory* shared_memory = nullptr;  // never null, but perhaps off
  RpcLimits limits;
  absl::Time started = absl::Now();
  // True until the models asked for at start are loaded: an unknown name may then still appear, so
  // it is UNAVAILABLE rather than NOT_FOUND.
  std::atomic<bool> starting{false};
};

}  // namespace awqd
