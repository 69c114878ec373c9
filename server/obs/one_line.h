// OneLine: makes any text safe for a log or a terminal.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace awqd::obs {

// Escapes every character that could hide or mislead: control characters (C0 and C1), line and
// paragraph separators, all spaces but U+0020, invisible characters and marks of text direction,
// and bytes that are not UTF-8. Examples: "\n", "\x1b", "\u202e". The result is one line.
std::string OneLine(absl::string_view text);

}  // namespace awqd::obs
