// SharedServerTest: a fixture for tests that one server of the whole suite may serve.
#pragma once

#include <memory>

#include "gtest/gtest.h"
#include "tests/e2e/server_process.h"

namespace awqd {

class SharedServerTest : public testing::Test {
 protected:
  // The repository is empty, so that a test loads what it needs.
  static void SetUpTestSuite() {
    repository_ = new TempFolder;
    StartServer();
  }
  // On repository_, for a suite that fills it first.
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
