// Sources: what a request names the weights it needs by, and how they are found among the loaded
// ones or made of those that the request carries.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "awqd/v1/inference.pb.h"
#include "server/services/env.h"
#include "server/wire/experts_wire.h"
#include "server/wire/packed_weight.h"

namespace awqd::services {

using WeightPtr = std::shared_ptr<const model::PlacedWeight>;
using StackPtr = wire::StackPtr;

// What an error becomes while the models asked for at start are loaded: what was not loaded yet is
// not missing.
absl::Status MaybeNotYet(const Env& env, absl::string_view model, const absl::Status& status);

// Each source has:
//   Find     the loaded weights. NOT_FOUND unknown model or weight; UNAVAILABLE still loading.
//   Check    of inline weights, cheap enough for a thread of the loop.
//   Pack     puts those that passed on a device. Takes long.
//   Name     what the log says, of a request that names loaded ones.
//   KeepName leaves that in a request that is otherwise forgotten.

struct LogName {
  std::string model, weight;
};

// One weight: `weight` or `packed`.
struct OneWeight {
  using Weights = WeightPtr;
  template <typename Request>
  static absl::StatusOr<Weights> Find(const Env& env, const Request& request) {
    return FindRef(env, request.weight());
  }
  static absl::Status Check(const Env& env, const v1::PackedWeight& packed) {
    return wire::CheckPacked(packed, env.options.max_inline_weight_bytes);
  }
  static absl::StatusOr<Weights> Pack(const Env& env, const v1::PackedWeight& packed);
  template <typename Request>
  static LogName Name(const Request& request) {
    return {request.weight().model(), request.weight().weight()};
  }
  template <typename Request>
  static void KeepName(const Request& from, Request* to) {
    if (from.has_weight()) *to->mutable_weight() = Known(from.weight());
  }

  static absl::StatusOr<Weights> FindRef(const Env& env, const v1::WeightRef& ref);
  // Without the unknown fields that a client may have filled it with.
  static v1::WeightRef Known(const v1::WeightRef& ref);
};

// The experts of one projection: `weight` or `packed`.
struct OneStack : OneWeight {
  using Weights = StackPtr;
  static absl::StatusOr<Weights> Find(const Env& env,
                                      const v1::GroupedQuantizedMatmulRequest& request);
  static absl::Status Check(const Env& env, const v1::PackedStack& packed) {
    return wire::CheckPacked(packed, env.options.max_inline_weight_bytes);
  }
  static absl::StatusOr<Weights> Pack(const Env& env, const v1::PackedStack& packed);
};

// The three projections of a gated MLP: `mlp` or `packed`.
struct MlpProjections {
  using Weights = wire::MlpStacks;
  static absl::StatusOr<Weights> Find(const Env& env, const v1::GatedMlpRequest& request);
  static absl::Status Check(const Env& env, const v1::PackedGatedMlp& packed) {
    return wire::CheckPacked(packed, env.options.max_inline_weight_bytes);
  }
  static absl::StatusOr<Weights> Pack(const Env& env, const v1::PackedGatedMlp& packed);
  static LogName Name(const v1::GatedMlpRequest& request);
  static void KeepName(const v1::GatedMlpRequest& from, v1::GatedMlpRequest* to);
};

}  // namespace awqd::services
