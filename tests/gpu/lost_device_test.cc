// The whole server in this process on several GPUs, AWQD_TEST_DEVICE=cuda:0,cuda:1, under load. A
// fake failure of the last GPU comes first: the others go on, everything reports it, and a reload
// serves without it. A real fault follows: if the driver gives up all GPUs of the process, the
// server exits.
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "awqd/v1/inference.grpc.pb.h"
#include "awqd/v1/model_repository.grpc.pb.h"
#include "awqd/v1/server_info.grpc.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/mutex.h"
#include "server/server.h"
#include "tests/gpu/faults.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/server/requests.h"
#include "tests/testing/wrapped_device.h"

namespace awqd {
namespace {

using ::awqd::testing::WrappedDevice;
using ::testing::HasSubstr;

std::vector<std::string> Gpus() {
  const char* const list = std::getenv("AWQD_TEST_DEVICE");
  std::vector<std::string> out = absl::StrSplit(list == nullptr ? "" : list, ',');
  absl::c_sort(out);
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

class LostGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (Gpus().size() < 2 || !absl::StartsWith(Gpus()[0], "cuda:")) {
      GTEST_SKIP() << "needs AWQD_TEST_DEVICE with two GPUs or more";
    }
    repository_.Write("tiny/config.json", testing::AwqConfig());
    repository_.Write("tiny/model.safetensors",
                      testing::SafetensorsOf(testing::AwqLinear("layer", 128, 256, 32)));
    options_.model_repository = repository_.path();
    options_.device = absl::StrJoin(Gpus(), ",");
    options_.rpc.transport.addresses = {"127.0.0.1:0"};
    auto server =
        Server::Create(options_,
                       [this](absl::string_view spec, const DeviceOptions& options,
                              std::string* why) -> absl::StatusOr<std::unique_ptr<Device>> {
                         auto inner = OpenDevice(spec, options, why);
                         if (!inner.ok()) return inner;
                         auto device = std::make_unique<WrappedDevice>(*std::move(inner), false);
                         MutexLock lock(&opening_);
                         if (spec == Gpus().front()) first_ = device.get();
                         if (spec == Gpus().back()) last_ = device.get();
                         return device;
                       });
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    ASSERT_EQ(pipe(stop_), 0);
    channel_ = grpc::CreateChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                   grpc::InsecureChannelCredentials());
    run_ = std::thread([this] { reason_ = server_->Run(stop_[0]); });
    ASSERT_TRUE(Eventually([&] { return Multiply().ok(); }));
  }
  void TearDown() override {
    if (stop_[0] < 0) return;
    EXPECT_EQ(write(stop_[1], "x", 1), 1);
    if (run_.joinable()) run_.join();
    for (int fd : stop_) close(fd);
  }

  template <typename Condition>
  static bool Eventually(Condition condition) {
    for (const absl::Time end = absl::Now() + absl::Seconds(60); absl::Now() < end;) {
      if (condition()) return true;
      absl::SleepFor(absl::Milliseconds(20));
    }
    return false;
  }
  static void Deadline(grpc::ClientContext* context) {
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  }
  grpc::Status Multiply(std::string* device = nullptr) {
    grpc::ClientContext context;
    Deadline(&context);
    v1::QuantizedMatmulResponse response;
    const grpc::Status status = v1::QuantizedInference::NewStub(channel_)->QuantizedMatmul(
        &context, GoodMatmul(), &response);
    if (device != nullptr) *device = response.execution().device();
    return status;
  }
  std::vector<v1::ModelSummary> Models() {
    grpc::ClientContext context;
    Deadline(&context);
    v1::ListModelsResponse response;
    EXPECT_TRUE(v1::ModelRepository::NewStub(channel_)->ListModels(&context, {}, &response).ok());
    return {response.models().begin(), response.models().end()};
  }
  bool IsHealthy(const std::string& id) {
    grpc::ClientContext context;
    Deadline(&context);
    v1::GetServerInfoResponse response;
    EXPECT_TRUE(v1::ServerInfo::NewStub(channel_)->GetServerInfo(&context, {}, &response).ok());
    const auto found =
        absl::c_find_if(response.devices(), [&](const auto& device) { return device.id() == id; });
    return found != response.devices().end() && found->healthy();
  }
  grpc::Status Reload() {
    grpc::ClientContext context;
    Deadline(&context);
    v1::LoadModelRequest request;
    request.set_name("tiny");
    v1::LoadModelResponse response;
    return v1::ModelRepository::NewStub(channel_)->LoadModel(&context, request, &response);
  }
  // A kernel on the last GPU writes to an invalid address.
  void FaultOnTheLast() {
    ASSERT_TRUE(first_->healthy());
    const auto stream = last_->CreateStream();
    ASSERT_TRUE(stream.ok()) << stream.status();
    ASSERT_TRUE(testing::EnqueueIllegalWrite((*stream)->view()).ok());
    EXPECT_FALSE((*stream)->Synchronize().ok());
    EXPECT_FALSE(last_->inner().healthy());
  }

