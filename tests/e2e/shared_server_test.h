// SharedServerTest: a fixture whose tests share one server.
#pragma once

#include <memory>

#include "gtest/gtest.h"
#include "tests/e2e/server_process.h"

namespace awqd {

class SharedServerTest : public testing::Test {
 protected:
  // The repository is empty, and each test loads its models.
  static void SetUpTestSuite() {
    repository_ = new TempFolder;
    StartServer();
  }
  // Starts on repository_, which a suite may fill first.
  static void StartServer() {
    server_ = new ServerProcess({"--model_repository=" + repository_->path()});
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
