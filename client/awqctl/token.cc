// awqctl token: makes a token, and the line by which a server knows it.
#include <openssl/evp.h>
#include <openssl/rand.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/awqctl/commands.h"
#include "client/awqctl/flag_values.h"

namespace awqd::awqctl {
namespace {

constexpr size_t kRandomBytes = 32;
// Tells people, and programs that look for secrets where none should be, what it is.
constexpr char kPrefix[] = "awqd_";

// As the server reads them (its README).
constexpr size_t kMaxName = 64;
const std::vector<std::string>& RoleNames() {
  static const std::vector<std::string> names = {"infer", "read", "admin", "metrics"};
  return names;
}

std::string CheckName(const std::string& name) {
  const bool good = name.size() <= kMaxName && std::all_of(name.begin(), name.end(), [](char c) {
                      return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
                             std::string("._@-").find(c) != std::string::npos;
                    });
  return good ? "" : "got '" + name + "', expected at most 64 letters, digits and . _ @ -";
}

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

void AddTokenCommand(CLI::App* app, Flags& flags) {
  CLI::App* sub = app->add_subcommand(
      "token",
      "Make a random token of 256 bits: prints it once on stdout, and on stderr the line for the "
      "server's --tokens file, which holds its SHA-256 alone. Needs no server.\n\n"
      "Example: awqctl token alice --roles infer,read > alice.token 2>> tokens");
  sub->add_option("name", flags.token.name, "Name of the identity, for logs and limits")
      ->required()
      ->check(CLI::Validator(CheckName, "NAME"));
  sub->add_option_function<std::vector<std::string>>(
         "--roles",
         [&flags](const std::vector<std::string>& words) {
           flags.token.roles = absl::StrJoin(words, ",");
         },
         "What it may do: " + absl::StrJoin(RoleNames(), ", "))
      ->required()
      ->delimiter(',')
      ->expected(1)
      ->take_all()
      ->check(CLI::IsMember(RoleNames()))
      ->type_name("ROLE,...");
  sub->callback([&flags] { flags.local_command = Token; });
}

}  // namespace awqd::awqctl
