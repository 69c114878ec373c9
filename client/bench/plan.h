// Plan: the requests of a bench, how they arrive and how long; and the parsers of its flags.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "awqd/v1/inference.pb.h"

namespace awqd::bench {

// One way of loading the server: `concurrency` callers that each wait for their answer (closed
// loop), or `rate` requests a second that come when they are due (open loop). Exactly one is set.
struct LoadPoint {
  int concurrency = 0;
  double rate = 0;
  bool open() const { return rate > 0; }
  // "16 callers" or "2000/s"
  std::string Name() const;
};

struct WeightShare {
  std::string model;
  std::string weight;  // of a weight or a stack of experts; of an MLP what its projections share
  double share = 1;
  // How wide activations and answers are, and of how many experts (0: none); filled from the
  // server.
  int64_t k = 0, n = 0, experts = 0;
  bool mlp = false;
};

struct TokensShare {
  int64_t tokens = 1;
  double share = 1;
};

// The protocol of the requests.
enum class Protocol { kAwqd, kInference };  // awqd.v1; the Open Inference Protocol

struct Plan {
  Protocol protocol = Protocol::kAwqd;
  std::vector<WeightShare> weights;
  std::vector<TokensShare> tokens = {{}};
  int64_t top_k = 2;  // experts of each token, of weights that are stacks
  v1::DType dtype = v1::FP16;
  v1::DType output_dtype = v1::DTYPE_UNSPECIFIED;  // the activations'
  v1::Path path = v1::AUTO;
  int32_t priority = 0;
  // Tensors travel in shared-memory objects with that prefix; empty: in messages. Requests of one
  // weight and number of tokens share an object.
  std::string shared_memory_prefix;
  // Requests go by a ring of the server's --ring_path; empty: by messages. Closed loops alone.
  std::string ring_path;
  bool ring_empty = false;  // the ring's empty call in place of the requests
  // Activations and results are in memory of that GPU, of those that this process may use; without
  // a ring, requests of one weight and number of tokens share it.
  std::optional<int> gpu;

  std::vector<LoadPoint> points;
  bool poisson = true;
  absl::Duration warmup = absl::Seconds(1);
  absl::Duration duration = absl::Seconds(5);  // measured, per point
  int64_t requests = 0;                        // instead of a duration; 0: none
  // The deadline of a request, from when it is due. Goodput counts requests that meet it. Infinite:
  // none.
  absl::Duration deadline = absl::InfiniteDuration();
  int channels = 8;          // connections; callers are dealt out to them in turn
  int max_in_flight = 4096;  // of an open loop; what is due beyond waits, and its wait counts
  bool health = false;       // Check beside the load
  uint64_t seed = 1;
};

// "1,16:3,256" -> {"1", 1}, {"16", 3}, {"256", 1}. A share is a positive number after the last
// colon; a word keeps colons that no number follows. INVALID_ARGUMENT when an entry is empty.
absl::StatusOr<std::vector<std::pair<std::string, double>>> ParseShares(absl::string_view text);

// "1,16:3,256": tokens from 0 on, with shares.
absl::StatusOr<std::vector<TokensShare>> ParseTokens(absl::string_view text);

// "model/path.of.weight" or "model/path.of.weight:3".
absl::StatusOr<WeightShare> ParseWeight(absl::string_view text);

// "1,8,32" or "1..256", which doubles from the first to the last; both may be mixed. Positive.
absl::StatusOr<std::vector<double>> ParseSweep(absl::string_view text);

}  // namespace awqd::bench
