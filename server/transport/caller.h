// Caller: what a call's context tells of the client, as server/security wants to see it.
#pragma once

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "grpcpp/server_context.h"
#include "server/security/access.h"

namespace awqd::transport {

class Caller final : public security::Credentials {
 public:
  // `context` outlives it.
  explicit Caller(const grpc::ServerContext& context) : context_(context) {}

  void Authorizations(absl::FunctionRef<void(absl::string_view)> each) const override;
  void CertificateNames(absl::FunctionRef<void(absl::string_view)> each) const override;

 private:
  const grpc::ServerContext& context_;
};

// The machine that a peer, as gRPC names it, belongs to: "ipv4:10.0.0.7", of IPv6 the network of 64
// bits, which one client has to itself; "unix" for all that come by a socket file.
std::string MachineOf(absl::string_view peer);

}  // namespace awqd::transport
