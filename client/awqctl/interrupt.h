// Interrupt: a command that ends early, with what it has, instead of being ended.
#pragma once

#include <csignal>

namespace awqd::awqctl {

// From construction to destruction the first SIGINT or SIGTERM is noted; the next one does what it
// did before. One at a time in a process.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // Of the signal that came; 0: none.
  int signal_number() const;
};

}  // namespace awqd::awqctl
