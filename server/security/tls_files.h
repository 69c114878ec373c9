// TlsFiles: a server's certificate and key, and the CAs of its clients, checked before use.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/security/options.h"

namespace awqd::security {

// PEM, as the files hold it.
struct TlsFiles {
  std::string certificates;  // the server's first
  std::string key;
  std::string client_ca;  // empty: no certificates of clients
};

// The paths of what CheckTls takes, in order.
std::vector<std::string> TlsPaths(const Options& options);

// The contents of TlsPaths. INVALID_ARGUMENT names the file that holds no certificate or no key, or
// says that certificate and key do not belong together. An expired certificate is taken: clients
// will tell.
absl::StatusOr<TlsFiles> CheckTls(const Options& options, const std::vector<std::string>& contents);

}  // namespace awqd::security
