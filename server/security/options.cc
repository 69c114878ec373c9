// Checks options against each other.
#include "server/security/options.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"

namespace awqd::security {

absl::Status ResolveOptions(Options* options, bool local) {
  if (options->tls() && options->tls_key.empty()) {
    return BadValue("--tls_key", "nothing", "the key of --tls_cert");
  }
  if (!options->tls() && !options->tls_key.empty()) {
    return BadValue("--tls_cert", "nothing", "the certificate of --tls_key");
  }
  if (!options->tls_client_ca.empty() && !options->tls()) {
    return BadValue("--tls_client_ca", "no --tls_cert",
                    "--tls_cert and --tls_key, because client certificates need TLS");
  }
  if (options->identities() && !options->tls() && !local && !options->insecure_tokens) {
    return BadValue("--tokens", "an address beyond this machine without --tls_cert",
                    "TLS, or loopback and unix: addresses alone, or --insecure_tokens: without "
                    "TLS, anybody on the network path can read the tokens");
  }
  if (options->model_control == ModelControl::kAdmin && !options->identities()) {
    return BadValue("--model_control", "admin without --tokens",
                    "--tokens, which names the admins, or the value any or none");
  }
  if (options->model_control == ModelControl::kAuto) {
    options->model_control = options->identities() ? ModelControl::kAdmin
                             : local               ? ModelControl::kAny
                                                   : ModelControl::kNone;
  }
  return absl::OkStatus();
}

absl::Status CheckMetrics(const Options& options, bool local) {
  if (local || !options.identities() || options.tls() || options.insecure_tokens) {
    return absl::OkStatus();
  }
  return BadValue("--metrics_address", "an address beyond this machine with --tokens",
                  "a loopback address, or TLS for gRPC, or --insecure_tokens: metrics are plain "
                  "HTTP, and anybody on the network path can read the tokens");
}

std::string ExposureWarning(const Options& options, bool local) {
  if (local) return "";
  std::vector<absl::string_view> missing;
  if (!options.tls()) missing.push_back("encryption (--tls_cert)");
  if (!options.identities() && options.tls_client_ca.empty()) {
    missing.push_back("authentication (--tokens or --tls_client_ca)");
  }
  if (missing.empty()) return "";
  return absl::StrCat("listening beyond this machine without ", absl::StrJoin(missing, " and "));
}

}  // namespace awqd::security
