// Helpers of fuzz targets: a broken promise ends the process.
#pragma once

#include <cstdlib>

#include "absl/strings/string_view.h"

namespace awqd::fuzz {

// Ends the process unless `holds`.
inline void Require(bool holds) {
  if (!holds) std::abort();
}

// Requires that the text has no control characters, including C1 in UTF-8, and no separators of
// lines and paragraphs.
inline void RequireOneLine(absl::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = [&](size_t at) {
      return i + at < text.size() ? static_cast<unsigned char>(text[i + at]) : 0u;
    };
    Require(byte(0) >= 0x20 && byte(0) != 0x7f);
    Require(byte(0) != 0xc2 || byte(1) >= 0xa0 || byte(1) < 0x80);
    Require(byte(0) != 0xe2 || byte(1) != 0x80 || (byte(2) != 0xa8 && byte(2) != 0xa9));
  }
}

}  // namespace awqd::fuzz
