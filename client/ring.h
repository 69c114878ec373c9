// Ring: calls of a server on this machine through shared memory, without messages, when it runs
// with --ring_path.
//
//   auto ring = Ring::Open({.path = "/run/awqd-ring.sock"});
//   auto up = (*ring)->Prepare({.weight = WeightName{"my-model", "model.layers.0.mlp.up_proj"},
//                               .activations = {v1::FP16, {1, k}, ""}});
//   std::memcpy((*ring)->payload(), x, up->x_bytes);
//   RingAnswer y = (*ring)->Run({.call = up->number, .tokens = 1, .y_offset = up->x_bytes});
//
// proto/awqd/ring/layout.h says what lies in the memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "awqd/v1/inference.pb.h"
#include "client/awqd_client.h"
#include "client/security.h"

namespace awqd::ring {
struct Header;
struct Slot;
}  // namespace awqd::ring

namespace awqd::client {

struct RingOptions {
  std::string path;  // of the server's --ring_path, with or without "unix:"
  // Calls in flight at most: a power of two up to 512.
  uint32_t slots = 64;
  int64_t payload_bytes = int64_t{16} << 20;
  // Deadline of a call that states none, and of opening and preparing.
  absl::Duration timeout = absl::Seconds(60);
  // How long a caller polls for its answer before it sleeps.
  absl::Duration spin = absl::Microseconds(50);
  Security security;  // of it the token
};

// A call that was prepared, and the bytes that one token of it takes.
struct RingPrepared {
  uint32_t number = 0;
  int64_t x_bytes = 0, y_bytes = 0;
  int64_t ids_bytes = 0, router_bytes = 0, scales_bytes = 0;  // 0: it has none
  int64_t y_columns = 0;
  DType y_dtype = v1::DTYPE_UNSPECIFIED;
};

// A step of a chain.
struct RingStep {
  RingPrepared call;  // its tensors in the payload, or those of all steps in one region of a GPU
  // 0: it takes the activations of the chain; i: the result of step i, from 1, an earlier one.
  uint32_t x = 0;
  uint32_t router = 0;  // the same of its router weights, or of the logits of its router
};

struct RingCall {
  uint32_t call = 0;  // RingPrepared::number; 0: the empty call, which is answered at once
  int64_t tokens = 0;
  // Where tensors are in the payload, or in the shared-memory objects that the call was prepared
  // with. router_offset: of router weights, or of the logits of a router.
  int64_t x_offset = 0, y_offset = 0, ids_offset = 0, router_offset = 0, scales_offset = 0;
  absl::Duration timeout = absl::ZeroDuration();  // zero: the ring's; infinite: none
  std::string traceparent = "";                   // the caller's span; at most 56 bytes
};

struct RingAnswer {
  absl::Status status;
  v1::Execution execution;
  int64_t y_bytes = 0;
  // From the server's read of the slot to its answer.
  absl::Duration server_time;
};

// Thread-safe. Calls of several threads run side by side, in slots of their own.
class Ring {
 public:
  // INVALID_ARGUMENT for options that cannot work, UNAVAILABLE when no server listens there, else
  // the server's status.
  static absl::StatusOr<std::unique_ptr<Ring>> Open(const RingOptions& options);
  // Closes the ring. No call of it is in progress.
  virtual ~Ring() = default;

  // The memory for tensors, page-aligned. The callers share it out.
  virtual char* payload() const = 0;
  virtual int64_t payload_bytes() const = 0;

  // Prepares calls like this one, with any number of tokens. The activations, ids, router weights
  // and logits have a dtype and a shape [..., columns]; their bytes are left out. activation_scales
  // without bytes are of each token of a call, with bytes of all calls. shared_activations and
  // shared_output may name objects; without, the tensors are in the payload.
  virtual absl::StatusOr<RingPrepared> Prepare(MatmulCall call) = 0;
  virtual absl::StatusOr<RingPrepared> Prepare(GroupedMatmulCall call) = 0;
  virtual absl::StatusOr<RingPrepared> Prepare(GatedMlpCall call) = 0;
  // Prepares a chain: its steps run in order, without the client, and have one answer. The results
  // of all lie one after the other from y_offset on, those of each for all tokens. Ids, router
  // weights, logits and scales are the same for all steps that take them. y_columns and y_dtype are
  // those of the last. The calls of the steps may be released. In a region the steps wait for each
  // other on the GPU.
  virtual absl::StatusOr<RingPrepared> PrepareChain(const std::vector<RingStep>& steps) = 0;
  // The number is free for another call. No call of it is in flight.
  virtual absl::Status Release(uint32_t number) = 0;

  // Shares memory of a GPU, as Client::ShareMemory, until UnshareMemory or the end of the ring.
  // `descriptor`: of the memory, where the request has no handle (DeviceMemory::Kind::kDescriptor);
  // it stays the caller's.
  virtual absl::Status ShareMemory(const v1::ShareMemoryRequest& request, int descriptor = -1) = 0;
  // NOT_FOUND for what is no region of this ring. Calls in flight go on.
  virtual absl::Status UnshareMemory(absl::string_view region) = 0;

  // Runs a call and waits for its answer. RESOURCE_EXHAUSTED when every slot is in flight;
  // UNAVAILABLE when the server has gone; else as the server says. A caller that stops waiting at
  // its deadline gets DEADLINE_EXCEEDED; its slot and its tensors stay in use until the server
  // answers.
  RingAnswer Run(const RingCall& call);

  // The two halves of Run. A slot that was submitted is awaited exactly once.
  virtual absl::StatusOr<uint32_t> Submit(const RingCall& call) = 0;
  virtual RingAnswer Wait(uint32_t slot) = 0;
  // Whether Wait would return at once.
  virtual bool answered(uint32_t slot) const = 0;

  // The shared memory as it is, for tests.
  virtual ring::Header* header() const = 0;
  virtual ring::Slot* slot(uint32_t index) const = 0;
};

}  // namespace awqd::client
