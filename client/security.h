// How a client makes itself safe and known: what of it the user says.
#pragma once

#include <string>

namespace awqd::client {

// Paths are empty for "none".
struct Security {
  // PEM: the CAs that may have signed the server's certificate. With it, connections to host:port
  // speak TLS, and the host must be one that the certificate names; UNIX sockets stay plain.
  // /etc/ssl/certs/ca-certificates.crt holds those that the system trusts.
  std::string tls_ca;
  // PEM: the client's own certificate and key, for servers that ask for one.
  std::string tls_cert;
  std::string tls_key;
  // A file with the token that every call shows.
  std::string token_file;
  // Sends the token without TLS beyond this machine, where everybody on the way can read it.
  bool insecure_token = false;
};

}  // namespace awqd::client
