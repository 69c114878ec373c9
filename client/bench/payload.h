// Payloads: the requests of a bench, drawn and serialised once and then sent again and again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/awqd_client.h"
#include "client/bench/plan.h"
#include "client/device_memory.h"
#include "client/ring.h"
#include "client/shared_memory.h"
#include "client/tensor.h"
#include "grpcpp/support/byte_buffer.h"

namespace awqd::bench {

// Uniform in [-1, 1). The same numbers on every platform, which the standard library's
// distributions are not.
std::vector<float> UniformValues(int64_t count, uint64_t seed);

// Each token goes to `top_k` different ones of `experts`, by weights that sum to 1.
// INVALID_ARGUMENT when there are not so many.
absl::StatusOr<client::Routing> RandomRouting(int64_t tokens, int64_t top_k, int64_t experts,
                                              uint64_t seed);

// The next place for a tensor in memory that requests share: kernels need no copy of one there.
inline int64_t AlignTensor(int64_t bytes) {
  constexpr int64_t kAlignment = 256;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

struct Payload {
  const char* method = nullptr;  // full name of the method that it is a request of
  Protocol protocol = Protocol::kAwqd;
  std::string weight_key;    // goes with its calls: client/convert.h
  grpc::ByteBuffer request;  // copies share the bytes
  int64_t tokens = 0;
  int64_t request_bytes = 0;  // of the message and, in shared memory, the activations
  client::SharedMemory memory;
  std::unique_ptr<client::DeviceMemory> device_memory;  // of the region that the request names
  std::string region;
  int64_t shared_answer_bytes = 0;
  // For a plan with a ring: prepares the request, with activations and result in `region`, or
  // where that is empty in the payload; and the bytes of its tensors.
  std::function<absl::StatusOr<client::RingPrepared>(client::Ring&, const std::string& region)>
      prepare;
  std::string x, ids, router_weights;
};

// Immutable once made; safe from any thread.
class Payloads {
 public:
  // Every weight, stack and MLP with every number of tokens; activations are uniform in [-1, 1) and
  // follow the plan's seed. INVALID_ARGUMENT when a request would pass 2 GiB.
  static absl::StatusOr<Payloads> Make(const Plan& plan);

  // `uniform` in [0, 1): the payload whose share of the sum it falls into.
  const Payload& Pick(double uniform) const;
  const std::vector<Payload>& all() const { return payloads_; }

 private:
  std::vector<Payload> payloads_;
  std::vector<double> until_;  // sum of shares up to and with this one, the last is 1
};

}  // namespace awqd::bench
