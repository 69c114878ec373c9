// Identities: the callers that a file names, with their roles, and a token or certificate of each.
//
// A line has a name, roles, and the SHA-256 of a token or a name in a client certificate:
//
//   # comments and empty lines are ignored
//   alice   infer,read   sha256:4b1d...      (64 hexadecimal digits)
//   probe   metrics      cert:dns:probe.example.org
//
// A certificate is known by cert:cn:, the common name of its subject, or by one of its alternative
// names: cert:dns:, cert:uri:, cert:email:, cert:ip:. Names are compared whole; there are no
// wildcards. An identity may have several lines, such as one for an old and one for a new token.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/security/roles.h"

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

struct Identity {
  std::string name;  // at most 64 letters, digits and . _ @ -
  Roles roles;
};
using IdentityPtr = std::shared_ptr<const Identity>;

// Immutable, and therefore thread-safe.
class Identities {
 public:
  // Creates no identities.
  Identities() = default;
  // Parses the file's text. INVALID_ARGUMENT names the wrong line, and never quotes a secret.
  static absl::StatusOr<Identities> Parse(absl::string_view text);

  // Returns null when no identity has this token.
  IdentityPtr FindToken(absl::string_view token) const {
    const auto found = tokens_.find(Sha256(token));
    return found == tokens_.end() ? nullptr : found->second;
  }
  // `name` as in the file: "cn:alice". Returns null when no identity has it.
  IdentityPtr FindCertificate(absl::string_view name) const {
    const auto found = certificates_.find(name);
    return found == certificates_.end() ? nullptr : found->second;
  }
  // Whether any identity is known by a certificate.
  bool has_certificates() const { return !certificates_.empty(); }
  size_t size() const { return tokens_.size() + certificates_.size(); }

 private:
  // The hash of a digest: its first bytes, which are random already.
  struct FirstBytes {
    size_t operator()(const Digest& digest) const;
  };
  struct Compare {
    bool operator()(const Digest& a, const Digest& b) const { return SameSecret(a, b); }
  };

  absl::Status AddLine(absl::string_view line);

  std::unordered_map<Digest, IdentityPtr, FirstBytes, Compare> tokens_;
  std::map<std::string, IdentityPtr, std::less<>> certificates_;
};

}  // namespace awqd::security
