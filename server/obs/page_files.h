// The files of the page that a server shows of itself, which the build puts into the binary.
#pragma once

#include "absl/strings/string_view.h"

namespace awqd::obs {

// "index.html", "page.css", "page.js"; empty for any other name.
absl::string_view PageFile(absl::string_view name);

}  // namespace awqd::obs
