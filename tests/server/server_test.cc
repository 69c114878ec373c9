// The whole server in this process, on a device that breaks when the test says so.
#include "server/server.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "gtest/gtest.h"
#include "tests/testing/wrapped_device.h"

namespace awqd {
namespace {

using ::awqd::testing::WrappedDevice;
using ::grpc::health::v1::HealthCheckResponse;

class ServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string repository = ::testing::TempDir() + "/awqd_server_test_repository";
    std::filesystem::create_directories(repository);
    options_.model_repository = repository;
    options_.keep_going = true;  // the repository is empty
    options_.device = "cpu";
    options_.rpc.transport.addresses = {"127.0.0.1:0"};
    auto server = Server::Create(
        options_, [this](absl::string_view spec, const DeviceOptions& options, std::string* why) {
          return OpenBreakable(spec, options, why);
        });
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    ASSERT_EQ(pipe(stop_), 0);
  }
  void TearDown() override {
    close(stop_[0]);
    close(stop_[1]);
  }

  absl::StatusOr<std::unique_ptr<Device>> OpenBreakable(absl::string_view spec,
                                                        const DeviceOptions& options,
                                                        std::string* why) {
    absl::StatusOr<std::unique_ptr<Device>> inner = OpenDevice(spec, options, why);
    if (!inner.ok()) return inner.status();
    auto device = std::make_unique<WrappedDevice>(*std::move(inner), true);
    device_ = device.get();
    return device;
  }

  Options options_;
  WrappedDevice* device_ = nullptr;  // it exists as long as the server runs
  std::unique_ptr<Server> server_;
  int stop_[2] = {-1, -1};
};

TEST_F(ServerTest, ADeviceFaultEndsServingAndRun) {
  const auto stub = grpc::health::v1::Health::NewStub(grpc::CreateChannel(
      absl::StrCat("127.0.0.1:", server_->port()), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  const auto watch = stub->Watch(&context, {});
  HealthCheckResponse health;
  while (watch->Read(&health) && health.status() != HealthCheckResponse::SERVING) {
  }
  ASSERT_EQ(health.status(), HealthCheckResponse::SERVING);

  absl::Status reason;
  std::thread run([&] { reason = server_->Run(stop_[0]); });
  device_->Break();
  ASSERT_TRUE(watch->Read(&health));
  EXPECT_EQ(health.status(), HealthCheckResponse::NOT_SERVING);
  EXPECT_FALSE(watch->Read(&health));
  watch->Finish();
  run.join();
  EXPECT_TRUE(absl::IsInternal(reason)) << reason;  // main answers an error with exit code 1
  EXPECT_THAT(std::string(reason.message()), ::testing::HasSubstr("device cpu faulted"));
}

TEST_F(ServerTest, AStopIsNoFault) {
  absl::Status reason = absl::UnknownError("not yet");
  std::thread run([&] { reason = server_->Run(stop_[0]); });
  EXPECT_EQ(write(stop_[1], "x", 1), 1);
  run.join();
  EXPECT_TRUE(reason.ok()) << reason;
}

}  // namespace
}  // namespace awqd
