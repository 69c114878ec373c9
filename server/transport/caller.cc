// Reads metadata, the properties of a connection, and peers.
#include "server/transport/caller.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "grpc/grpc_security_constants.h"
#include "grpcpp/security/auth_context.h"

namespace awqd::transport {
namespace {

absl::string_view View(const grpc::string_ref& text) { return {text.data(), text.size()}; }

// gRPC's property, and how Identities spell its names.
constexpr std::pair<const char*, absl::string_view> kNames[] = {
    {GRPC_X509_CN_PROPERTY_NAME, "cn:"},   {GRPC_PEER_DNS_PROPERTY_NAME, "dns:"},
    {GRPC_PEER_URI_PROPERTY_NAME, "uri:"}, {GRPC_PEER_EMAIL_PROPERTY_NAME, "email:"},
    {GRPC_PEER_IP_PROPERTY_NAME, "ip:"},
};

}  // namespace

void Caller::Authorizations(absl::FunctionRef<void(absl::string_view)> each) const {
  const auto [begin, end] = context_.client_metadata().equal_range("authorization");
  for (auto value = begin; value != end; ++value) each(View(value->second));
}

void Caller::CertificateNames(absl::FunctionRef<void(absl::string_view)> each) const {
  const std::shared_ptr<const grpc::AuthContext> context = context_.auth_context();
  if (context == nullptr || !context->IsPeerAuthenticated()) return;
  for (const auto& [property, kind] : kNames) {
    for (const grpc::string_ref& value : context->FindPropertyValues(property)) {
      each(absl::StrCat(kind, View(value)));
    }
  }
}

std::string MachineOf(absl::string_view peer) {
  if (absl::StartsWith(peer, "unix")) return "unix";
  const size_t colon = peer.rfind(':');
  const absl::string_view machine = peer.substr(0, colon);
  absl::string_view text = machine;
  if (!absl::ConsumePrefix(&text, "ipv6:")) return std::string(machine);
  // gRPC escapes the brackets.
  std::string address = absl::StrReplaceAll(text, {{"%5B", ""}, {"%5D", ""}, {"[", ""}, {"]", ""}});
  address.resize(std::min(address.find('%'), address.size()));  // a zone
  in6_addr bytes = {};
  if (inet_pton(AF_INET6, address.c_str(), &bytes) != 1) return std::string(machine);
  if (IN6_IS_ADDR_V4MAPPED(&bytes)) {
    return absl::StrCat("ipv4:", bytes.s6_addr[12], ".", bytes.s6_addr[13], ".", bytes.s6_addr[14],
                        ".", bytes.s6_addr[15]);
  }
  std::memset(bytes.s6_addr + 8, 0, 8);
  char network[INET6_ADDRSTRLEN] = {};
  inet_ntop(AF_INET6, &bytes, network, sizeof(network));
  return absl::StrCat("ipv6:", network, "/64");
}

}  // namespace awqd::transport
