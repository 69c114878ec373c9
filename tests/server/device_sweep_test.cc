// Lets the N-th call on a device fail, for every N, in the whole server in this process. All
// requests of the batch get one error id, the device recovers or is retired as engine/README.md
// says, health reports it, and the memory is released.
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "awqd/v1/inference.grpc.pb.h"
#include "awqd/v1/model_repository.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "gtest/gtest.h"
#include "kernels/base/mutex.h"
#include "server/server.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/server/requests.h"
#include "tests/server/wrap_devices.h"
#include "tests/testing/failing_device.h"

namespace awqd {
namespace {

using ::awqd::testing::FailingDevice;
using ::grpc::health::v1::HealthCheckResponse;
using Way = FailingDevice::Way;

class DeviceSweepTest : public ::testing::Test {
 protected:
  void Start(const std::string& devices) {
    repository_.Write("tiny/config.json", testing::AwqConfig());
    repository_.Write("tiny/model.safetensors",
                      testing::SafetensorsOf(testing::AwqLinear("layer", 128, 256, 32)));
    options_.model_repository = repository_.path();
    options_.device = devices;
    options_.cpu_threads = 1;
    options_.rpc.transport.addresses = {"127.0.0.1:0"};
    // Long enough that concurrent calls share a batch.
    options_.engine.batching.max_queue_delay = absl::Milliseconds(5);
    auto server = Server::Create(options_, WrapDevices([this](std::unique_ptr<Device> inner) {
                                   auto device = std::make_unique<FailingDevice>(std::move(inner));
                                   MutexLock lock(&opening_);
                                   devices_.push_back(device.get());
                                   return device;
                                 }));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    absl::c_sort(devices_,
                 [](const auto* a, const auto* b) { return a->info().id < b->info().id; });
    ASSERT_EQ(pipe(stop_), 0);
    channel_ = grpc::CreateChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                   grpc::InsecureChannelCredentials());
    run_ = std::thread([this] { reason_ = server_->Run(stop_[0]); });
    ASSERT_TRUE(Becomes("", HealthCheckResponse::SERVING));
    ASSERT_TRUE(Multiply().ok());
  }
  void TearDown() override {
    EXPECT_EQ(write(stop_[1], "x", 1), 1);
    run_.join();
    EXPECT_TRUE(reason_.ok()) << reason_;
    for (int fd : stop_) close(fd);
  }

  static void Deadline(grpc::ClientContext* context) {
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  }
  // Waits until the service has this health, ten seconds at most.
  bool Becomes(const std::string& service, HealthCheckResponse::ServingStatus wanted) {
    const auto stub = grpc::health::v1::Health::NewStub(channel_);
    for (const absl::Time end = absl::Now() + absl::Seconds(10); absl::Now() < end;) {
      grpc::ClientContext context;
      Deadline(&context);
      grpc::health::v1::HealthCheckRequest request;
      request.set_service(service);
      HealthCheckResponse response;
      if (stub->Check(&context, request, &response).ok() && response.status() == wanted) {
        return true;
      }
      absl::SleepFor(absl::Milliseconds(1));
    }
    return false;
  }
  grpc::Status Multiply() {
    grpc::ClientContext context;
    Deadline(&context);
    v1::QuantizedMatmulResponse response;
    return v1::QuantizedInference::NewStub(channel_)->QuantizedMatmul(&context, GoodMatmul(),
                                                                      &response);
  }
  grpc::Status Dequantize() {
    grpc::ClientContext context;
    Deadline(&context);
    v1::DequantizeResponse response;
    return v1::QuantizedInference::NewStub(channel_)->Dequantize(&context, GoodDequantize(),
                                                                 &response);
  }
  grpc::Status Load() {
    grpc::ClientContext context;
    Deadline(&context);
    v1::LoadModelRequest request;
    request.set_name("tiny");
    v1::LoadModelResponse response;
    return v1::ModelRepository::NewStub(channel_)->LoadModel(&context, request, &response);
  }
  // Products that are submitted together.
  std::vector<grpc::Status> MultiplyTogether() {
    std::vector<grpc::Status> out(4);
    std::vector<std::thread> threads;
    for (grpc::Status& status : out) threads.emplace_back([&] { status = Multiply(); });
    for (std::thread& thread : threads) thread.join();
    return out;
  }

