// Env: the options of the services, what every handler may use, and the functions that put the
// services on the loop.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/engine/engine.h"
#include "server/lending/lend_server.h"
#include "server/obs/snapshot.h"
#include "server/repository/idle_models.h"
#include "server/repository/model_store.h"
#include "server/ring/ring_server.h"
#include "server/services/memory/regions.h"
#include "server/services/memory/shared_memory.h"
#include "server/services/task_queue.h"
#include "server/transport/admission.h"
#include "server/transport/limits.h"
#include "server/transport/options.h"

namespace awqd::transport {
class CallLoop;
}
namespace awqd::v1 {
class ShareMemoryRequest;
}

namespace awqd::services {

// The flags in server/config/flags.cc explain each, and how to choose it.
struct Options {
  transport::Options transport;        // its threads are those of `rpc_threads`
  int rpc_threads = 0;                 // 0: by the cores and the device
  std::set<std::string> start_models;  // names of the models requested at start
  bool starting = false;               // as RpcServer::SetStarting, from the first call on
  SharedMemoryOptions shared_memory;
  // GPUs whose memory clients may share. They outlive the server.
  std::vector<Device*> sharing_devices;
  ring::Options ring;
  std::string lend_path;  // of the socket; empty: no weights are lent
  bool reflection = true;
  // How long a reflection stream may be open without asking: there are few of them for all clients.
  absl::Duration reflection_idle = absl::Seconds(30);
  bool channelz = false;  // has no effect; the server warns of it
  bool orca = false;
  // Products of floating activations are INT8_PER_TOKEN unless a request says how.
  bool int8_activations = false;
  // They are FP8_AS_DECLARED where the checkpoint declares E4M3.
  bool fp8_activations = false;
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

// Every handler may use it. All of it outlives the gRPC server.
struct Env {
  Options options;
  engine::Engine* engine = nullptr;
  repository::ModelStore* models = nullptr;
  transport::Admission* admission = nullptr;
  transport::CallLoop* loop = nullptr;
  std::unique_ptr<transport::ByteBudget> in_flight;
  std::unique_ptr<SharedMemory> shared_memory;  // never null, but perhaps off
  std::unique_ptr<Regions> regions;             // never null
  std::unique_ptr<TaskQueue> loads;             // LoadModel, UnloadModel
  std::unique_ptr<TaskQueue> lists;             // ListModels
  std::unique_ptr<TaskQueue> pages;     // walks over models that do not wait for a disk as lists do
  std::unique_ptr<TaskQueue> parsings;  // large requests
  std::unique_ptr<TaskQueue> packings;  // inline weights
  std::unique_ptr<ring::RingServer> rings;      // null without --ring_path
  std::unique_ptr<lending::LendServer> lender;  // null without --lend
  // Loads models that were unloaded while idle.
  std::unique_ptr<repository::LoadOnDemand> on_demand;
  absl::Time started = absl::Now();
  // True until the models asked for at start are loaded: an unknown name may then still appear, so
  // it is UNAVAILABLE rather than NOT_FOUND.
  std::atomic<bool> starting{false};
  // Health: SERVING was asked for, and there is a model that can be served.
  std::atomic<bool> serving{false};
  std::atomic<bool> able{true};
  bool ready() const { return serving.load() && able.load(); }
};

// --- The services. Each function puts its methods on the loop; `env` outlives it. ---

// Products, Dequantize and KV4. The methods see messages as gRPC received them and make the bytes
// of their answers: payloads are copied once on the way in and not at all on the way out, and a
// message that does not parse is answered by us.
void ServeInference(const Env& env);

// ShareMemory.
void ServeShareMemory(const Env& env);
// The GPU of that PCI bus id, or of that name of the server's. UNIMPLEMENTED where no memory of GPUs
// is taken.
absl::StatusOr<Device*> FindSharingDevice(const Env& env, absl::string_view name);
// Maps memory of a GPU; `descriptor`: of it, where the request has no handle. INVALID_ARGUMENT names
// the field.
absl::StatusOr<Region> ImportRegion(const Env& env, const v1::ShareMemoryRequest& request,
                                    UniqueFd descriptor = UniqueFd());

// Over ModelStore. A load runs on Env::loads, never on the loop's threads, and goes on when its
// client goes away: the client asked for a lasting change. Lists look at the disk and run on a
// queue of their own, so that they do not wait for loads.
void ServeModelRepository(const Env& env);

// Version, device, kernel rows, limits.
void ServeServerInfo(const Env& env);

namespace oip {
// inference.GRPCInferenceService, whose models are weights. It computes nothing by a way of its
// own: a request becomes one of awqd.v1 in its codec, and goes through the same handler.
void Serve(const Env& env);
}  // namespace oip

namespace orca {
// Load reports: xds.service.orca.v3, and the newest one at the end of calls. A report that a stream
// sends counts in Env::in_flight.
void Serve(const Env& env);
}  // namespace orca

// grpc.reflection.v1 and its older package v1alpha, whose messages are the same. It tells of the
// services whose methods have been served by now, and of itself.
void ServeReflection(const Env& env);

// --- Models ---

// Loads and unloads that clients cause, by whichever protocol: as ModelStore's functions, with a
// line in the log that says how it ended. They may block for long, so they run on Env::loads.
// Errors are those that clients may see.
using ModelPtr = std::shared_ptr<const model::Model>;
absl::StatusOr<ModelPtr> LoadModel(const Env& env, const std::string& name,
                                   bool require_all_weights = false);
absl::Status UnloadModel(const Env& env, const std::string& name);
// For repository::LoadOnDemand.
absl::Status LoadModelOnDemand(const Env& env, const std::string& name);

// --- Statistics ---

enum class Plans { kLeftOut, kIncluded };

// Collects what every room has counted. `plans`: also which kernels serve each model, a walk over
// all of its weights. Thread-safe; takes no lock for longer than a copy. `serving` is left to the
// caller.
obs::Snapshot CollectSnapshot(const Env& env, Plans plans);

}  // namespace awqd::services
