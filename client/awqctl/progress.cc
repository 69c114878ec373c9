// The progress line.
#include "client/awqctl/progress.h"

#include <string>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace awqd::awqctl {

Progress::Progress(Console& console, bool wanted)
    : console_(console), shown_(wanted && console.terminal), start_(absl::Now()) {}

Progress::~Progress() {
  if (shown_) console_.err << kClearLine << std::flush;
}

void Progress::Update(int64_t done_bytes, int64_t total_bytes) {
  constexpr int kWidth = 30;
  const absl::Time now = absl::Now();
  if (!shown_ || total_bytes <= 0 || now < next_) return;
  next_ = now + absl::Milliseconds(100);
  const double fraction = static_cast<double>(done_bytes) / static_cast<double>(total_bytes);
  const int filled = static_cast<int>(fraction * kWidth);
  const double seconds = absl::ToDoubleSeconds(now - start_);
  const double rate = seconds > 0 ? static_cast<double>(done_bytes) / seconds : 0;
  console_.err << kClearLine
               << absl::StrFormat("[%s%s] %3.0f %%  %s of %s  %s/s", std::string(filled, '='),
                                  std::string(kWidth - filled, ' '), fraction * 100,
                                  Bytes(done_bytes), Bytes(total_bytes),
                                  Bytes(static_cast<int64_t>(rate)))
               << std::flush;
}

}  // namespace awqd::awqctl
