// SHA-256 of tokens, and comparing secrets.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace awqd::security {

using Digest = std::array<uint8_t, 32>;

// Thread-safe.
Digest Sha256(absl::string_view text);

// In a time that does not depend on what they hold.
bool SameSecret(const Digest& a, const Digest& b);

// 64 digits, in either case; nothing for any other text.
std::optional<Digest> DigestFromHex(absl::string_view hex);

}  // namespace awqd::security
