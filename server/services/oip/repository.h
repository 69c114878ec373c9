// Models of the repository, statistics and settings, as the inference protocol tells of them.
#pragma once

#include "absl/status/status.h"
#include "inference/grpc_service.pb.h"
#include "server/services/env.h"

namespace awqd::services::oip {

// Looks at the disk. RESOURCE_EXHAUSTED when the list does not fit in a message.
absl::Status ListNames(const Env& env, const inference::RepositoryIndexRequest& request,
                       inference::RepositoryIndexResponse* response);
// May block for long. Errors as LoadModel and UnloadModel have them, and INVALID_ARGUMENT for a
// parameter or another repository.
absl::Status Load(const Env& env, const inference::RepositoryModelLoadRequest& request,
                  inference::RepositoryModelLoadResponse* response);
absl::Status Unload(const Env& env, const inference::RepositoryModelUnloadRequest& request,
                    inference::RepositoryModelUnloadResponse* response);

absl::Status CountModels(const Env& env, const inference::ModelStatisticsRequest& request,
                         inference::ModelStatisticsResponse* response);
absl::Status TellTracing(const Env& env, const inference::TraceSettingRequest& request,
                         inference::TraceSettingResponse* response);
absl::Status TellLogging(const Env& env, const inference::LogSettingsRequest& request,
                         inference::LogSettingsResponse* response);

}  // namespace awqd::services::oip
