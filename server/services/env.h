// Env: what every handler may use. Everything in it outlives the gRPC server.
#pragma once

#include <atomic>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/engine/engine.h"
#include "server/repository/load_on_demand.h"
#include "server/repository/model_store.h"
#include "server/services/options.h"
#include "server/services/shared_memory.h"
#include "server/services/worker.h"
#include "server/transport/byte_budget.h"
#include "server/transport/call_gate.h"
#include "server/transport/door.h"

namespace awqd::transport {
class CallLoop;
}

namespace awqd::services {

struct Env {
  engine::Engine* engine = nullptr;
  repository::ModelStore* models = nullptr;
  transport::CallGate* gate = nullptr;
  transport::Door* door = nullptr;
  transport::CallLoop* loop = nullptr;
  Worker* loads = nullptr;                        // LoadModel, UnloadModel
  repository::LoadOnDemand* on_demand = nullptr;  // of models that were unloaded while idle
  Worker* lists = nullptr;                        // ListModels
  Worker* pages = nullptr;     // what walks over models, and does not wait for a disk as lists do
  Worker* parsings = nullptr;  // large requests
  Worker* packings = nullptr;  // inline weights
  transport::ByteBudget* in_flight = nullptr;
  SharedMemory* shared_memory = nullptr;  // never null, but perhaps off
  Options options;
  absl::Time started = absl::Now();
  // True until the models asked for at start are loaded: an unknown name may then still appear, so
  // it is UNAVAILABLE rather than NOT_FOUND.
  std::atomic<bool> starting{false};
  // Health: SERVING was asked for, and there is a model that can be served.
  std::atomic<bool> serving{false};
  std::atomic<bool> able{true};
  bool ready() const { return serving.load() && able.load(); }
};

}  // namespace awqd::services
