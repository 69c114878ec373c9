// Certificates and tokens that are renewed under load: no call fails.
#include <atomic>
#include <chrono>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "awqd/v1/server_info.grpc.pb.h"
#include "gmock/gmock.h"
#include "tests/e2e/security/security_fixture.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

grpc::Status Info(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  v1::GetServerInfoResponse response;
  return v1::ServerInfo::NewStub(channel)->GetServerInfo(&context, {}, &response);
}

bool Eventually(const std::function<bool()>& condition) {
  for (const absl::Time until = absl::Now() + absl::Seconds(20); absl::Now() < until;) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(20));
  }
  return false;
}

// Callers that never stop: some on one connection, some on a new one for each call.
class Callers {
 public:
  Callers(std::string address, Caller caller) : address_(std::move(address)), caller_(caller) {
    for (const bool reconnects : {false, false, true, true}) {
      threads_.emplace_back([this, reconnects] { Run(reconnects); });
    }
  }
  ~Callers() { Stop(); }
  void Stop() {
    stop_ = true;
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }
  // Used from the next call on.
  void Use(int token) { token_ = token; }
  // Waits for `count` more calls of every thread.
  void WaitForCalls(int count) {
    const int64_t goal = calls_ + 4 * count;
    EXPECT_TRUE(Eventually([&] { return calls_ >= goal || failed_ > 0; }));
  }
  int64_t calls() const { return calls_; }
  int64_t failed() const { return failed_; }

 private:
  std::shared_ptr<grpc::Channel> NewChannel(int token) const {
    Caller caller = caller_;
    if (token > 0) caller.token = absl::StrCat("token-", token);
    return Connect(address_, caller);
  }
  void Run(bool reconnects) {
    std::shared_ptr<grpc::Channel> channel;
    for (int used = -1; !stop_;) {
      const int token = token_;
      if (reconnects || token != used) channel = NewChannel(token);
      used = token;
      const grpc::Status status = Info(channel);
      ++calls_;
      if (status.ok()) continue;
      ++failed_;
      ADD_FAILURE() << status.error_code() << ": " << status.error_message();
      return;
    }
  }

  const std::string address_;
  const Caller caller_;
  std::atomic<bool> stop_{false};
  std::atomic<int> token_{0};
  std::atomic<int64_t> calls_{0}, failed_{0};
  std::vector<std::thread> threads_;
};

class RotationTest : public SecurityTest {};

TEST_F(RotationTest, ServerCertificate) {
  const auto server = Start(TlsArgs({}), true);
  const CertificateAuthority next_ca("the next ca");
  WriteFile(folder_ / "next.pem", next_ca.certificate());
  WriteFile(folder_ / "both.pem", absl::StrCat(ca_.certificate(), next_ca.certificate()));
  Callers callers(server->address(), {.name = "both", .tls_ca = folder_ / "both.pem"});
  const Caller old = {.name = "old", .tls_ca = ca_path_};
  const Caller next = {.name = "next", .tls_ca = folder_ / "next.pem"};
  const auto accepted = [&](const Caller& caller) {
    return Info(Connect(server->address(), caller)).ok();
  };
  EXPECT_TRUE(accepted(old));
  EXPECT_FALSE(accepted(next));
  const CertificateSubject subject = {.common_name = "server", .alternative_names = "IP:127.0.0.1"};
  for (int round = 0; round < 2; ++round) {
    const CertifiedKey fresh = (round == 0 ? next_ca : ca_).Issue(subject);
    WriteFile(key_path_, fresh.key);
    callers.WaitForCalls(20);  // meanwhile key and certificate do not match
    WriteFile(cert_path_, fresh.certificate);
    EXPECT_TRUE(Eventually([&] { return accepted(round == 0 ? next : old); })) << server->log();
    EXPECT_FALSE(accepted(round == 0 ? old : next));
  }
  // Invalid files change nothing, and are logged.
  WriteFile(cert_path_, "hello");
  EXPECT_TRUE(Eventually([&] {
    return absl::StrContains(server->log(), absl::StrCat("--tls_cert: got \\\"", cert_path_));
  })) << server->log();
  callers.WaitForCalls(20);
  EXPECT_TRUE(accepted(old));
  callers.Stop();
  EXPECT_EQ(callers.failed(), 0) << "of " << callers.calls();
  EXPECT_EQ(server->Stop().code, 0);
}

