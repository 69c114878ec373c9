// DevicesTest: a server over three CPU devices, and one on one device for comparison.
#pragma once

#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "tests/e2e/server_test.h"

namespace awqd {

// The parameter is the value of --shard.
class DevicesTest : public ServerTest, public ::testing::WithParamInterface<std::string> {
 protected:
  // Starts both on repository_.
  void StartBoth(const std::string& devices) {
    const std::string shard = "--shard=" + GetParam();
    one_ = std::make_unique<ServerProcess>(Args({"--device=cpu", "--cpu_threads=1", shard}));
    Start({"--device=" + devices, "--cpu_threads=1", shard});
    ASSERT_TRUE(one_->WaitServing()) << one_->log();
    reference_ = one_->NewClient();
  }
  void TearDown() override { Stop(); }
  bool columns() const { return GetParam() == "columns"; }

  std::unique_ptr<ServerProcess> one_;
  std::unique_ptr<client::Client> reference_;
};

}  // namespace awqd
