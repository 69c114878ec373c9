// WatchedFiles: files that are read again when they change, such as certificates that are renewed.
//
// Contents are compared, not times: they are small, and neither the granularity of a clock nor a
// chain of links (as Kubernetes mounts secrets) can hide a change.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "kernels/base/mutex.h"

namespace awqd::security {

// Reads a regular file. INVALID_ARGUMENT names it and says why not; 1 MiB at most.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path);

class WatchedFiles {
 public:
  using Contents = std::vector<std::string>;  // of the files, in order
  // Takes new contents over, or says why not and leaves what was.
  using Apply = std::function<absl::Status(const Contents&)>;

  // Reads the files and applies them; fails as that does. From then on a thread looks every
  // `interval`. It takes over what it finds the same twice in a row, because files that belong
  // together are not written at the same time. What cannot be read or applied is reported once in
  // the log, and what was before stays.
  static absl::StatusOr<std::unique_ptr<WatchedFiles>> Start(
      std::vector<std::string> paths, Apply apply,
      std::chrono::milliseconds interval = std::chrono::milliseconds(500));
  ~WatchedFiles();
  WatchedFiles(const WatchedFiles&) = delete;
  WatchedFiles& operator=(const WatchedFiles&) = delete;

 private:
  WatchedFiles(std::vector<std::string> paths, Apply apply, std::chrono::milliseconds interval)
      : paths_(std::move(paths)), apply_(std::move(apply)), interval_(interval) {}

  void Watch();
  // One look.
  void Look();

  const std::vector<std::string> paths_;
  const Apply apply_;
  const std::chrono::milliseconds interval_;
  absl::StatusOr<Contents> last_;     // as it was seen at the last look
  absl::StatusOr<Contents> settled_;  // as it was applied or reported
  Mutex mu_;
  CondVar wake_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace awqd::security
