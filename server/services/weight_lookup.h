// Weight lookup: finds the weights that a request names among the loaded ones, or packs those that
// the request carries.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "awqd/v1/inference.pb.h"
#include "server/services/env.h"
#include "server/wire/experts_wire.h"
#include "server/wire/packed_weight.h"

namespace awqd::services {

using WeightPtr = std::shared_ptr<const model::PlacedWeight>;
using StackPtr = wire::StackPtr;

// `status`, but UNAVAILABLE in place of NOT_FOUND while the models asked for at start are loaded:
// the model may still appear.
absl::Status UnavailableWhileStarting(const Env& env, absl::string_view model,
                                      const absl::Status& status);

// Each lookup has:
//   Find  returns the loaded weights. NOT_FOUND unknown model or weight; UNAVAILABLE still
//         loading.
//   Pack  puts inline weights that passed wire::CheckPacked on a device. Takes long.
//   Name  returns the names that the log says, for a request that names loaded weights.

// Views of the request.
struct LogName {
  absl::string_view model, weight;
};

// One weight: `weight` or `packed`.
struct WeightLookup {
  using Weights = WeightPtr;
  template <typename Request>
  static absl::StatusOr<Weights> Find(const Env& env, const Request& request) {
    return FindRef(env, request.weight());
  }
  static absl::StatusOr<Weights> Pack(const Env& env, const v1::PackedWeight& packed);
  template <typename Request>
  static LogName Name(const Request& request) {
    return {request.weight().model(), request.weight().weight()};
  }

  static absl::StatusOr<Weights> FindRef(const Env& env, const v1::WeightRef& ref);
};

// The experts of one projection: `weight` or `packed`.
struct StackLookup : WeightLookup {
  using Weights = StackPtr;
  static absl::StatusOr<Weights> Find(const Env& env,
                                      const v1::GroupedQuantizedMatmulRequest& request);
  static absl::StatusOr<Weights> Pack(const Env& env, const v1::PackedStack& packed);
};

// The three projections of a gated MLP: `mlp` or `packed`.
struct MlpLookup {
  using Weights = wire::MlpStacks;
  static absl::StatusOr<Weights> Find(const Env& env, const v1::GatedMlpRequest& request);
  static absl::StatusOr<Weights> Pack(const Env& env, const v1::PackedGatedMlp& packed);
  static LogName Name(const v1::GatedMlpRequest& request);
};

// A request that needs none.
struct NoWeight {
  struct Weights {};
  template <typename Request>
  static absl::StatusOr<Weights> Find(const Env&, const Request&) {
    return Weights();
  }
  template <typename Request>
  static LogName Name(const Request&) {
    return {};
  }
};

}  // namespace awqd::services
