// WatchedFiles: reads files again when they change, such as renewed certificates.
//
// It compares contents instead of times. Contents are small, and their changes show in spite of a
// coarse clock or a chain of links, which Kubernetes uses for secrets.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/pause.h"

namespace awqd::security {

// Reads a regular file of at most 1 MiB. INVALID_ARGUMENT has its path and the reason.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path);

class WatchedFiles {
 public:
  using Contents = std::vector<std::string>;  // one for each file, in order
  // Starts to use new contents. On an error the old ones stay in use.
  using Apply = std::function<absl::Status(const Contents&)>;

  // Reads the files and applies their contents, and returns an error of either. Then a thread polls
  // the files every `interval`. It applies new contents that it reads twice in a row, because files
  // that belong together are not written at the same moment. It logs contents that cannot be read
  // or applied once, and keeps the previous ones. It calls `polled`, if there is one, after each
  // poll.
  static absl::StatusOr<std::unique_ptr<WatchedFiles>> Start(
      std::vector<std::string> paths, Apply apply,
      std::chrono::milliseconds interval = std::chrono::milliseconds(500),
      std::function<void()> polled = nullptr);
  ~WatchedFiles();
  // Makes the next poll of every WatchedFiles of the process apply what it reads, changed or not,
  // and log the outcome. Returns how many files are watched.
  static int RequestReload();
  WatchedFiles(const WatchedFiles&) = delete;
  WatchedFiles& operator=(const WatchedFiles&) = delete;

 private:
  WatchedFiles(std::vector<std::string> paths, Apply apply, std::chrono::milliseconds interval)
      : paths_(std::move(paths)), apply_(std::move(apply)), interval_(interval) {}

  void Poll();

  const std::vector<std::string> paths_;
  const Apply apply_;
  const std::chrono::milliseconds interval_;
  absl::StatusOr<Contents> last_;     // read by the last poll
  absl::StatusOr<Contents> handled_;  // applied, or logged as an error
  int requests_ = 0;                  // of reloads, that were seen
  Pause pause_;
  std::thread thread_;
};

}  // namespace awqd::security
