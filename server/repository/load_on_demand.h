// Waking: loads models that sleep (ModelStore::LetSleep), once for all the calls that wait for one.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/base/mutex.h"
#include "server/model/model_store.h"
#include "server/services/worker.h"

namespace awqd::services {

// Thread-safe.
class Waking {
 public:
  // Both outlive it; `loads` has run everything before it goes.
  Waking(model::ModelStore* models, Worker* loads) : models_(models), loads_(loads) {}

  // Calls `then` once with how the load has ended, on a thread of `loads`; it does not throw.
  // Never blocks. An error, and no call, where `loads` takes no more.
  using Then = std::function<void(const absl::Status& woken)>;
  absl::Status Wake(absl::string_view model, Then then);

 private:
  void Load(const std::string& model);

  model::ModelStore* const models_;
  Worker* const loads_;
  Mutex mu_;
  // Who waits for a load that is under way, or about to be.
  std::map<std::string, std::vector<Then>, std::less<>> waiting_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::services