TEST_F(RotationTest, SighupReloadsAndSaysSo) {
  WriteFile(tokens_path_, TokenLine("ian", "infer,read", "t"));
  const auto server = Start(TlsArgs({"--tokens=" + tokens_path_}), true);
  server->Signal(SIGHUP);
  for (const std::string& files : {absl::StrCat("\"", cert_path_, ", ", key_path_), tokens_path_}) {
    const std::string line = absl::StrCat("reloaded files on SIGHUP files=", files);
    EXPECT_TRUE(Eventually([&] { return absl::StrContains(server->log(), line); }))
        << server->log();
  }
  EXPECT_EQ(server->Stop().code, 0);
}

TEST_F(RotationTest, CaOfClients) {
  const CertificateAuthority next_ca("the next ca of clients");
  const Caller old = Certified("old", client_ca_.Issue({.common_name = "old"}));
  const Caller next = Certified("next", next_ca.Issue({.common_name = "next"}));
  ServerProcess server(TlsArgs({"--tls_client_ca=" + client_ca_path_}));
  server.set_security({.tls_ca = ca_path_, .tls_cert = old.tls_cert, .tls_key = old.tls_key});
  ASSERT_TRUE(server.WaitServing()) << server.log();
  const auto accepted = [&](const Caller& caller) {
    return Info(Connect(server.address(), caller)).ok();
  };
  EXPECT_TRUE(accepted(old));
  EXPECT_FALSE(accepted(next));
  Callers callers(server.address(), old);
  WriteFile(client_ca_path_, absl::StrCat(client_ca_.certificate(), next_ca.certificate()));
  EXPECT_TRUE(Eventually([&] { return accepted(next); })) << server.log();
  callers.WaitForCalls(20);
  callers.Stop();
  EXPECT_EQ(callers.failed(), 0) << "of " << callers.calls();
  WriteFile(client_ca_path_, next_ca.certificate());
  EXPECT_TRUE(Eventually([&] { return !accepted(old); })) << server.log();
  EXPECT_TRUE(accepted(next));
}

TEST_F(RotationTest, Tokens) {
  const auto line = [](int token) {
    return TokenLine("ian", "read", absl::StrCat("token-", token));
  };
  WriteFile(tokens_path_, line(0));
  const auto server = Start(Args({"--tokens=" + tokens_path_}), false);
  const auto code = [&](int token) {
    return Info(Connect(server->address(), {.name = "", .token = absl::StrCat("token-", token)}))
        .error_code();
  };
  WriteFile(tokens_path_, line(0) + line(1));
  ASSERT_TRUE(Eventually([&] { return code(1) == grpc::StatusCode::OK; }));
  Callers callers(server->address(), {.name = "", .token = "token-0"});
  for (int token = 1; token < 4; ++token) {
    callers.WaitForCalls(20);
    callers.Use(token);
    callers.WaitForCalls(2);  // with the new one
    WriteFile(tokens_path_, line(token) + line(token + 1));
    EXPECT_TRUE(Eventually([&] { return code(token + 1) == grpc::StatusCode::OK; }));
    EXPECT_EQ(code(token - 1), grpc::StatusCode::UNAUTHENTICATED);
  }
  WriteFile(tokens_path_, "nonsense");
  EXPECT_TRUE(Eventually(
      [&] { return absl::StrContains(server->log(), "kept the previous contents of files"); }));
  callers.WaitForCalls(20);
  callers.Stop();
  EXPECT_EQ(callers.failed(), 0) << "of " << callers.calls();
  EXPECT_THAT(server->log(), HasSubstr("line 1: got 1 words"));
  EXPECT_EQ(server->Stop().code, 0);
}

}  // namespace
}  // namespace awqd
