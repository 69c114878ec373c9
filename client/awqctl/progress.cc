// The progress line, and a signal handler that notes its signal and puts the old handler back.
#include "client/awqctl/progress.h"

#include <signal.h>

#include <atomic>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kernels/base/text.h"

namespace awqd::awqctl {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM};

std::atomic<int> noted{0};
static_assert(std::atomic<int>::is_always_lock_free);
// The handlers from before ours; written while none of ours is set.
struct sigaction before[2];

void PutBack() {
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &before[i], nullptr);
}

void Note(int signal_number) {
  noted = signal_number;
  PutBack();
}

}  // namespace

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
                                  FormatBytes(done_bytes), FormatBytes(total_bytes),
                                  FormatBytes(static_cast<int64_t>(rate)))
               << std::flush;
}

Interrupt::Interrupt() {
  noted = 0;
  struct sigaction action = {};
  action.sa_handler = Note;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], nullptr, &before[i]);
  for (int i = 0; i < 2; ++i) {
    if (before[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

Interrupt::~Interrupt() { PutBack(); }

int Interrupt::signal_number() const { return noted; }

}  // namespace awqd::awqctl
