// Text to show: escaped for a log, a terminal or a message, cut, and numbers of bytes in units.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace awqd {

// `text` with everything escaped that does not show as it is: control characters, C1 among them,
// line and paragraph separators, spaces but the plain one, marks that turn the direction of text or
// are invisible, and bytes that are not UTF-8. "\n", "\x1b", "\u202e": always one line, in order.
std::string OneLine(absl::string_view text);

// At most `max_bytes` of `text`, between quotation marks, in printable ASCII: whatever is not is
// escaped as in C. "..." stands where it was cut.
std::string Quoted(absl::string_view text, size_t max_bytes = 128);

// The longest prefix of at most `limit` bytes that ends between two UTF-8 characters.
absl::string_view ClipUtf8(absl::string_view text, size_t limit);

// Adds a text to a note for people, behind "; " where it has one. Nothing for an empty text.
void AddNote(absl::string_view text, std::string* note);

// "1.5 GiB"; below 1 KiB "940 B".
std::string FormatBytes(int64_t bytes);

// True for UTF-8 without NUL bytes, overlong forms and surrogates.
bool IsUtf8(absl::string_view text);

}  // namespace awqd
