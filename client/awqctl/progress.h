// Long commands: Progress shows how much is done, Interrupt ends one early.
#pragma once

#include <csignal>
#include <cstdint>

#include "absl/time/time.h"
#include "client/awqctl/console.h"

namespace awqd::awqctl {

// One line on a terminal that shows how much of a command is done. Redrawn at most ten times a
// second.
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

// From construction to destruction the first SIGINT or SIGTERM is noted; the next one does what it
// did before. One at a time in a process.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // The signal that came; 0: none.
  int signal_number() const;
};

}  // namespace awqd::awqctl
