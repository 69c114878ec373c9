// Formatting and pacing of progress lines.
#include "server/model/progress.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"

namespace awqd::model {

Progress::Progress(std::string model, int64_t total_bytes, int64_t total_weights, ProgressLog log,
                   NowFunction now)
    : model_(std::move(model)),
      total_bytes_(total_bytes),
      total_weights_(total_weights),
      log_(std::move(log)),
      now_(std::move(now)),
      start_(now_()),
      last_(start_) {}

void Progress::Add(int64_t bytes) {
  bytes_ += bytes;
  ++weights_;
  const absl::Time now = now_();
  if (!log_ || now - last_ < kInterval) return;
  last_ = now;
  const double seconds = absl::ToDoubleSeconds(now - start_);
  const double mib = static_cast<double>(bytes_) / (1 << 20);
  log_(absl::StrFormat(
      "loading model \"%s\": %d of %d weights, %.0f of %.0f MiB (%d %%), %.0f MiB/s", model_,
      weights_, total_weights_, mib, static_cast<double>(total_bytes_) / (1 << 20),
      bytes_ * 100 / std::max<int64_t>(total_bytes_, 1), mib / seconds));
}

}  // namespace awqd::model
