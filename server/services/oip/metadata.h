// What the inference protocol tells of the server and of its models.
#pragma once

#include "absl/status/status.h"
#include "inference/grpc_service.pb.h"
#include "server/services/env.h"

namespace awqd::services::oip {

// Each fills the answer to its request. Errors as FindNamed has them, but that a model that is not
// there is not ready.
absl::Status IsModelReady(const Env& env, const inference::ModelReadyRequest& request,
                          inference::ModelReadyResponse* response);
absl::Status DescribeServer(const Env& env, const inference::ServerMetadataRequest& request,
                            inference::ServerMetadataResponse* response);
absl::Status DescribeModel(const Env& env, const inference::ModelMetadataRequest& request,
                           inference::ModelMetadataResponse* response);

absl::Status ConfigureModel(const Env& env, const inference::ModelConfigRequest& request,
                            inference::ModelConfigResponse* response);

}  // namespace awqd::services::oip