  // Callers without a pause, until EndCalls or until the server has exited.
  void BeginCalls() {
    for (int i = 0; i < kCallers; ++i) {
      callers_.emplace_back([this] {
        while (!end_) {
          const grpc::Status status = Multiply();
          if (status.ok()) {
            ++answered_;
            continue;
          }
          MutexLock lock(&mu_);
          failures_.push_back(status);
          if (status.error_code() == grpc::StatusCode::UNAVAILABLE) return;
        }
      });
    }
    EXPECT_TRUE(Eventually([&] { return answered_ > 1000; }));
  }
  // Ends the callers; returns the failed calls.
  std::vector<grpc::Status> EndCalls() {
    end_ = true;
    for (std::thread& caller : callers_) caller.join();
    return failures_;
  }
  static bool HasErrorId(const grpc::Status& failure) {
    return failure.error_code() == grpc::StatusCode::INTERNAL &&
           absl::StrContains(failure.error_message(), "error id ");
  }

  static constexpr int kCallers = 8;

  testing::TempDirectory repository_;
  Options options_;
  Mutex opening_;
  WrappedDevice *first_ = nullptr, *last_ = nullptr;  // they exist as long as the server
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  int stop_[2] = {-1, -1};
  absl::Status reason_;
  std::thread run_;
  std::atomic<bool> end_{false};
  std::atomic<int> answered_{0};
  Mutex mu_;
  std::vector<grpc::Status> failures_;  // guarded by mu_ until EndCalls
  std::vector<std::thread> callers_;
};

TEST_F(LostGpuTest, TheOthersGoOn) {
  BeginCalls();
  last_->Break();
  EXPECT_TRUE(Eventually([&] { return !IsHealthy(Gpus().back()); }));
  const int before = answered_;
  EXPECT_TRUE(Eventually([&] { return answered_ > before + 1000; }));
  const std::vector<grpc::Status> failures = EndCalls();
  for (const grpc::Status& failure : failures) {  // calls that ran on it
    EXPECT_TRUE(HasErrorId(failure)) << failure.error_code() << ": " << failure.error_message();
  }
  EXPECT_LE(failures.size(), kCallers) << "one call of each caller at most";
  EXPECT_TRUE(IsHealthy(Gpus().front()));
  ASSERT_EQ(Models().size(), 1);
  EXPECT_THAT(Models()[0].message(), HasSubstr(absl::StrCat("failed: ", Gpus().back())));
  EXPECT_EQ(Models()[0].state(), v1::READY);

  const grpc::Status reloaded = Reload();
  EXPECT_TRUE(reloaded.ok()) << reloaded.error_message();
  EXPECT_EQ(Models()[0].message(), "");
  std::string device;
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(Multiply(&device).ok());
    EXPECT_NE(device, Gpus().back());
  }
  // It works again: a reload puts the weights onto it too.
  last_->Repair();
  EXPECT_TRUE(Reload().ok());
  bool both = false;
  for (int i = 0; i < 100 && !both; ++i) both = Multiply(&device).ok() && device == Gpus().back();
  EXPECT_TRUE(both);
}

// The last test of this process, because nothing works on its GPUs afterwards.
TEST_F(LostGpuTest, AFaultOfAKernelIsOfTheWholeProcess) {
  BeginCalls();
  FaultOnTheLast();
  if (first_->healthy()) {
    EXPECT_TRUE(Multiply().ok());
    EXPECT_TRUE(IsHealthy(Gpus().front()));
    EndCalls();
    return;
  }
  run_.join();
  EXPECT_TRUE(absl::IsInternal(reason_)) << reason_;
  // Statuses of a batch that was on a GPU, of a request right after the fault, and of a later one.
  for (const grpc::Status& failure : EndCalls()) {
    EXPECT_TRUE(HasErrorId(failure) ||
                failure.error_code() == grpc::StatusCode::FAILED_PRECONDITION ||
                failure.error_code() == grpc::StatusCode::UNAVAILABLE)
        << failure.error_code() << ": " << failure.error_message();
  }
}

}  // namespace
}  // namespace awqd
