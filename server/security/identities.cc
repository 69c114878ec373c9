// Parses the file of identities.
#include "server/security/identities.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"

namespace awqd::security {
namespace {

constexpr size_t kMaxName = 64;
constexpr absl::string_view kKinds[] = {"cn:", "dns:", "uri:", "email:", "ip:"};

bool MayBeInName(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '@' ||
         c == '-';
}

absl::Status CheckName(absl::string_view name) {
  if (name.size() <= kMaxName && std::all_of(name.begin(), name.end(), MayBeInName)) {
    return absl::OkStatus();
  }
  return BadValue("name", QuoteIfShort(name), "at most 64 letters, digits and . _ @ -");
}

bool IsCertificateName(absl::string_view name) {
  return std::any_of(std::begin(kKinds), std::end(kKinds), [&](absl::string_view kind) {
    return absl::StartsWith(name, kind) && name.size() > kind.size();
  });
}

}  // namespace

size_t Identities::FirstBytes::operator()(const Digest& digest) const {
  size_t out = 0;
  std::memcpy(&out, digest.data(), sizeof(out));
  return out;
}

absl::Status Identities::AddLine(absl::string_view line) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
  if (words.size() != 3) {
    return absl::InvalidArgumentError(absl::StrCat(
        "got ", words.size(), " words, expected 3: a name, roles, and sha256:... or cert:..."));
  }
  AWQD_RETURN_IF_ERROR(CheckName(words[0]));
  AWQD_ASSIGN_OR_RETURN(const Roles roles, ParseRoles(words[1]));
  const auto identity = std::make_shared<const Identity>(Identity{std::string(words[0]), roles});
  bool fresh = false;
  if (absl::string_view known_by = words[2]; absl::ConsumePrefix(&known_by, "sha256:")) {
    const std::optional<Digest> digest = DigestFromHex(known_by);
    if (!digest) {
      return BadValue("sha256", absl::StrCat("something of ", known_by.size(), " characters"),
                      "64 hexadecimal digits, as awqctl token prints them");
    }
    fresh = tokens_.emplace(*digest, identity).second;
  } else if (absl::ConsumePrefix(&known_by, "cert:") && IsCertificateName(known_by)) {
    fresh = certificates_.emplace(std::string(known_by), identity).second;
  } else {
    // The word is not quoted, because it may be a token that was pasted here.
    return BadValue("the third word", "another one",
                    "sha256:DIGEST or cert:cn:NAME, cert:dns:, cert:uri:, cert:email:, cert:ip:");
  }
  if (fresh) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "got a token or certificate that an earlier line has, expected each once");
}

absl::StatusOr<Identities> Identities::Parse(absl::string_view text) {
  Identities out;
  int number = 0;
  for (const absl::string_view raw : absl::StrSplit(text, '\n')) {
    ++number;
    const absl::string_view line = absl::StripAsciiWhitespace(raw);
    if (line.empty() || line[0] == '#') continue;
    if (const absl::Status status = out.AddLine(line); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat("line ", number, ": ", status.message()));
    }
  }
  return out;
}

IdentityPtr Identities::FindToken(absl::string_view token) const {
  const auto found = tokens_.find(Sha256(token));
  return found == tokens_.end() ? nullptr : found->second;
}

IdentityPtr Identities::FindCertificate(absl::string_view name) const {
  const auto found = certificates_.find(name);
  return found == certificates_.end() ? nullptr : found->second;
}

}  // namespace awqd::security
