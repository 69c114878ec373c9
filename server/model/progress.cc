// Lines and bars.
#include "server/model/progress.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"

namespace awqd::model {
namespace {

constexpr double kMib = 1 << 20;
constexpr int kBarWidth = 30;

}  // namespace

Progress::Progress(std::string model, int64_t total_bytes, int64_t total_weights,
                   ProgressSinks sinks, NowFunction now)
    : model_(std::move(model)),
      total_bytes_(total_bytes),
      total_weights_(total_weights),
      sinks_(std::move(sinks)),
      now_(std::move(now)),
      start_(now_()),
      last_(start_) {
  if (sinks_.share != nullptr) *sinks_.share = 0;
  if (sinks_.bar) sinks_.bar(Bar());
}

Progress::~Progress() {
  if (sinks_.bar) sinks_.bar("");
}

void Progress::AddWeight(int64_t bytes) {
  bytes_ += bytes;
  ++weights_;
  if (sinks_.share != nullptr) *sinks_.share = static_cast<float>(LoadedShare());
  const absl::Time now = now_();
  if (now - last_ < (sinks_.bar ? kBarInterval : kInterval)) return;
  last_ = now;
  if (sinks_.bar) {
    sinks_.bar(Bar());
  } else if (sinks_.log) {
    sinks_.log(Line());
  }
}

double Progress::LoadedShare() const {
  const auto total = static_cast<double>(std::max<int64_t>(total_bytes_, 1));
  return std::min(static_cast<double>(bytes_) / total, 1.0);
}

std::string Progress::Amount() const {
  return absl::StrFormat("%.0f of %.0f MiB", static_cast<double>(bytes_) / kMib,
                         static_cast<double>(total_bytes_) / kMib);
}

double Progress::MibPerSecond() const {
  const double seconds = absl::ToDoubleSeconds(elapsed());
  return seconds > 0 ? static_cast<double>(bytes_) / kMib / seconds : 0;
}

std::string Progress::Line() const {
  return absl::StrFormat("loading model \"%s\": %d of %d weights, %s (%d %%), %.0f MiB/s", model_,
                         weights_, total_weights_, Amount(), static_cast<int>(LoadedShare() * 100),
                         MibPerSecond());
}

std::string Progress::Bar() const {
  const int filled = static_cast<int>(LoadedShare() * kBarWidth);
  return absl::StrFormat("[%s%s] %3d %%  %s, %.0f MiB/s  %s", std::string(filled, '#'),
                         std::string(kBarWidth - filled, '.'),
                         static_cast<int>(LoadedShare() * 100), Amount(), MibPerSecond(), model_);
}

}  // namespace awqd::model
