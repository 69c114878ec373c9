// ShownWord: what an error may repeat of a file that holds secrets.
#pragma once

#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/obs/logging.h"

namespace awqd::security {

// The word in quotes where it is, as it is written, shorter than any token or digest, which may
// stand in the wrong place; otherwise how long it is.
inline std::string ShownWord(absl::string_view word) {
  constexpr size_t kShown = 16;
  const std::string shown = obs::LogText(word.substr(0, kShown + 1));
  if (shown.size() > kShown) return absl::StrCat("something of ", word.size(), " characters");
  return absl::StrCat("\"", shown, "\"");
}

}  // namespace awqd::security
