// ServerTest and SharedServerTest: fixtures whose tests start a server each, or share one.
#pragma once

#include <signal.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "awqd/v1/inference.grpc.pb.h"
#include "gtest/gtest.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/http2.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/synthetic_awq.h"
#include "tests/testing/eventually.h"

namespace awqd {

// A repository, which is empty at first, and the server that a test starts on it.
class ServerTest : public ::testing::Test {
 protected:
  std::vector<std::string> Args(std::vector<std::string> more = {}) const {
    more.push_back("--model_repository=" + repository_.path());
    if (std::filesystem::is_empty(repository_.path())) more.push_back("--keep_going");
    return more;
  }
  // Waits until the server serves. Ends the one before.
  void Start(std::vector<std::string> more = {}, const std::string& address = "127.0.0.1:0",
             int log_fd = -1) {
    server_ = std::make_unique<ServerProcess>(Args(std::move(more)), address, log_fd);
    ASSERT_TRUE(server_->WaitServing()) << server_->log();
    port_ = PortOf(server_->address());
    client_ = server_->NewClient();
    stub_ = v1::QuantizedInference::NewStub(server_->NewChannel());
  }
  // Expects that the server ends with exit code 0: after SIGTERM, or by itself.
  ExitReport Stop() {
    server_->Signal(SIGTERM);
    return ExpectGoodEnd();
  }
  ExitReport ExpectGoodEnd() {
    ExitReport report = server_->Wait();
    EXPECT_EQ(report.code, 0) << report.log;
    return report;
  }

  TempFolder repository_;
  std::unique_ptr<ServerProcess> server_;
  int port_ = 0;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<v1::QuantizedInference::Stub> stub_;
};

class SharedServerTest : public ::testing::Test {
 protected:
  // The repository is empty, and each test loads its models.
  static void SetUpTestSuite() {
    repository_ = new TempFolder;
    StartServer();
  }
  // Starts on repository_, which a suite may fill first.
  static void StartServer() {
    server_ = new ServerProcess({"--model_repository=" + repository_->path(), "--keep_going"});
    ASSERT_TRUE(server_->WaitServing()) << server_->log();
  }
  static void TearDownTestSuite() {
    const ExitReport report = server_->Stop();
    EXPECT_EQ(report.code, 0) << report.log;
    delete server_;
    delete repository_;
  }

  inline static TempFolder* repository_ = nullptr;
  inline static ServerProcess* server_ = nullptr;
  const std::unique_ptr<client::Client> client_ = server_->NewClient();
};

}  // namespace awqd
