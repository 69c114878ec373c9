// Wrapped: text broken at spaces. Apart from help.h, so that its users need not include CLI11.
#pragma once

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace awqd::command_line {

// Breaks every line of `text` at spaces into lines of at most `columns`. A continuation is indented
// as its line is, and by `hang` more. A word that is longer stays whole.
std::string Wrapped(absl::string_view text, size_t columns, size_t hang);

}  // namespace awqd::command_line
