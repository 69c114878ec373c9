// LoadModel: one checkpoint -> weights on devices, one weight at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/device.h"
#include "server/model/model_folders.h"
#include "server/model/model_store.h"

namespace awqd::model {

struct LoadTarget {
  std::vector<Device*> devices;  // one or more
  bool cut = false;              // each weight's columns among them, instead of whole on each
};

// The present; a parameter so that tests need not wait.
using NowFunction = std::function<absl::Time()>;

// Lines about a long load, never more often than every two seconds. Used by one thread. Loads that
// end within the interval say nothing.
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

// `version` of the result is 0: the store counts. Peak host memory is about three times the
// largest weight's packed size. On an error nothing stays allocated on any device. UNAVAILABLE once
// `cancelled`.
absl::StatusOr<std::shared_ptr<Model>> LoadModel(const ModelFolder& folder, const std::string& name,
                                                 const LoadTarget& target,
                                                 const std::atomic<bool>& cancelled,
                                                 const ProgressLog& log);

}  // namespace awqd::model
