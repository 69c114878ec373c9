// Options of certificates and access. The help texts in server/config/flags.cc explain each option
// and how to choose its value.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace awqd::security {

// The callers that may load and unload models.
enum class ModelControl {
  kAuto,   // kAdmin with identities; without them kAny on local addresses alone, else kNone
  kAny,    // every caller
  kAdmin,  // callers with the role admin
  kNone,   // nobody
};

// Paths are empty for "off".
struct Options {
  std::string tls_cert;       // PEM: the server's certificate and its intermediates
  std::string tls_key;        // PEM
  std::string tls_client_ca;  // PEM; clients must show a certificate signed by one of these
  std::string tokens;         // file of identities, see identities.h
  bool insecure_tokens = false;
  bool open_health = true;
  ModelControl model_control = ModelControl::kAuto;

  bool tls() const { return !tls_cert.empty(); }
  // Whether callers have identities.
  bool identities() const { return !tokens.empty(); }
};

// Checks the options against each other, and replaces kAuto by its meaning. `local`: the server
// listens on loopback and UNIX sockets alone. INVALID_ARGUMENT names the flag.
absl::Status ResolveOptions(Options* options, bool local);

// Checks whether the address of metrics is safe, after ResolveOptions. Metrics never have TLS, so a
// token for them could be read on the way. `local`: the address is on loopback. INVALID_ARGUMENT
// names the flag.
absl::Status CheckMetrics(const Options& options, bool local);

// A one-line warning about a server that other machines can reach without encryption or
// authentication. Empty when there is nothing to warn of.
std::string ExposureWarning(const Options& options, bool local);

}  // namespace awqd::security
