// ShownWord: what an error may repeat of a file that holds secrets.
#pragma once

#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/obs/logging.h"

namespace awqd::security {

// The word in quotes where it is shorter than any token or digest, which may stand in the wrong
// place; otherwise how long it is.
inline std::string ShownWord(absl::string_view word) {
  constexpr size_t kShown = 16;
  if (word.size() > kShown) return absl::StrCat("something of ", word.size(), " characters");
  return absl::StrCat("\"", obs::LogText(word), "\"");
}

}  // namespace awqd::security
