// Progress: one line on a terminal that shows how much of a long command is done.
#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "client/awqctl/console.h"

namespace awqd::awqctl {

// Redrawn at most ten times a second.
class Progress {
 public:
  // Writes nothing unless the console is a terminal and `wanted`.
  Progress(Console& console, bool wanted);
  // Leaves the line empty.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Update(int64_t done_bytes, int64_t total_bytes);

 private:
  Console& console_;
  const bool shown_;
  const absl::Time start_;
  absl::Time next_ = absl::InfinitePast();
};

}  // namespace awqd::awqctl
