// Fuzzes the files of --tokens, --tls_cert, --tls_key and --tls_client_ca: their contents are found
// again, and no error quotes a secret.
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/security/identities.h"
#include "server/security/tls_files.h"
#include "tests/fuzz/require.h"

namespace {

using awqd::fuzz::Require;
using awqd::fuzz::RequireOneLine;
namespace security = awqd::security;

// Shorter than any token or digest.
constexpr size_t kSecretBytes = 32;

std::vector<absl::string_view> WordsOf(absl::string_view line) {
  return absl::StrSplit(line, absl::ByAnyChar(" \t\r\n"), absl::SkipEmpty());
}

std::string DigestOf(absl::string_view token) {
  const security::Digest digest = security::Sha256(token);
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

void RequireSecretsKept(absl::string_view text, const absl::Status& status) {
  RequireOneLine(status.message());
  for (const absl::string_view word : WordsOf(text)) {
    Require(word.size() < kSecretBytes || !absl::StrContains(status.message(), word));
  }
}

void CheckIdentities(absl::string_view text) {
  const auto read = security::Identities::Parse(text);
  if (!read.ok()) {
    Require(absl::IsInvalidArgument(read.status()));
    Require(absl::StartsWith(read.status().message(), "line "));
    RequireSecretsKept(text, read.status());
    return;
  }
  const std::string lower = absl::AsciiStrToLower(text);
  size_t lines = 0;
  for (const absl::string_view raw : absl::StrSplit(text, '\n')) {
    const absl::string_view line = absl::StripAsciiWhitespace(raw);
    if (line.empty() || line.front() == '#') continue;
    ++lines;
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    Require(words.size() == 3);
    if (absl::StartsWith(words[2], "cert:")) {
      const security::IdentityPtr found = read->FindCertificate(words[2].substr(5));
      Require(found != nullptr && found->name == words[0] && found->roles != security::Roles());
    }
  }
  Require(read->size() == lines);
  // Only the token of a digest in the file gives access.
  for (const absl::string_view word : WordsOf(text)) {
    if (read->FindToken(word) == nullptr) continue;
    Require(absl::StrContains(lower, DigestOf(word)));
  }
}

void CheckPem(const std::string& text) {
  const security::Options options = {
      .tls_cert = "cert.pem", .tls_key = "key.pem", .tls_client_ca = "ca.pem"};
  const auto files = security::CheckTls(options, {text, text, text});
  if (files.ok()) {
    Require(files->certificates == text && files->key == text && files->client_ca == text);
  } else {
    Require(absl::IsInvalidArgument(files.status()));
    RequireSecretsKept(text, files.status());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  CheckIdentities(text);
  CheckPem(text);
  return 0;
}
