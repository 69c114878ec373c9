// LineWriter: writes lines on a thread of its own, so that no other thread waits for a slow reader.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"

namespace awqd::obs {

// Thread-safe. Never destroyed, because its thread may be in a write that does not return.
class LineWriter {
 public:
  // Makes the line that says how many lines were lost. Called on the writer's thread.
  using LostLine = std::function<std::string(int64_t lost)>;

  // Writes to `fd`. Lines that wait or are being written have at most `max_bytes` together.
  LineWriter(int fd, size_t max_bytes);
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;
  ~LineWriter() = delete;

  // Never blocks. A line that finds no room is lost; one line in the place of such lines says how
  // many were lost.
  void Write(absl::string_view line) {
    MutexLock lock(&mu_);
    if (Append(line)) return;
    ++lost_;
    changed_.NotifyAll();
  }
  // Writes text that may be dropped: without room it returns false and counts no loss.
  bool Offer(absl::string_view text) {
    MutexLock lock(&mu_);
    return Append(text);
  }
  // Waits until everything is written. Returns false once `limit` has passed.
  bool Flush(absl::Duration limit);

  void set_lost_line(LostLine line) {
    MutexLock lock(&mu_);
    lost_line_ = std::move(line);
  }

 private:
  void Run();
  // Returns false without room.
  bool Append(absl::string_view text) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int fd_;
  const size_t max_bytes_;
  Mutex mu_;
  CondVar changed_;
  std::string waiting_ ABSL_GUARDED_BY(mu_);
  size_t writing_ ABSL_GUARDED_BY(mu_) = 0;  // bytes
  int64_t lost_ ABSL_GUARDED_BY(mu_) = 0;    // lost after `waiting_`
  LostLine lost_line_ ABSL_GUARDED_BY(mu_);
};

// The writer of the process's stderr, created by the first call.
LineWriter& Stderr();

}  // namespace awqd::obs
