// The access matrix: every method that reflection lists, by every kind of caller, over every kind
// of connection. A method that is not in the table fails here, so a new one needs a line.
#include <map>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/e2e/security/security_fixture.h"
#include "tests/server/services/raw_call.h"

namespace awqd {
namespace {

using services::MethodsByReflection;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kWatch[] = "grpc.health.v1.Health/Watch";
// Their clients end these calls.
const std::set<std::string>& Endless() {
  static const std::set<std::string> endless = {
      kWatch, "xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"};
  return endless;
}
constexpr char kOpen[] = "";  // needs no role

// The role that each method needs.
const std::map<std::string, std::string>& Matrix() {
  static const std::map<std::string, std::string> matrix = {
      {"awqd.v1.QuantizedInference/QuantizedMatmul", "infer"},
      {"awqd.v1.QuantizedInference/QuantizedMatmulStream", "infer"},
      {"awqd.v1.QuantizedInference/GroupedQuantizedMatmul", "infer"},
      {"awqd.v1.QuantizedInference/GatedMlp", "infer"},
      {"awqd.v1.QuantizedInference/Dequantize", "infer"},
      {"awqd.v1.QuantizedInference/DequantizeStream", "infer"},
      {"awqd.v1.QuantizedInference/QuantizeKv", "infer"},
      {"awqd.v1.QuantizedInference/DequantizeKv", "infer"},
      {"awqd.v1.QuantizedInference/ShareMemory", "infer"},
      {"awqd.v1.ModelRepository/ListModels", "read"},
      {"awqd.v1.ModelRepository/GetModel", "read"},
      {"awqd.v1.ModelRepository/LoadModel", "admin"},
      {"awqd.v1.ModelRepository/UnloadModel", "admin"},
      {"awqd.v1.ServerInfo/GetServerInfo", "read"},
      {"grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "read"},
      {"grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "read"},
      {"xds.service.orca.v3.OpenRcaService/StreamCoreMetrics", "read"},
      {"inference.GRPCInferenceService/ServerLive", kOpen},
      {"inference.GRPCInferenceService/ServerReady", kOpen},
      {"inference.GRPCInferenceService/ModelReady", "read"},
      {"inference.GRPCInferenceService/ServerMetadata", "read"},
      {"inference.GRPCInferenceService/ModelMetadata", "read"},
      {"inference.GRPCInferenceService/ModelInfer", "infer"},
      {"inference.GRPCInferenceService/ModelStreamInfer", "infer"},
      {"inference.GRPCInferenceService/ModelConfig", "read"},
      {"inference.GRPCInferenceService/ModelStatistics", "read"},
      {"inference.GRPCInferenceService/RepositoryIndex", "read"},
      {"inference.GRPCInferenceService/RepositoryModelLoad", "admin"},
      {"inference.GRPCInferenceService/RepositoryModelUnload", "admin"},
      {"inference.GRPCInferenceService/SystemSharedMemoryStatus", "infer"},
      {"inference.GRPCInferenceService/SystemSharedMemoryRegister", "infer"},
      {"inference.GRPCInferenceService/SystemSharedMemoryUnregister", "infer"},
      {"inference.GRPCInferenceService/CudaSharedMemoryStatus", "infer"},
      {"inference.GRPCInferenceService/CudaSharedMemoryRegister", "infer"},
      {"inference.GRPCInferenceService/CudaSharedMemoryUnregister", "infer"},
      {"inference.GRPCInferenceService/TraceSetting", "read"},
      {"inference.GRPCInferenceService/LogSettings", "read"},
      {"grpc.health.v1.Health/Check", kOpen},
      {"grpc.health.v1.Health/Watch", kOpen},
  };
  return matrix;
}

// A caller as the server sees it: unknown, or an identity with these roles.
using Standing = std::optional<std::set<std::string>>;
constexpr std::nullopt_t kNobody = std::nullopt;

grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method) {
  if (!Endless().contains(method)) return RawCall(channel, "/" + method, "");
  RawStream stream(channel, "/" + method);
  std::string first;
  if (stream.Write("") && stream.WritesDone() && stream.Read(&first)) stream.Cancel();
  const grpc::Status status = stream.Finish();
  return status.error_code() == grpc::StatusCode::CANCELLED ? grpc::Status::OK : status;
}

class MatrixTest : public SecurityTest {
 protected:
  MatrixTest() {
    WriteFile(
        tokens_path_,
        absl::StrCat(
            TokenLine("ian", "infer", "token-of-ian"), TokenLine("rita", "read", "token-of-rita"),
            TokenLine("ada", "admin", "token-of-ada"), TokenLine("mia", "metrics", "token-of-mia"),
            TokenLine("all", "infer,read,admin", "token-of-all"), "carl infer cert:cn:carl\n",
            "uma read cert:uri:spiffe://x/uma\n", "dora admin cert:dns:dora.example.org\n",
            "ivan read cert:ip:10.1.2.3\nemma read cert:email:emma@example.org\n"));
  }

  // Every method of the server, by reflection.
  static std::set<std::string> Methods(const std::string& address, Caller caller) {
    caller.token = "token-of-rita";
    std::set<std::string> methods = MethodsByReflection(Connect(address, caller));
    std::set<std::string> known;
    for (const auto& [method, role] : Matrix()) known.insert(method);
    EXPECT_EQ(methods, known) << "Matrix() says which role a method asks for";
    return methods;
  }

  static void ExpectOutcome(const std::string& method, const std::string& role,
                            const Standing& standing, const grpc::Status& status) {
    if (role == kOpen || (standing && standing->contains(role))) {
      EXPECT_NE(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method;
      EXPECT_NE(status.error_code(), grpc::StatusCode::PERMISSION_DENIED) << method;
      EXPECT_NE(status.error_code(), grpc::StatusCode::UNAVAILABLE) << method;
      return;
    }
    EXPECT_EQ(status.error_code(),
              standing ? grpc::StatusCode::PERMISSION_DENIED : grpc::StatusCode::UNAUTHENTICATED)
        << method << ": " << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(method));
    EXPECT_THAT(status.error_message(), HasSubstr("role " + role));
    EXPECT_THAT(status.error_message(), Not(HasSubstr("token-of")));
  }

  void Try(const std::string& address, const Caller& caller, const Standing& standing) {
    SCOPED_TRACE(absl::StrCat(caller.name, " at ", address));
    const auto channel = Connect(address, caller);
    for (const std::string& method : methods_) {
      const auto line = Matrix().find(method);
      if (line == Matrix().end()) continue;  // reported by Methods
      ExpectOutcome(method, line->second, standing, Call(channel, method));
    }
    // An unknown method reveals nothing to unknown callers.
    const grpc::Status unknown = RawCall(channel, "/no.Service/Nope", "");
    EXPECT_EQ(unknown.error_code(),
              standing ? grpc::StatusCode::UNIMPLEMENTED : grpc::StatusCode::UNAUTHENTICATED);
  }

  // Callers with a token, or none, over connections like that of `base`.
  void TryTokens(const std::string& address, const Caller& base, const Standing& without) {
    const std::pair<std::string, Standing> tokens[] = {
        {"", without},
        {"token-of-nobody", kNobody},
        {"token-of-ian", {{"infer"}}},
        {"token-of-rita", {{"read"}}},
        {"token-of-ada", {{"admin"}}},
        {"token-of-mia", {{"metrics"}}},
        {"token-of-all", {{"infer", "read", "admin"}}}};
    for (const auto& [token, standing] : tokens) {
      Caller caller = base;
      caller.name = absl::StrCat(base.name, " with \"", token, "\"");
      caller.token = token;
      Try(address, caller, standing);
    }
  }

  // No call reaches the server.
  void TryWithoutConnection(const std::string& address, const Caller& caller) {
    SCOPED_TRACE(caller.name);
    const auto channel = Connect(address, caller);
    for (const std::string& method : methods_) {
      EXPECT_EQ(RawCall(channel, "/" + method, "").error_code(), grpc::StatusCode::UNAVAILABLE)
          << method;
    }
  }

  // A secret in the log would be known to everybody who reads logs.
  static void ExpectNoSecrets(ServerProcess& server) {
    const ExitReport report = server.Stop();
    EXPECT_EQ(report.code, 0) << report.log;
    EXPECT_THAT(report.log, HasSubstr(" stopped")) << "the whole log";
    EXPECT_THAT(report.log, Not(HasSubstr("token-of")));
    EXPECT_THAT(report.log, Not(HasSubstr("Bearer")));
    EXPECT_THAT(report.log, Not(HasSubstr("PRIVATE KEY")));
  }

  std::set<std::string> methods_;
};

TEST_F(MatrixTest, OverLoopbackAndASocket) {
  const std::string socket = "unix:" + (folder_ / "socket");
  const auto server =
      Start(Args({"--tokens=" + tokens_path_, "--log_level=debug", "--channelz", "--orca"}), false,
            "127.0.0.1:0," + socket);
  for (const std::string& address : {server->address(), socket}) {
    methods_ = Methods(address, {});
    TryTokens(address, {.name = "plain"}, kNobody);
  }
  ExpectNoSecrets(*server);
}

TEST_F(MatrixTest, OverTls) {
  const auto server = Start(
      TlsArgs({"--tokens=" + tokens_path_, "--log_level=debug", "--channelz", "--orca"}), true);
  const Caller caller = {.name = "TLS", .tls_ca = ca_path_};
  methods_ = Methods(server->address(), caller);
  TryTokens(server->address(), caller, kNobody);
  TryWithoutConnection(server->address(), {.name = "plain", .token = "token-of-all"});
  TryWithoutConnection(server->address(),
                       {.name = "another CA", .tls_ca = client_ca_path_, .token = "token-of-all"});
  ExpectNoSecrets(*server);
}

TEST_F(MatrixTest, OverMutualTls) {
  const std::string socket = "unix:" + (folder_ / "socket");
  auto server = std::make_unique<ServerProcess>(
      TlsArgs({"--tokens=" + tokens_path_, "--tls_client_ca=" + client_ca_path_,
               "--log_level=debug", "--channelz", "--orca"}),
      "127.0.0.1:0," + socket);
  const Caller carl = Certified("carl", client_ca_.Issue({.common_name = "carl"}));
  server->set_security({.tls_ca = ca_path_, .tls_cert = carl.tls_cert, .tls_key = carl.tls_key});
  ASSERT_TRUE(server->WaitServing()) << server->log();
  const std::string& address = server->address();
  methods_ = Methods(address, carl);
  TryTokens(address, carl, {{"infer"}});
  Try(address,
      Certified("uma", client_ca_.Issue({.common_name = "else",
                                         .alternative_names = "DNS:a.org,URI:spiffe://x/uma"})),
      {{"read"}});
  Try(address,
      Certified("dora", client_ca_.Issue({.common_name = "dora.example.org",
                                          .alternative_names = "DNS:dora.example.org"})),
      {{"admin"}});
  for (const char* name : {"IP:10.1.2.3", "email:emma@example.org"}) {
    Try(address, Certified(name, client_ca_.Issue({.common_name = "x", .alternative_names = name})),
        {{"read"}});
  }
  const Caller stranger = Certified("stranger", client_ca_.Issue({.common_name = "carla"}));
  Try(address, stranger, kNobody);

  Caller nobody[] = {
      Certified("expired", client_ca_.Issue({.common_name = "carl", .valid_until_s = -60})),
      Certified("early", client_ca_.Issue({.common_name = "carl", .valid_from_s = 600})),
      Certified("wrong_ca", ca_.Issue({.common_name = "carl"})),
      {.name = "no certificate", .tls_ca = ca_path_},
      {.name = "plain"}};
  for (Caller& caller : nobody) {
    caller.token = "token-of-all";
    TryWithoutConnection(address, caller);
  }
  // Clients of the socket show no certificate, so they need a token.
  TryTokens(socket, {.name = "plain"}, kNobody);
  ExpectNoSecrets(*server);
}

TEST_F(MatrixTest, ClosedHealthAsksForAnIdentity) {
  const auto open = Start(Args({"--tokens=" + tokens_path_}), false);
  EXPECT_TRUE(Call(Connect(open->address(), {}), kWatch).ok());
  ServerProcess server(Args({"--tokens=" + tokens_path_, "--no_open_health"}));
  ASSERT_TRUE(server.WaitListening()) << server.log();
  for (const char* method : {"grpc.health.v1.Health/Check", kWatch}) {
    EXPECT_EQ(Call(Connect(server.address(), {}), method).error_code(),
              grpc::StatusCode::UNAUTHENTICATED);
    EXPECT_TRUE(
        Call(Connect(server.address(), {.name = "", .token = "token-of-mia"}), method).ok());
  }
}

}  // namespace
}  // namespace awqd
