// awqctl token: makes a token, and the line by which a server knows it.
#include <openssl/evp.h>
#include <openssl/rand.h>

#include <algorithm>
#include <array>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/awqctl/commands.h"

namespace awqd::awqctl {
namespace {

constexpr size_t kRandomBytes = 32;
// Tells people, and programs that look for secrets where none should be, what it is.
constexpr char kPrefix[] = "awqd_";

std::string Hex(const unsigned char* bytes, size_t size) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(bytes), size});
}

}  // namespace

int Token(const Flags& flags, Console& console) {
  std::array<unsigned char, kRandomBytes> random = {};
  if (RAND_bytes(random.data(), static_cast<int>(random.size())) != 1) {
    return FileFailed(absl::UnavailableError("no random numbers from the system"), console);
  }
  const std::string token = absl::StrCat(kPrefix, Hex(random.data(), random.size()));
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest = {};
  unsigned int size = 0;
  if (EVP_Digest(token.data(), token.size(), digest.data(), &size, EVP_sha256(), nullptr) != 1) {
    return FileFailed(absl::UnavailableError("OpenSSL has no SHA-256"), console);
  }
  const std::string line =
      absl::StrCat(flags.token.name, " ", flags.token.roles, " sha256:", Hex(digest.data(), size));
  if (flags.json) {
    console.out << "{\"token\": \"" << token << "\", \"line\": \"" << line << "\"}\n";
    return kOk;
  }
  console.out << token << "\n";
  // Comments, so that all of it may be appended to the server's file.
  console.err << "# The token of " << flags.token.name
              << " was shown once; its user keeps it in a file (--token_file).\n"
              << line << "\n";
  return kOk;
}

}  // namespace awqd::awqctl
