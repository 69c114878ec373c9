// The metadata awqd-weight, "MODEL/WEIGHT": a load balancer that hashes it sends all calls of a
// weight to one server.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "awqd/v1/inference.pb.h"
#include "grpcpp/client_context.h"

namespace awqd::client {

// "" for a name that metadata cannot hold: what is not printable ASCII, or longer than 512 bytes.
std::string WeightKey(absl::string_view model, absl::string_view weight);

// Of a request; "" also for one that names no weight.
template <typename Request>
std::string WeightKeyOf(const Request& request) {
  if constexpr (requires { request.weight().weight(); }) {
    return WeightKey(request.weight().model(), request.weight().weight());
  } else if constexpr (requires { request.mlp().path(); }) {
    return WeightKey(request.mlp().model(), request.mlp().path());
  } else {
    return "";
  }
}

// Adds a key that is not "" to a call that has not begun.
void AddWeightKey(const std::string& key, grpc::ClientContext& context);

}  // namespace awqd::client
