// What people type for a flag -> what CLI11 reads as a number. Each rewrites its text; its result
// is the error, or nothing, as CLI11's transformations have it.
#pragma once

#include <string>

namespace awqd {

// "64MiB" -> "67108864". Units k, m, g, with or without b or ib, in either case.
std::string ParseBytes(std::string& text);

// "auto" and "default" -> ThresholdTable's words for them; a count stays as it is.
std::string ParseThreshold(std::string& text);

// "0660" -> "432", that number: permissions in octal, up to 0777.
std::string ParseMode(std::string& text);

}  // namespace awqd
