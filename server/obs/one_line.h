// OneLine: any text made safe for a log or a terminal.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace awqd::obs {

// `text` with everything escaped that is not seen as what it is: control characters, C1 among them,
// line and paragraph separators, spaces but the plain one, marks that turn the direction of text or
// are invisible, and bytes that are not UTF-8. "\n", "\x1b", "\u202e": always one line, in order.
std::string OneLine(absl::string_view text);

}  // namespace awqd::obs
