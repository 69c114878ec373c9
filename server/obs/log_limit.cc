// A count for each key, begun anew when its window is over.
#include "server/obs/log_limit.h"

#include <utility>

namespace awqd::obs {

LogLimit::LogLimit(int64_t lines, absl::Duration window, size_t keys)
    : lines_(lines), window_(window), keys_(keys) {}

LogLimit::Verdict LogLimit::Ask(absl::string_view key, absl::Time now) {
  MutexLock lock(&mu_);
  auto it = windows_.find(key);
  if (it == windows_.end() && windows_.size() >= keys_) Forget(now);
  if (it == windows_.end()) {
    const bool full = windows_.size() >= keys_;
    it = windows_.try_emplace(full ? std::string() : std::string(key), Window{now}).first;
  }
  Window& window = it->second;
  if (now - window.begin >= window_ || now < window.begin) {
    window.begin = now;
    window.lines = 0;
  }
  if (window.lines == lines_) {
    ++window.left_out;
    return {};
  }
  ++window.lines;
  return {true, std::exchange(window.left_out, 0)};
}

void LogLimit::Forget(absl::Time now) {
  for (auto it = windows_.begin(); it != windows_.end();) {
    const bool over = now - it->second.begin >= window_ && it->second.left_out == 0;
    it = over ? windows_.erase(it) : std::next(it);
  }
}

}  // namespace awqd::obs
