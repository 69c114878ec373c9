// SIGTERM and SIGINT: the first asks for an orderly end, the second ends the process at once.
//
// They are blocked in every thread but one, which waits for them: so no handler interrupts other
// code, and none depends on which thread the kernel picks.
#pragma once

namespace awqd {

// Blocks them, for the calling thread and all that start later. Called before any library is
// initialised (see main.cc), so that a signal that comes during start-up is kept for AwaitSignals
// and threads that libraries start have it blocked too; uses libc only. Also ignores SIGPIPE, and
// SIGXFSZ, so that writes past a limit on file sizes fail instead.
void BlockSignals();

// Starts the thread that waits for them. Once, first in main.
void AwaitSignals();

// A file descriptor that becomes readable at the first signal; only after AwaitSignals.
int SignalFd();

}  // namespace awqd
