// What fuzz targets share: promises whose breach ends them.
#pragma once

#include <cstdlib>

#include "absl/strings/string_view.h"

namespace awqd::fuzz {

// A promise that did not hold.
inline void Require(bool holds) {
  if (!holds) std::abort();
}

// Nothing in it ends a line or moves a terminal's cursor: no control characters, C1's in UTF-8 and
// the separators of lines and paragraphs among them.
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
