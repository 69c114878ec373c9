// LineWriter: what is logged, written by a thread of its own, so that nobody else ever waits for
// whoever reads it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"

namespace awqd::obs {

// Thread-safe. Never destroyed: its thread may be within a write that does not return.
class LineWriter {
 public:
  // Spells the line that says how many were lost; called on the writer's thread.
  using LostLine = std::function<std::string(int64_t lost)>;

  // Writes to `fd`. What waits and what is being written has at most `max_bytes`.
  LineWriter(int fd, size_t max_bytes);
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;
  ~LineWriter() = delete;

  // Never blocks. Where there is no room the line is lost; when there is again, one line in its
  // place says how many were.
  void Write(absl::string_view line);
  // The same for what need not be seen: false where there is no room, and nobody is told.
  bool Offer(absl::string_view text);
  // Until everything is written, or `limit` has passed: false.
  bool Flush(absl::Duration limit);

  void set_lost_line(LostLine line);

 private:
  void Run();
  bool Fits(absl::string_view text) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int fd_;
  const size_t max_bytes_;
  Mutex mu_;
  CondVar changed_;
  std::string waiting_ ABSL_GUARDED_BY(mu_);
  size_t writing_ ABSL_GUARDED_BY(mu_) = 0;  // bytes
  int64_t lost_ ABSL_GUARDED_BY(mu_) = 0;    // behind what waits
  LostLine lost_line_ ABSL_GUARDED_BY(mu_);
};

// The process's stderr. Made at the first call.
LineWriter& Stderr();

}  // namespace awqd::obs
