// Flags of certificates and tokens.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_join.h"
#include "client/awqctl/commands.h"
#include "client/awqctl/flag_values.h"

namespace awqd::awqctl {
namespace {

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

}  // namespace

void AddSecurityFlags(CLI::App* app, client::Security& security) {
  // Not the names of the server's own files, which the same environment may hold.
  app->add_option("--tls_ca", security.tls_ca,
                  "PEM file of the CAs that may have signed the server's certificate; "
                  "connections to host:port then speak TLS")
      ->envname("AWQD_TLS_CA");
  app->add_option("--tls_cert", security.tls_cert,
                  "PEM file with a certificate of this client, for servers that ask for one")
      ->envname("AWQD_CLIENT_CERT");
  app->add_option("--tls_key", security.tls_key, "PEM file with its key")
      ->envname("AWQD_CLIENT_KEY");
  app->add_option("--token_file", security.token_file, "File with the token that every call shows")
      ->envname("AWQD_TOKEN_FILE");
  app->add_flag("--insecure_token", security.insecure_token,
                "Send the token without TLS beyond this machine, where everybody on the way can "
                "read it");
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
