// Secrets: digests of tokens, their comparison, and quoting text that may be a secret.
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

// Compares in a time that does not depend on the contents.
bool SameSecret(const Digest& a, const Digest& b);

// Parses 64 hexadecimal digits of either case; nullopt for any other text.
std::optional<Digest> DigestFromHex(absl::string_view hex);

// Describes a word of a file of secrets for an error. Quotes words of at most 16 characters, which
// are shorter than any token or digest, and gives the length of others.
std::string QuoteIfShort(absl::string_view word);

}  // namespace awqd::security
