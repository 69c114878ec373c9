// Models of the repository, statistics and settings, as the inference protocol tells of them.
#pragma once

#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/support/byte_buffer.h"
#include "inference/grpc_service.pb.h"
#include "kernels/base/mutex.h"
#include "server/services/env.h"

namespace awqd::services::oip {

// NameList: the answer to RepositoryIndex, which the protocol gives no pages. It is encoded once
// for each state of the repository, and all calls share the bytes. Thread-safe.
class NameList {
 public:
  // Looks at the disk. RESOURCE_EXHAUSTED when the list does not fit in a message.
  absl::StatusOr<grpc::ByteBuffer> Encoded(const Env& env,
                                           const inference::RepositoryIndexRequest& request);

 private:
  struct Kept {
    std::string state;  // what the answer depends on
    std::optional<absl::StatusOr<grpc::ByteBuffer>> answer;
  };
  Mutex mu_;
  Kept all_ ABSL_GUARDED_BY(mu_), ready_ ABSL_GUARDED_BY(mu_);
};

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
