// Models of the inference protocol: the weight, stack or MLP that a name stands for, and how the
// protocol describes it and the server.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "inference/grpc_service.pb.h"
#include "server/repository/model_store.h"
#include "server/services/env.h"
#include "server/wire/oip/name.h"

namespace awqd::services::oip {

// Finds a model of awqd.v1. INVALID_ARGUMENT about `field` when `name` is no name; NOT_FOUND
// unknown, or another version than `version`, which may be empty; UNAVAILABLE still loading.
absl::StatusOr<std::shared_ptr<const model::Model>> FindModel(const Env& env,
                                                              const std::string& name,
                                                              absl::string_view version,
                                                              absl::string_view field);

// A loaded weight, stack or MLP: its shape, and facts about it.
struct NamedWeight {
  wire::oip::ModelName name;
  int64_t version = 0;
  int64_t k = 0, n = 0;
  bool experts = false;  // requests name them
  std::string format, scheme, devices;
};

// Finds MODEL/WEIGHT. Errors as FindModel; also NOT_FOUND for a weight, a stack or an MLP that the
// model does not have.
absl::StatusOr<NamedWeight> FindNamedWeight(const Env& env, const std::string& name,
                                            absl::string_view version);

// Each fills the answer to its request. Errors as FindNamedWeight; a missing model is not ready.
absl::Status IsModelReady(const Env& env, const inference::ModelReadyRequest& request,
                          inference::ModelReadyResponse* response);
absl::Status DescribeServer(const Env& env, const inference::ServerMetadataRequest& request,
                            inference::ServerMetadataResponse* response);
absl::Status DescribeModel(const Env& env, const inference::ModelMetadataRequest& request,
                           inference::ModelMetadataResponse* response);
absl::Status ConfigureModel(const Env& env, const inference::ModelConfigRequest& request,
                            inference::ModelConfigResponse* response);

}  // namespace awqd::services::oip
