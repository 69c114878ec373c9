// TlsFiles: the server's certificate and key, and the CAs of its clients, checked before use.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/security/options.h"

namespace awqd::security {

// The files' contents, in PEM.
struct TlsFiles {
  std::string certificates;  // the server's own comes first
  std::string key;
  std::string client_ca;  // empty: clients need no certificates
  absl::Time expiry;      // of the first of `certificates` that expires
};

// The paths of the files that CheckTls checks, in its order.
std::vector<std::string> TlsPaths(const Options& options);

// Checks the contents of the files TlsPaths. INVALID_ARGUMENT names a file without a certificate or
// key, or a key that does not match the certificate. Accepts an expired certificate, which clients
// will refuse.
absl::StatusOr<TlsFiles> CheckTls(const Options& options, const std::vector<std::string>& contents);

}  // namespace awqd::security
