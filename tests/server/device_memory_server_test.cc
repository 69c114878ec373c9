// The whole server in this process, on a device whose memory the host is told not to see: clients
// share memory of it, and requests read and write there.
#include <dlfcn.h>
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "awqd/v1/inference.grpc.pb.h"
#include "awqd/v1/server_info.grpc.pb.h"
#include "client/bench/bench.h"
#include "client/device_memory.h"
#include "client/ring.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/unique_fd.h"
#include "server/server.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/server/requests.h"
#include "tests/server/wrap_devices.h"
#include "tests/testing/eventually.h"
#include "tests/testing/wrapped_device.h"

namespace awqd {
namespace {

using ::awqd::testing::WrappedDevice;
using ::testing::HasSubstr;

constexpr int64_t kK = 128, kN = 256;

class DeviceMemoryServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    repository_.Write("tiny/config.json", testing::AwqConfig());
    repository_.Write("tiny/model.safetensors", testing::SafetensorsOf(testing::Merge(
                                                    testing::AwqLinear("layer", kK, kN, 32),
                                                    testing::AwqLinear("back", kN, kK, 32, 0x12))));
    options_.model_repository = repository_.path();
    options_.device = "cpu";
    options_.cpu_threads = 1;
    options_.rpc.shared_memory.cuda = true;
    options_.rpc.ring.path = ring_path_;
    ASSERT_NE(dlopen(AWQD_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
    options_.rpc.transport.addresses = {"127.0.0.1:0"};
    auto server = Server::Create(options_, WrapDevices([this](std::unique_ptr<Device> inner) {
                                   auto device =
                                       std::make_unique<WrappedDevice>(std::move(inner), false);
                                   device_ = device.get();
                                   return device;
                                 }));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    ASSERT_EQ(pipe(stop_), 0);
    stub_ = v1::QuantizedInference::NewStub(MakeChannel());
    run_ = std::thread([this] { (void)server_->Run(stop_[0]); });
    ASSERT_TRUE(Eventually([&] { return Multiply(GoodMatmul()).ok(); }));
    for (char& byte : memory_) byte = static_cast<char>(random_() % 64);
  }
  void TearDown() override {
    EXPECT_EQ(write(stop_[1], "x", 1), 1);
    run_.join();
    for (int fd : stop_) close(fd);
  }
  std::shared_ptr<grpc::Channel> MakeChannel() const {
    grpc::ChannelArguments own;
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                     grpc::InsecureChannelCredentials(), own);
  }

  static void SetDeadline(grpc::ClientContext* context) {
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  }
  grpc::Status Multiply(const v1::QuantizedMatmulRequest& request,
                        v1::QuantizedMatmulResponse* response = nullptr) {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::QuantizedMatmulResponse ignored;
    return stub_->QuantizedMatmul(&context, request, response == nullptr ? &ignored : response);
  }

  // A region that lasts as long as this does.
  class Shared {
   public:
    Shared(v1::QuantizedInference::Stub* stub, const v1::ShareMemoryRequest& request)
        : call_(stub->ShareMemory(&context_, request)) {
      v1::ShareMemoryResponse ready;
      if (!call_->Read(&ready)) status_ = call_->Finish();
    }
    ~Shared() {
      if (!status_.ok()) return;
      context_.TryCancel();
      call_->Finish();
    }
    const grpc::Status& status() const { return status_; }

