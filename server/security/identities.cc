// Parses the file of identities; computes and compares digests with OpenSSL.
#include "server/security/identities.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"

namespace awqd::security {
namespace {

struct FreeContext {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};

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

Digest Sha256(absl::string_view text) {
  // Fetched once, because fetching takes longer than the digest of a token.
  static const EVP_MD* const algorithm = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  thread_local const std::unique_ptr<EVP_MD_CTX, FreeContext> context(EVP_MD_CTX_new());
  Digest digest = {};
  unsigned int size = 0;
  if (algorithm == nullptr || context == nullptr ||
      EVP_DigestInit_ex(context.get(), algorithm, nullptr) != 1 ||
      EVP_DigestUpdate(context.get(), text.data(), text.size()) != 1 ||
      EVP_DigestFinal_ex(context.get(), digest.data(), &size) != 1) {
    throw std::bad_alloc();  // the only cause of failure
  }
  return digest;
}

bool SameSecret(const Digest& a, const Digest& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::optional<Digest> DigestFromHex(absl::string_view hex) {
  Digest digest = {};
  if (hex.size() != 2 * digest.size() ||
      !std::all_of(hex.begin(), hex.end(), absl::ascii_isxdigit)) {
    return std::nullopt;
  }
  // absl::HexStringToBytes has different signatures in different versions.
  for (size_t i = 0; i < digest.size(); ++i) {
    uint32_t byte = 0;
    if (!absl::SimpleHexAtoi(hex.substr(2 * i, 2), &byte)) return std::nullopt;
    digest[i] = static_cast<uint8_t>(byte);
  }
  return digest;
}

std::string QuoteIfShort(absl::string_view word) {
  constexpr size_t kShown = 16;
  const std::string shown = obs::LogText(word.substr(0, kShown + 1));
  if (shown.size() > kShown) return absl::StrCat("something of ", word.size(), " characters");
  return absl::StrCat("\"", shown, "\"");
}

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
    AWQD_RETURN_IF_ERROR(Prefixed(absl::StrCat("line ", number), out.AddLine(line)));
  }
  return out;
}

}  // namespace awqd::security
