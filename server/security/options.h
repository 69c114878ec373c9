// What makes a server safe: certificates, who may call what. server/security_flags.cc explains each
// and how to choose it.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace awqd::security {

// Who may load and unload models.
enum class ModelControl {
  kAuto,   // kAdmin with identities; without, kAny for a server of this machine, else kNone
  kAny,    // whoever may call at all
  kAdmin,  // the role admin
  kNone,   // nobody
};

// Paths are empty for "off".
struct Options {
  std::string tls_cert;       // PEM: the server's certificate and those between it and its CA
  std::string tls_key;        // PEM
  std::string tls_client_ca;  // PEM; clients must then show a certificate that one of these signed
  std::string tokens;         // names, roles, and what each is known by: identities.h
  bool insecure_tokens = false;
  bool open_health = true;
  ModelControl model_control = ModelControl::kAuto;

  bool tls() const { return !tls_cert.empty(); }
  // Whether callers have names and roles.
  bool identities() const { return !tokens.empty(); }
};

// Checks what depends on several options, and settles kAuto. `local`: the server listens on
// loopback and UNIX sockets alone. INVALID_ARGUMENT names the flag.
absl::Status Settle(Options* options, bool local);

// Whether metrics may be served where they are, once Settle has returned OK. They never have TLS,
// so that a token for them can be read on the way. `local`: on loopback. INVALID_ARGUMENT names the
// flag.
absl::Status CheckMetrics(const Options& options, bool local);

// What an operator should know of a server that listens beyond this machine, in one line; empty
// when there is nothing to say.
std::string Exposure(const Options& options, bool local);

}  // namespace awqd::security