   private:
    grpc::ClientContext context_;
    const std::unique_ptr<grpc::ClientReader<v1::ShareMemoryResponse>> call_;
    grpc::Status status_;
  };
  v1::ShareMemoryRequest Region(const std::string& name) {
    v1::ShareMemoryRequest request;
    request.set_region(name);
    request.set_device("cpu");
    request.set_cuda_ipc_memory(WrappedDevice::Export(memory_.data(), kBytes));
    request.set_size(kBytes);
    return request;
  }
  static void SetRange(int64_t offset, int64_t size, v1::SharedMemory* range) {
    range->set_region("r");
    range->set_offset(offset);
    range->set_size(size);
  }
  // Two tokens; the activations begin at kX, the result at kY.
  static v1::QuantizedMatmulRequest SharedMatmul() {
    v1::QuantizedMatmulRequest request = GoodMatmul();
    SetRange(kX, 2 * kK * 2, request.mutable_activations()->mutable_shared_memory());
    SetRange(kY, 2 * kN * 2, request.mutable_output_shared_memory());
    return request;
  }
  std::string Bytes(int64_t offset, int64_t size) const { return memory_.substr(offset, size); }

  static constexpr int64_t kBytes = 1 << 16, kX = 4096, kY = 16384;
  std::mt19937 random_{5};
  std::string memory_ = std::string(kBytes, '\0');
  testing::TempDirectory repository_;
  testing::TempDirectory folder_;
  const std::string ring_path_ = folder_.path() + "/ring.sock";
  Options options_;
  WrappedDevice* device_ = nullptr;
  std::unique_ptr<Server> server_;
  std::unique_ptr<v1::QuantizedInference::Stub> stub_;
  int stop_[2] = {-1, -1};
  std::thread run_;
};

TEST_F(DeviceMemoryServerTest, ProductsReadAndWriteThere) {
  v1::QuantizedMatmulRequest sent = GoodMatmul();
  sent.mutable_activations()->set_raw(Bytes(kX, 2 * kK * 2));
  v1::QuantizedMatmulResponse expected;
  ASSERT_TRUE(Multiply(sent, &expected).ok());
  const Shared shared(stub_.get(), Region("r"));
  ASSERT_TRUE(shared.status().ok()) << shared.status().error_message();

  const std::string around = Bytes(kY - 256, 256), behind = Bytes(kY + 2 * kN * 2, 256);
  const int64_t copies = device_->copies_to_device() + device_->copies_to_host();
  v1::QuantizedMatmulResponse response;
  const grpc::Status status = Multiply(SharedMatmul(), &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(device_->copies_to_device() + device_->copies_to_host(), copies);
  EXPECT_EQ(Bytes(kY, 2 * kN * 2), expected.output().raw());
  EXPECT_EQ(response.output().shared_memory().region(), "r");
  EXPECT_EQ(response.output().shared_memory().offset(), kY);
  EXPECT_EQ(response.output().shared_memory().size(), 2 * kN * 2);
  EXPECT_EQ(Bytes(kY - 256, 256), around);
  EXPECT_EQ(Bytes(kY + 2 * kN * 2, 256), behind);

  // Only one of both is there.
  v1::QuantizedMatmulRequest request = SharedMatmul();
  request.clear_output_shared_memory();
  ASSERT_TRUE(Multiply(request, &response).ok());
  EXPECT_EQ(response.output().raw(), expected.output().raw());
  request = SharedMatmul();
  request.mutable_activations()->set_raw(Bytes(kX, 2 * kK * 2));
  memory_.replace(kY, 2 * kN * 2, 2 * kN * 2, '?');
  ASSERT_TRUE(Multiply(request, &response).ok());
  EXPECT_EQ(Bytes(kY, 2 * kN * 2), expected.output().raw());
}

TEST_F(DeviceMemoryServerTest, WeightsAreDecodedThere) {
  v1::DequantizeResponse expected;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->Dequantize(&context, GoodDequantize(), &expected).ok());
  const Shared shared(stub_.get(), Region("r"));
  v1::DequantizeRequest request = GoodDequantize();
  request.set_output_dtype(v1::FP16);
  request.mutable_rows()->set_end(32);
  SetRange(kY, 32 * kN * 2, request.mutable_output_shared_memory());
  v1::DequantizeResponse response;
  grpc::ClientContext again;
  const grpc::Status status = stub_->Dequantize(&again, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(Bytes(kY, 32 * kN * 2), expected.output().raw().substr(0, 32 * kN * 2));
}

TEST_F(DeviceMemoryServerTest, EventsAreWaitedForAndRecorded) {
  v1::ShareMemoryRequest region = Region("r");
  region.set_ready_event(WrappedDevice::EventHandle());
  region.set_finished_event(WrappedDevice::EventHandle());
  const Shared shared(stub_.get(), region);
  ASSERT_TRUE(Multiply(SharedMatmul()).ok());
  EXPECT_EQ(device_->waits(), 1);
  EXPECT_EQ(device_->records(), 1);
  // The result waits, too, for whoever still reads what was there.
  v1::QuantizedMatmulRequest request = SharedMatmul();
  request.mutable_activations()->set_raw(Bytes(kX, 2 * kK * 2));
  ASSERT_TRUE(Multiply(request).ok());
  EXPECT_EQ(device_->waits(), 2);
  EXPECT_EQ(device_->records(), 2);
}

TEST_F(DeviceMemoryServerTest, ARegionEndsWithItsCall) {
  {
    const Shared shared(stub_.get(), Region("r"));
    ASSERT_TRUE(shared.status().ok());
    const Shared another(stub_.get(), Region("r"));
    EXPECT_EQ(another.status().error_code(), grpc::StatusCode::ALREADY_EXISTS);
    ASSERT_TRUE(Multiply(SharedMatmul()).ok());
    EXPECT_EQ(device_->imported(), 1);
  }
  EXPECT_TRUE(Eventually([&] { return device_->imported() == 0; }));
  const grpc::Status status = Multiply(SharedMatmul());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("activations.shared_memory.region: got \"r\""));
  // A client that is gone ends its calls.
  auto gone = v1::QuantizedInference::NewStub(MakeChannel());
  grpc::ClientContext context;
  auto call = gone->ShareMemory(&context, Region("r"));
  v1::ShareMemoryResponse ready;
  ASSERT_TRUE(call->Read(&ready));
  EXPECT_TRUE(Multiply(SharedMatmul()).ok());
  context.TryCancel();
  EXPECT_TRUE(Eventually([&] { return device_->imported() == 0; }));
  EXPECT_FALSE(call->Read(&ready));
  call->Finish();
}

TEST_F(DeviceMemoryServerTest, WhatCannotWorkIsRefused) {
  const auto refuse = [&](const v1::ShareMemoryRequest& request, const std::string& message) {
    const Shared shared(stub_.get(), request);
    EXPECT_EQ(shared.status().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(shared.status().error_message(), HasSubstr(message));
    EXPECT_EQ(device_->imported(), 0);
  };
  v1::ShareMemoryRequest request = Region("r");
  request.set_device("cuda:7");
  refuse(request, "device: got \"cuda:7\", expected cpu");
  request = Region("");
  refuse(request, "name: got 0 bytes, expected 1 to 128");
  request = Region("r");
  request.set_cuda_ipc_memory("nothing");
  refuse(request, "cuda_ipc_memory: got no handle");
  request = Region("r");
  request.set_offset(1);
  refuse(request, "size: got 65536 bytes from byte 1 on, expected a range within");

  const Shared shared(stub_.get(), Region("r"));
  v1::QuantizedMatmulRequest product = SharedMatmul();
  product.mutable_output_shared_memory()->set_size(2 * kN * 2 - 1);
  EXPECT_THAT(Multiply(product).error_message(),
              HasSubstr("output_shared_memory.size: got 1023, expected at least 1024"));
  product = SharedMatmul();
  product.mutable_output_shared_memory()->set_offset(kX + 2 * kK * 2 - 1);
  EXPECT_THAT(Multiply(product).error_message(),
              HasSubstr("output_shared_memory: got a range that overlaps the activations"));
  product.mutable_output_shared_memory()->set_offset(kX + 2 * kK * 2);
  EXPECT_TRUE(Multiply(product).ok());
  product = SharedMatmul();
  product.mutable_activations()->mutable_shared_memory()->set_offset(kBytes - 511);
  EXPECT_THAT(Multiply(product).error_message(), HasSubstr("activations.shared_memory.size: got"));
}

// --- Rings ---

using client::DeviceMemory;

class DeviceMemoryRingTest : public DeviceMemoryServerTest {
 protected:
  void SetUp() override {
    DeviceMemoryServerTest::SetUp();
#ifdef AWQD_THREAD_SANITIZER
    GTEST_SKIP() << "ThreadSanitizer does not see what orders client and server in one process: "
                    "slots, which each has at its own address, and the pipe that ends the server";
#endif
    auto ring = client::Ring::Open({.path = ring_path_});
    ASSERT_TRUE(ring.ok()) << ring.status();
    ring_ = *std::move(ring);
    auto memory = DeviceMemory::Allocate(0, kBytes, DeviceMemory::Kind::kDescriptor);
    ASSERT_TRUE(memory.ok()) << memory.status();
    shared_ = *std::move(memory);
    ASSERT_TRUE(shared_->Write(kX, Bytes(kX, 2 * kK * 2)).ok());
  }
  void TearDown() override {
    ring_.reset();
    DeviceMemoryServerTest::TearDown();
  }
  // A product of two tokens whose tensors are in a region.
  static client::MatmulCall Call(const std::string& weight, int64_t k) {
    return {.weight = client::WeightName{"tiny", weight},
            .activations = {v1::FP16, {1, k}, ""},
            .shared_activations = DeviceMemory::Range("r", 0, 0),
            .shared_output = DeviceMemory::Range("r", 0, 0)};
  }
  std::string Expected(const std::string& weight, const std::string& x, int64_t k) {
    v1::QuantizedMatmulRequest request = GoodMatmul();
    request.mutable_weight()->set_weight(weight);
    request.mutable_activations()->set_shape(1, k);
    request.mutable_activations()->set_raw(x);
    v1::QuantizedMatmulResponse response;
    const grpc::Status status = Multiply(request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.output().raw();
  }

  std::unique_ptr<client::Ring> ring_;
  std::unique_ptr<DeviceMemory> shared_;
};

TEST_F(DeviceMemoryRingTest, DescriptorsAreRegions) {
  const std::string expected = Expected("layer", Bytes(kX, 2 * kK * 2), kK);
  ASSERT_TRUE(ring_->ShareMemory(shared_->Request("r"), shared_->descriptor()).ok());
  const auto call = ring_->Prepare(Call("layer", kK));
  ASSERT_TRUE(call.ok()) << call.status();
  const int64_t copies = device_->copies_to_device() + device_->copies_to_host();
  const client::RingCall product = {
      .call = call->number, .tokens = 2, .x_offset = kX, .y_offset = kY};
  client::RingAnswer answer = ring_->Run(product);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(*shared_->Read(kY, 2 * kN * 2), expected);
  EXPECT_EQ(device_->copies_to_device() + device_->copies_to_host(), copies);
  // Requests of any protocol name it.
  EXPECT_TRUE(Multiply(SharedMatmul()).ok());

  EXPECT_EQ(device_->imported(), 1);
  EXPECT_EQ(ring_->ShareMemory(shared_->Request("r"), shared_->descriptor()).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(ring_->UnshareMemory("r").ok());
  EXPECT_EQ(device_->imported(), 0);
  answer = ring_->Run(product);
  EXPECT_THAT(answer.status.ToString(), HasSubstr("activations.shared_memory.region: got"));
  EXPECT_THAT(ring_->UnshareMemory("r").ToString(),
              HasSubstr("region: got \"r\", expected one that this ring shares"));
  // The ring's end is that of its regions.
  ASSERT_TRUE(ring_->ShareMemory(shared_->Request("r"), shared_->descriptor()).ok());
  ring_.reset();
  EXPECT_TRUE(Eventually([&] { return device_->imported() == 0; }));
}

TEST_F(DeviceMemoryRingTest, HandlesNeedNoDescriptor) {
  const auto memory = DeviceMemory::Allocate(0, kBytes);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_TRUE(ring_->ShareMemory((*memory)->Request("r")).ok());
  EXPECT_EQ(device_->imported(), 1);
}

TEST_F(DeviceMemoryRingTest, DescriptorsThatCannotBe) {
  const auto refuse = [&](const v1::ShareMemoryRequest& request, int fd, const std::string& text) {
    const absl::Status status = ring_->ShareMemory(request, fd);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    EXPECT_EQ(device_->imported(), 0);
  };
  const v1::ShareMemoryRequest good = shared_->Request("r");
  refuse(good, -1, "cuda_ipc_memory: got no handle");
  v1::ShareMemoryRequest request = Region("r");
  refuse(request, shared_->descriptor(),
         "cuda_ipc_memory: got a handle and a descriptor, expected one of them");
  for (const auto& [offset, size] : {std::pair<int64_t, int64_t>{0, kBytes + 1},
                                     {1, kBytes},
                                     {INT64_MAX, 2},
                                     {-1, 2},
                                     {0, -1}}) {
    request = good;
    request.set_offset(offset);
    request.set_size(size);
    const absl::Status status = ring_->ShareMemory(request, shared_->descriptor());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << offset << " " << size;
    EXPECT_EQ(device_->imported(), 0);
  }
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  const UniqueFd one(pair[0]), other(pair[1]);
  refuse(good, one.get(), "descriptor: got no memory");
  request = good;
  request.set_device("cuda:5");
  refuse(request, shared_->descriptor(), "device: got \"cuda:5\", expected cpu");
  request = good;
  request.set_region("");
  refuse(request, shared_->descriptor(), "name: got 0 bytes");
  request = good;
  request.set_early_answers(true);
  refuse(request, shared_->descriptor(), "early_answers: got true without finished_event");
  // The ring goes on.
  EXPECT_TRUE(ring_->ShareMemory(good, shared_->descriptor()).ok());
}

TEST_F(DeviceMemoryRingTest, TensorsStayThereBetweenTheStepsOfAChain) {
  const std::string x = Bytes(kX, 2 * kK * 2);
  const std::string middle = Expected("layer", x, kK), end = Expected("back", middle, kN);
  ASSERT_TRUE(ring_->ShareMemory(shared_->Request("r"), shared_->descriptor()).ok());
  const client::RingPrepared first = *ring_->Prepare(Call("layer", kK));
  const client::RingPrepared second = *ring_->Prepare(Call("back", kN));
  const auto chain = ring_->PrepareChain({{first}, {second, 1}});
  ASSERT_TRUE(chain.ok()) << chain.status();
  const int64_t copies = device_->copies_to_device() + device_->copies_to_host();
  const int64_t waits = device_->waits(), records = device_->records();
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(shared_->Write(kY, std::string(middle.size() + end.size(), '?')).ok());
    const client::RingAnswer answer =
        ring_->Run({.call = chain->number, .tokens = 2, .x_offset = kX, .y_offset = kY});
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(*shared_->Read(kY, static_cast<int64_t>(middle.size() + end.size())), middle + end);
  }
  EXPECT_EQ(device_->copies_to_device() + device_->copies_to_host(), copies);
  // The second step waited for the first one on the device, not on the host.
  EXPECT_EQ(device_->waits() - waits, 20);
  EXPECT_EQ(device_->records() - records, 20);

  client::MatmulCall in_payload = Call("layer", kK);
  in_payload.shared_activations = in_payload.shared_output = std::nullopt;
  const client::RingPrepared other = *ring_->Prepare(in_payload);
  EXPECT_THAT(ring_->PrepareChain({{first}, {other}}).status().ToString(),
              HasSubstr("steps[1].call: got tensors in region \"\", expected those of the first "
                        "step's, \"r\""));
  EXPECT_THAT(ring_->PrepareChain({{first}, {second, 1, 1}}).status().ToString(),
              HasSubstr("steps[1].router: got 1, expected 0"));
}

// The work of an early answer uses its memory until its lane was waited for: here, by eight more.
TEST_F(DeviceMemoryRingTest, EarlyAnswersComeBeforeTheDeviceIsDone) {
  v1::ShareMemoryRequest region = shared_->Request("r");
  region.set_finished_event(WrappedDevice::EventHandle());
  region.set_early_answers(true);
  ASSERT_TRUE(ring_->ShareMemory(region, shared_->descriptor()).ok());
  const client::RingPrepared call = *ring_->Prepare(Call("layer", kK));
  const std::string expected = Expected("layer", Bytes(kX, 2 * kK * 2), kK);
  const int64_t waited = device_->synchronizations();
  const client::RingCall product = {
      .call = call.number, .tokens = 2, .x_offset = kX, .y_offset = kY};
  ASSERT_TRUE(ring_->Run(product).status.ok());
  EXPECT_EQ(device_->synchronizations(), waited);
  EXPECT_EQ(device_->records(), 1);
  EXPECT_EQ(*shared_->Read(kY, 2 * kN * 2), expected);
  ASSERT_TRUE(ring_->UnshareMemory("r").ok());
  EXPECT_EQ(device_->imported(), 1);
  ASSERT_TRUE(ring_->ShareMemory(region, shared_->descriptor()).ok());
  for (int i = 0; i < 40; ++i) ASSERT_TRUE(ring_->Run(product).status.ok());
  EXPECT_GE(device_->synchronizations(), waited + 2);
  EXPECT_LE(device_->synchronizations(), waited + 10);
  EXPECT_EQ(device_->imported(), 1);
  // One that returns its result to the host waits.
  const std::string sent = Expected("layer", Bytes(kX, 2 * kK * 2), kK);
  EXPECT_EQ(sent, expected);
}

TEST_F(DeviceMemoryRingTest, AwqctlBenchesIt) {
  bench::Plan plan;
  plan.weights = {{.model = "tiny", .weight = "layer", .k = kK, .n = kN}};
  plan.tokens = {{.tokens = 1}, {.tokens = 3}};
  plan.gpu = 0;
  plan.points = {{.concurrency = 1}, {.concurrency = 40}};
  plan.warmup = absl::ZeroDuration();
  plan.duration = absl::Milliseconds(200);
  plan.channels = 2;
  for (const bool by_ring : {false, true}) {
    plan.ring_path = by_ring ? ring_path_ : "";
    std::vector<bench::PointResult> results;
    const absl::Status ran = bench::RunBench(
        {.address = absl::StrCat("127.0.0.1:", server_->port())}, plan,
        [](const bench::LoadPoint&, const bench::LoadProgress&) { return true; }, &results);
    ASSERT_TRUE(ran.ok()) << ran;
    ASSERT_EQ(results.size(), 2u);
    for (const bench::PointResult& result : results) {
      EXPECT_GT(result.load.tally.answers[0], 0);
      EXPECT_EQ(result.load.tally.errors(), 0) << result.load.tally.first_message[3];
    }
    EXPECT_TRUE(Eventually([&] { return device_->imported() == 0; }));
  }
  plan.gpu = 1;
  std::vector<bench::PointResult> results;
  EXPECT_THAT(bench::RunBench({.address = absl::StrCat("127.0.0.1:", server_->port())}, plan,
                              nullptr, &results)
                  .ToString(),
              HasSubstr("memory of a GPU: GPU 1: CUDA_ERROR_INVALID_VALUE"));
}

}  // namespace
}  // namespace awqd
