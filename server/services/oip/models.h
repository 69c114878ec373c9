// Models of the inference protocol: the weight, stack or MLP that a name stands for, and what the
// protocol tells of models: metadata, configuration, index, loads and statistics.
#pragma once

#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/byte_buffer.h"
#include "inference/grpc_service.pb.h"
#include "kernels/base/mutex.h"
#include "server/services/env.h"

namespace awqd::services::oip {

inline constexpr char kPlatform[] = "awqd";

inline std::string MethodPath(absl::string_view method) {
  return absl::StrCat("inference.GRPCInferenceService/", method);
}

// Finds a model of awqd.v1. INVALID_ARGUMENT about `field` when `name` is no name; NOT_FOUND
// unknown, or another version than `version`, which may be empty; UNAVAILABLE still loading.
absl::StatusOr<ModelPtr> FindModel(const Env& env, const std::string& name,
                                   absl::string_view version, absl::string_view field);

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

// Puts the methods that tell of models, and load them, on the loop. Their errors: INVALID_ARGUMENT
// for a name that is none, a parameter or another repository; NOT_FOUND for a model, a weight, a
// stack or an MLP that is not there, or another version; those of LoadModel and UnloadModel.
void ServeModels(const Env& env);

}  // namespace awqd::services::oip
