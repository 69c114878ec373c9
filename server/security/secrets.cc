// Computes and compares digests with OpenSSL.
#include "server/security/secrets.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <memory>
#include <new>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/obs/logging.h"

namespace awqd::security {
namespace {

struct FreeContext {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};

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

}  // namespace awqd::security
