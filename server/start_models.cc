// Chooses, loads and reports models.
#include "server/start_models.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"

namespace awqd {
namespace {

// The longest reason in the log and in the line with which a server exits.
constexpr size_t kMaxReasonBytes = 1024;

void LogFailure(absl::string_view what, const std::string& name, const absl::Status& status) {
  obs::LogEvent(obs::LogLevel::kWarning, what,
                {{"model", name},
                 {"status", absl::StatusCodeToString(status.code())},
                 {"error", obs::LogText(status.message(), kMaxReasonBytes)}});
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ModelsToLoad(const Options& options,
                                                      const model::ModelStore& store) {
  const auto found = store.folders().Find();
  if (!found.ok()) return model::Prefixed("--model_repository", found.status());
  for (const std::string& line : store.folders().Warnings()) {
    obs::LogEvent(obs::LogLevel::kWarning, line, {});
  }
  std::vector<std::string> all;
  for (const auto& [name, opened] : *found) {
    all.push_back(name);
    if (!opened.ok()) LogFailure("model cannot be opened", name, opened);
  }
  // Includes models that cannot be opened, so that they fail to load instead of being silently
  // absent.
  if (options.load_models.empty()) return all;
  std::vector<std::string> wanted;
  for (const model::NamedFolder& folder : options.models) wanted.push_back(folder.name);
  for (const std::string& name : options.load_models) {
    const absl::Status status = model::CheckModelName(name);
    if (!status.ok()) return model::Prefixed("--load_model", status);
    if (std::find(wanted.begin(), wanted.end(), name) == wanted.end()) wanted.push_back(name);
  }
  return wanted;
}

absl::Status LoadedAtStart::Error() const {
  if (failed.empty()) return absl::OkStatus();
  if (failed.size() == 1) return failed.front();
  const std::string reasons =
      absl::StrJoin(failed, "; ", [](std::string* out, const absl::Status& status) {
        out->append(obs::LogText(status.message(), kMaxReasonBytes));
      });
  return absl::Status(failed.front().code(),
                      absl::StrCat(failed.size(), " of ", failed.size() + loaded,
                                   " models cannot be loaded: ", reasons));
}

LoadedAtStart LoadAtStart(const std::vector<std::string>& names, const std::atomic<bool>& stopping,
                          model::ModelStore* store) {
  LoadedAtStart out;
  std::vector<std::string> failed;
  for (const std::string& name : names) {
    // A reload needs room for both versions.
    const absl::StatusOr<std::shared_ptr<const model::Model>> model = store->LoadUnlessServed(name);
    if (stopping) return {};
    if (!model.ok()) {
      failed.push_back(name);
      out.failed.push_back(model.status());
      continue;
    }
    ++out.loaded;
    LogLoaded(**model);
  }
  for (size_t i = 0; i < failed.size(); ++i) {
    LogFailure("model cannot be loaded", failed[i], out.failed[i]);
  }
  return out;
}

void LogLoaded(const model::Model& model) {
  obs::LogEvent(obs::LogLevel::kInfo, "loaded",
                {{"model", model.name},
                 {"version", model.version},
                 {"weights", model.weights.size()},
                 {"ignored_tensors", model.ignored_tensors},
                 {"device_bytes", model.device_bytes},
                 {"load_ms", model.load_ms}});
}

void LogNotLoaded(const std::string& name, const absl::Status& status, bool served) {
  LogFailure(served ? "model cannot be loaded anew; the version before is served on"
                    : "model cannot be loaded",
             name, status);
}

}  // namespace awqd
