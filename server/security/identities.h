// Identities: who may call, as a file says it, and what each is known by.
//
// A line is a name, roles, and a SHA-256 of a token or a name in a client certificate:
//
//   # comments and empty lines mean nothing
//   alice   infer,read   sha256:4b1d...      (64 hexadecimal digits)
//   probe   metrics      cert:dns:probe.example.org
//
// A name of a certificate is cert:cn:, the common name of its subject, or one of its alternative
// names: cert:dns:, cert:uri:, cert:email:, cert:ip:. Each is compared whole; there are no
// wildcards. A name may have several lines, such as an old and a new token.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/security/secrets.h"
#include "server/security/roles.h"

namespace awqd::security {

struct Identity {
  std::string name;  // letters, digits and . _ @ -; at most 64
  Roles roles;
};
using IdentityPtr = std::shared_ptr<const Identity>;

// Immutable, so thread-safe.
class Identities {
 public:
  // Nobody.
  Identities() = default;
  // INVALID_ARGUMENT says which line is wrong, and never repeats what may be a secret.
  static absl::StatusOr<Identities> Parse(absl::string_view text);

  // Null when nobody has this token.
  IdentityPtr FindToken(absl::string_view token) const;
  // `name` as in the file, "cn:alice". Null when nobody has it.
  IdentityPtr FindCertificate(absl::string_view name) const;
  // Whether FindCertificate can find anybody.
  bool has_certificates() const { return !certificates_.empty(); }
  size_t size() const { return tokens_.size() + certificates_.size(); }

 private:
  // Where a digest is sought: it comes from a hash already.
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
