// The whole server in this process on two devices that break when the test says so: it goes on with
// the other one, reports it everywhere, and exits with the last.
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "awqd/v1/inference.grpc.pb.h"
#include "awqd/v1/model_repository.grpc.pb.h"
#include "awqd/v1/server_info.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "gtest/gtest.h"
#include "kernels/base/mutex.h"
#include "server/server.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/server/requests.h"
#include "tests/testing/wrapped_device.h"

namespace awqd {
namespace {

using ::awqd::testing::WrappedDevice;
using ::grpc::health::v1::HealthCheckResponse;
using ::testing::HasSubstr;

class SeveralDevicesServerTest : public ::testing::TestWithParam<model::Sharding> {
 protected:
  void SetUp() override {
    repository_.Write("tiny/config.json", testing::AwqConfig());
    repository_.Write("tiny/model.safetensors",
                      testing::SafetensorsOf(testing::AwqLinear("layer", 128, 256, 32)));
    options_.model_repository = repository_.path();
    options_.device = "cpu,cpu";
    options_.cpu_threads = 1;
    options_.sharding = GetParam();
    options_.rpc.transport.addresses = {"127.0.0.1:0"};
    auto server = Server::Create(
        options_, [this](absl::string_view spec, const DeviceOptions& options, std::string* why) {
          return OpenBreakable(spec, options, why);
        });
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    absl::c_sort(devices_,
                 [](const auto* a, const auto* b) { return a->info().id < b->info().id; });
    ASSERT_EQ(pipe(stop_), 0);
    channel_ = grpc::CreateChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                   grpc::InsecureChannelCredentials());
    run_ = std::thread([this] { reason_ = server_->Run(stop_[0]); });
    ASSERT_TRUE(Becomes("", HealthCheckResponse::SERVING));
  }
  void TearDown() override {
    EXPECT_EQ(write(stop_[1], "x", 1), 1);
    if (run_.joinable()) run_.join();
    for (int fd : stop_) close(fd);
  }

  absl::StatusOr<std::unique_ptr<Device>> OpenBreakable(absl::string_view spec,
                                                        const DeviceOptions& options,
                                                        std::string* why) {
    absl::StatusOr<std::unique_ptr<Device>> inner = OpenDevice(spec, options, why);
    if (!inner.ok()) return inner.status();
    auto device = std::make_unique<WrappedDevice>(*std::move(inner), true);
    MutexLock lock(&opening_);
    devices_.push_back(device.get());
    return device;
  }

  static void Deadline(grpc::ClientContext* context) {
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  }
  // Watches until the service has this health.
  bool Becomes(const std::string& service, HealthCheckResponse::ServingStatus wanted) {
    const auto stub = grpc::health::v1::Health::NewStub(channel_);
    grpc::ClientContext context;
    Deadline(&context);
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(service);
    const auto watch = stub->Watch(&context, request);
    HealthCheckResponse health;
    while (watch->Read(&health)) {
      if (health.status() != wanted) continue;
      context.TryCancel();
      while (watch->Read(&health)) {
      }
      watch->Finish();
      return true;
    }
    return false;
  }
  grpc::Status Multiply(std::string* device = nullptr) {
    grpc::ClientContext context;
    Deadline(&context);
    v1::QuantizedMatmulRequest request = GoodMatmul();
    v1::QuantizedMatmulResponse response;
    const auto stub = v1::QuantizedInference::NewStub(channel_);
    const grpc::Status status = stub->QuantizedMatmul(&context, request, &response);
    if (device != nullptr) *device = response.execution().device();
    return status;
  }
  v1::ModelSummary Summary() {
    grpc::ClientContext context;
    Deadline(&context);
    v1::ListModelsResponse response;
    EXPECT_TRUE(v1::ModelRepository::NewStub(channel_)->ListModels(&context, {}, &response).ok());
    return response.models(0);
  }
  std::map<std::string, bool> HealthyDevices() {
    grpc::ClientContext context;
    Deadline(&context);
    v1::GetServerInfoResponse response;
    EXPECT_TRUE(v1::ServerInfo::NewStub(channel_)->GetServerInfo(&context, {}, &response).ok());
    std::map<std::string, bool> out;
    for (const auto& device : response.devices()) out[device.id()] = device.healthy();
    return out;
  }
  bool Reload() {
    grpc::ClientContext context;
    Deadline(&context);
    v1::LoadModelRequest request;
    request.set_name("tiny");
    v1::LoadModelResponse response;
    return v1::ModelRepository::NewStub(channel_)->LoadModel(&context, request, &response).ok();
  }

  testing::TempDirectory repository_;
  Options options_;
  Mutex opening_;
  std::vector<WrappedDevice*> devices_;  // they exist as long as the server runs
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  int stop_[2] = {-1, -1};
  absl::Status reason_;
  std::thread run_;
};

TEST_P(SeveralDevicesServerTest, OneThatFailsIsLostAndComesBackWithAReload) {
  const bool columns = GetParam() == model::Sharding::kColumns;
  std::string device;
  ASSERT_TRUE(Multiply(&device).ok());
  if (columns) {
    EXPECT_EQ(device, "cpu,cpu#2");
  }
  devices_[1]->Break();
  EXPECT_TRUE(Becomes("devices/cpu#2", HealthCheckResponse::NOT_SERVING));
  EXPECT_TRUE(Becomes("devices/cpu", HealthCheckResponse::SERVING));
  EXPECT_EQ(HealthyDevices(), (std::map<std::string, bool>{{"cpu", true}, {"cpu#2", false}}));
  EXPECT_THAT(Summary().message(), HasSubstr("failed: cpu#2"));
  if (columns) {
    EXPECT_EQ(Summary().state(), v1::FAILED);
    EXPECT_TRUE(Becomes("", HealthCheckResponse::NOT_SERVING));
    const grpc::Status lost = Multiply();
    EXPECT_EQ(lost.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_THAT(lost.error_message(), HasSubstr("device cpu#2 has failed"));
  } else {
    EXPECT_EQ(Summary().state(), v1::READY);
    EXPECT_TRUE(Becomes("", HealthCheckResponse::SERVING));
    EXPECT_TRUE(Multiply(&device).ok());
    EXPECT_EQ(device, "cpu");
  }
  // The reload goes to the remaining device.
  EXPECT_TRUE(Reload());
  EXPECT_TRUE(Becomes("", HealthCheckResponse::SERVING));
  EXPECT_EQ(Summary().state(), v1::READY);
  EXPECT_EQ(Summary().message(), "");
  EXPECT_TRUE(Multiply(&device).ok());
  EXPECT_EQ(device, "cpu");
  // The reload goes to both, if both work.
  devices_[1]->Repair();
  EXPECT_TRUE(Becomes("devices/cpu#2", HealthCheckResponse::SERVING));
  EXPECT_TRUE(Reload());
  EXPECT_TRUE(Multiply(&device).ok());
  if (columns) {
    EXPECT_EQ(device, "cpu,cpu#2");
  }
}

TEST_P(SeveralDevicesServerTest, TheLastThatFailsEndsTheServer) {
  for (WrappedDevice* device : devices_) device->Break();
  run_.join();
  EXPECT_TRUE(absl::IsInternal(reason_)) << reason_;
  EXPECT_THAT(std::string(reason_.message()), HasSubstr("faulted"));
}

INSTANTIATE_TEST_SUITE_P(Shard, SeveralDevicesServerTest,
                         ::testing::Values(model::Sharding::kReplicas, model::Sharding::kColumns),
                         [](const auto& info) { return std::string(model::Name(info.param)); });

}  // namespace
}  // namespace awqd