  using Operation = std::function<std::vector<grpc::Status>()>;
  struct Named {
    std::string name;
    Operation run;
  };
  std::vector<Named> Operations() {
    return {{"product", [this] { return MultiplyTogether(); }},
            {"dequantize", [this] { return std::vector<grpc::Status>{Dequantize()}; }},
            {"load", [this] { return std::vector<grpc::Status>{Load()}; }}};
  }

  // Lets each call of `run` on the last of `devices_` fail once, and runs `check` after each
  // failure.
  void Sweep(const Named& operation, Way way,
             const std::function<void(const std::vector<grpc::Status>&)>& check) {
    FailingDevice& device = *devices_.back();
    device.FailAt(0, way);
    operation.run();
    const int64_t calls = device.calls();
    int failed = 0;
    for (int64_t number = 1; number <= calls; ++number) {
      SCOPED_TRACE(absl::StrCat(operation.name, ", call ", number, " of ", calls));
      device.FailAt(number, way);
      const std::vector<grpc::Status> statuses = operation.run();
      if (device.failed() == 0) continue;
      ++failed;
      check(statuses);
    }
    device.Repair();
    std::printf("%s: %d of %d calls failed\n", operation.name.c_str(), failed,
                static_cast<int>(calls));
    seen_ += failed;
  }

  // An internal error has only an id, which is the same for all requests of a batch.
  static void ExpectClean(const std::vector<grpc::Status>& statuses) {
    std::set<std::string> ids;
    for (const grpc::Status& status : statuses) {
      EXPECT_THAT(status.error_code(),
                  ::testing::AnyOf(grpc::StatusCode::OK, grpc::StatusCode::INTERNAL,
                                   grpc::StatusCode::RESOURCE_EXHAUSTED,
                                   grpc::StatusCode::FAILED_PRECONDITION))
          << status.error_message();
      if (status.error_code() != grpc::StatusCode::INTERNAL) continue;
      EXPECT_THAT(status.error_message(), ::testing::HasSubstr("error id"));
      ids.insert(status.error_message());
    }
    EXPECT_LE(ids.size(), 1u) << "of one batch";
  }

  testing::TempDirectory repository_;
  Options options_;
  Mutex opening_;
  std::vector<FailingDevice*> devices_;  // they exist as long as the server runs
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  int stop_[2] = {-1, -1};
  absl::Status reason_;
  std::thread run_;
  int seen_ = 0;  // calls that failed
};

TEST_F(DeviceSweepTest, ACallThatFailsOnceIsForgotten) {
  Start("cpu");
  const Named load = Operations().back();
  load.run();
  for (const Way way : {Way::kOutOfMemory, Way::kOnce}) {
    for (const Named& operation : Operations()) {
      const int64_t used = devices_.back()->UsedBytes();
      Sweep(operation, way, [&](const std::vector<grpc::Status>& statuses) {
        ExpectClean(statuses);
        EXPECT_TRUE(Becomes("", HealthCheckResponse::SERVING));
        EXPECT_TRUE(Becomes("devices/cpu", HealthCheckResponse::SERVING));
        const grpc::Status next = Multiply();
        EXPECT_TRUE(next.ok()) << next.error_message();
      });
      EXPECT_TRUE(Dequantize().ok());
      EXPECT_TRUE(Load().ok());
      EXPECT_LE(devices_.back()->UsedBytes(), used) << operation.name << " left memory behind";
    }
  }
  EXPECT_GT(seen_, 20);
}

TEST_F(DeviceSweepTest, ADeviceThatDiesIsRetiredAndComesBackWithALoad) {
  Start("cpu,cpu");
  for (const Named& operation : Operations()) {
    Sweep(operation, Way::kSticky, [&](const std::vector<grpc::Status>& statuses) {
      for (const grpc::Status& status : statuses) ExpectClean({status});
      EXPECT_TRUE(Becomes("devices/cpu#2", HealthCheckResponse::NOT_SERVING));
      EXPECT_TRUE(Becomes("devices/cpu", HealthCheckResponse::SERVING));
      EXPECT_TRUE(Becomes("", HealthCheckResponse::SERVING));
      const grpc::Status next = Multiply();
      EXPECT_TRUE(next.ok()) << next.error_message();
      devices_.back()->Repair();
      EXPECT_TRUE(Becomes("devices/cpu#2", HealthCheckResponse::SERVING));
      const grpc::Status load = Load();
      EXPECT_TRUE(load.ok()) << load.error_message();
    });
  }
  EXPECT_GT(seen_, 5);
}

}  // namespace
}  // namespace awqd
