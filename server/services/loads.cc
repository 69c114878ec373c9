// A load and the line about it.
#include "server/services/loads.h"

#include <utility>

#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

// Runs `body` on a model, and says in the log how it ended.
template <typename F>
absl::Status Logged(absl::string_view what, const std::string& name, F body) {
  const absl::Status status = wire::ForClient(CatchExceptions(body));
  obs::LogLimited(status.ok() ? obs::LogLevel::kInfo : obs::LogLevel::kWarning, what,
                  {{"model", obs::LogText(name)},
                   {"status", absl::StatusCodeToString(status.code())},
                   {"error", obs::LogText(status.message(), wire::kMaxErrorBytes)}});
  return status;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const model::Model>> LoadModel(const Env& env,
                                                              const std::string& name) {
  std::shared_ptr<const model::Model> model;
  AWQD_RETURN_IF_ERROR(Logged("load model", name, [&]() -> absl::Status {
    AWQD_ASSIGN_OR_RETURN(model, env.models->Load(name));
    return absl::OkStatus();
  }));
  return model;
}

absl::Status UnloadModel(const Env& env, const std::string& name) {
  return Logged("unload model", name, [&] { return env.models->Unload(name); });
}

absl::Status LoadModelOnDemand(const Env& env, const std::string& name) {
  return Logged("load on use", name, [&] { return env.models->LoadOnDemand(name).status(); });
}

}  // namespace awqd::services
