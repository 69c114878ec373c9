// SIGTERM and SIGINT: the first asks for an orderly end, the second ends the process at once.
#pragma once

namespace awqd {

// Installs the handlers. Called before main (see main.cc), so that a signal that comes during
// start-up is not lost; uses libc only. Handlers and a pipe rather than blocked signals: libraries
// start threads before main does, and a blocked mask would not reach those.
void InstallSignalHandlers();

// A file descriptor that becomes readable at the first signal.
int SignalFd();

// 0 until the first signal, then its number.
int SignalReceived();

}  // namespace awqd
