// A terminal's last line, which changes while the log's lines go on above it.
#pragma once

#include <memory>

#include "absl/strings/string_view.h"

namespace spdlog::sinks {
class sink;
}

namespace awqd::obs {

// Whether stderr is a terminal that can erase a line: not a file, a pipe or TERM=dumb.
bool StderrIsTerminal();

// What SetUpLogging gives the log where it is text on a terminal: lines go to stderr, and the last
// line stays beneath them. ShowStatusLine shows its text there from now on.
std::shared_ptr<spdlog::sinks::sink> MakeTerminalSink();

// Back to none; SetUpLogging's.
void ForgetTerminalSink();

// Whether ShowStatusLine shows anything. Thread-safe once logging is set up, as it is too.
bool ShowsStatusLine();

// Replaces the last line by `text`, without control characters, cut to the terminal's width; ""
// takes it away.
void ShowStatusLine(absl::string_view text);

}  // namespace awqd::obs
