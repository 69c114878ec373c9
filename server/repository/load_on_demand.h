// LoadOnDemand: loads models that were unloaded while idle, once for all calls that wait for one.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/base/mutex.h"

namespace awqd::repository {

// Thread-safe.
class LoadOnDemand {
 public:
  // Loads one model (ModelStore::LoadOnDemand) and blocks until it has; does not throw.
  using Load = std::function<absl::Status(const std::string& model)>;
  // Runs a job on another thread. Never blocks; an error where the queue takes no more.
  using Queue = std::function<absl::Status(std::function<void()> job)>;
  // Whatever both use outlives this; the queue has run every job before this goes.
  LoadOnDemand(Load load, Queue queue) : load_(std::move(load)), queue_(std::move(queue)) {}

  // Calls `then` once with the end of the load, on a thread of the queue; `then` does not throw.
  // Never blocks. An error, and no call, where the queue takes no more.
  using Then = std::function<void(const absl::Status& loaded)>;
  absl::Status Request(absl::string_view model, Then then);

 private:
  void RunLoad(const std::string& model);

  const Load load_;
  const Queue queue_;
  Mutex mu_;
  // The calls that wait for a load that is under way, or about to be.
  std::map<std::string, std::vector<Then>, std::less<>> waiting_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::repository
