// Files and channels of the security tests.
#include "tests/e2e/security/security_fixture.h"

#include <openssl/evp.h>

#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/client_interceptor.h"

namespace awqd {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// Adds a token to every call, for helpers that do not know tokens.
class Authorizer final : public grpc::experimental::Interceptor {
 public:
  explicit Authorizer(std::string value) : value_(std::move(value)) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            grpc::experimental::InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->emplace("authorization", value_);
    }
    methods->Proceed();
  }

 private:
  const std::string value_;
};

class AuthorizerFactory final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit AuthorizerFactory(std::string value) : value_(std::move(value)) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(
      grpc::experimental::ClientRpcInfo*) override {
    return new Authorizer(value_);
  }

 private:
  const std::string value_;
};

}  // namespace

void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream(path + ".new", std::ios::binary) << text;
  std::filesystem::rename(path + ".new", path);
}

std::string TokenLine(const std::string& name, const std::string& roles, const std::string& token) {
  std::string digest(EVP_MAX_MD_SIZE, '\0');
  unsigned int size = 0;
  EVP_Digest(token.data(), token.size(), reinterpret_cast<unsigned char*>(digest.data()), &size,
             EVP_sha256(), nullptr);
  return absl::StrCat(name, " ", roles,
                      " sha256:", absl::BytesToHexString(absl::string_view(digest).substr(0, size)),
                      "\n");
}

std::shared_ptr<grpc::Channel> Connect(const std::string& address, const Caller& caller) {
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (!caller.tls_ca.empty() && !absl::StartsWith(address, "unix:")) {
    grpc::SslCredentialsOptions tls = {.pem_root_certs = ReadFile(caller.tls_ca)};
    if (!caller.tls_cert.empty()) {
      tls.pem_cert_chain = ReadFile(caller.tls_cert);
      tls.pem_private_key = ReadFile(caller.tls_key);
    }
    credentials = grpc::SslCredentials(tls);
  }
  grpc::ChannelArguments args;
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> factories;
  if (!caller.token.empty()) {
    factories.push_back(std::make_unique<AuthorizerFactory>(absl::StrCat("Bearer ", caller.token)));
  }
  return grpc::experimental::CreateCustomChannelWithInterceptors(address, credentials, args,
                                                                 std::move(factories));
}

SecurityTest::SecurityTest() {
  const CertifiedKey server =
      ca_.Issue({.common_name = "server", .alternative_names = "DNS:localhost,IP:127.0.0.1"});
  WriteFile(cert_path_, server.certificate);
  WriteFile(key_path_, server.key);
  WriteFile(ca_path_, ca_.certificate());
  WriteFile(client_ca_path_, client_ca_.certificate());
  std::filesystem::create_directory(folder_ / "models");
}

Caller SecurityTest::Certified(const std::string& name, const CertifiedKey& identity) const {
  const Caller caller = {.name = name,
                         .tls_ca = ca_path_,
                         .tls_cert = folder_ / (name + ".pem"),
                         .tls_key = folder_ / (name + ".key")};
  WriteFile(caller.tls_cert, identity.certificate);
  WriteFile(caller.tls_key, identity.key);
  return caller;
}

std::vector<std::string> SecurityTest::Args(std::vector<std::string> more) const {
  more.push_back(absl::StrCat("--model_repository=", folder_ / "models"));
  more.push_back("--keep_going");
  return more;
}

std::vector<std::string> SecurityTest::TlsArgs(std::vector<std::string> more) const {
  more.push_back(absl::StrCat("--tls_cert=", cert_path_));
  more.push_back(absl::StrCat("--tls_key=", key_path_));
  return Args(std::move(more));
}

std::unique_ptr<ServerProcess> SecurityTest::Start(std::vector<std::string> args, bool tls,
                                                   const std::string& address) const {
  auto server = std::make_unique<ServerProcess>(std::move(args), address);
  if (tls) server->set_security({.tls_ca = ca_path_});
  EXPECT_TRUE(server->WaitServing()) << server->log();
  return server;
}

}  // namespace awqd
