// LoadModel: from one checkpoint to weights on devices; Progress: reports how far that is, as log
// lines, a bar and numbers.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/checkpoint/repository_root.h"
#include "server/model/model.h"
#include "server/model/placement.h"

namespace awqd::model {

// Takes one line without a line feed. Called on a thread of the load, by one at a time.
using ProgressLog = std::function<void(absl::string_view)>;

// The present; a parameter so that tests need not wait.
using NowFunction = std::function<absl::Time()>;

// The receivers of progress. Each may be empty.
struct ProgressSinks {
  ProgressLog log;  // lines
  ProgressLog bar;  // the text of one line that is replaced by the next; "" at the end
  std::atomic<float>* share = nullptr;            // of the bytes, from 0 to 1
  std::atomic<int64_t>* planned_bytes = nullptr;  // what the load will take of all devices
};

// A line at most every two seconds, none for a load that ends before; or, where there is a bar, its
// text at once and then at most every 100 ms, instead of lines. The share after every weight. Used
// by one thread at a time.
class Progress {
 public:
  static constexpr absl::Duration kInterval = absl::Seconds(2);
  static constexpr absl::Duration kBarInterval = absl::Milliseconds(100);

  Progress(std::string model, int64_t total_bytes, int64_t total_weights, ProgressSinks sinks,
           NowFunction now);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();

  // One more weight of `bytes` is on the device.
  void AddWeight(int64_t bytes);

  absl::Duration elapsed() const { return now_() - start_; }

 private:
  // From 0 to 1.
  double LoadedShare() const;
  // "40 of 100 MiB"
  std::string Amount() const;
  double MibPerSecond() const;
  std::string Line() const;
  std::string Bar() const;

  const std::string model_;
  const int64_t total_bytes_;
  const int64_t total_weights_;
  const ProgressSinks sinks_;
  const NowFunction now_;
  const absl::Time start_;
  absl::Time last_;
  int64_t bytes_ = 0;
  int64_t weights_ = 0;
};

// Loads the model in folder `path` beneath `root`. `version` of the result is 0; the store counts
// versions. Fails before anything is allocated for a weight when the load's MemoryPlan does not
// fit. INVALID_ARGUMENT if the size, a time or the inode of a file changed during the load. On an
// error nothing stays allocated on any device. UNAVAILABLE once `cancelled`. Throws std::bad_alloc
// where host memory runs out.
absl::StatusOr<std::shared_ptr<Model>> LoadModel(const RepositoryRoot& root,
                                                 const std::string& path, const std::string& name,
                                                 const LoadTarget& target,
                                                 const std::atomic<bool>& cancelled,
                                                 const ProgressSinks& sinks);

}  // namespace awqd::model
