// Progress: lines about a long load, never more often than every two seconds.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace awqd::model {

// Takes one line without a line feed. Called on the loading thread.
using ProgressLog = std::function<void(absl::string_view)>;
// The present; a parameter so that tests need not wait.
using NowFunction = std::function<absl::Time()>;

// Used by one thread. Loads that end within the interval say nothing.
class Progress {
 public:
  static constexpr absl::Duration kInterval = absl::Seconds(2);

  // `log` may be empty.
  Progress(std::string model, int64_t total_bytes, int64_t total_weights, ProgressLog log,
           NowFunction now);

  // One more weight of `bytes` is on the device.
  void Add(int64_t bytes);

  absl::Duration elapsed() const { return now_() - start_; }

 private:
  const std::string model_;
  const int64_t total_bytes_;
  const int64_t total_weights_;
  const ProgressLog log_;
  const NowFunction now_;
  const absl::Time start_;
  absl::Time last_;
  int64_t bytes_ = 0;
  int64_t weights_ = 0;
};

}  // namespace awqd::model
