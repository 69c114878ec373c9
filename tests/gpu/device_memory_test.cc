// Memory of a GPU that this process shares with a server of its own: products have the bits of
// messages wherever tensors begin, events order them, and neither wrong handles nor clients and
// servers that are killed harm anybody. By rings too, with descriptors, chains and early answers; it
// prints what those take.
#include "client/device_memory.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "client/ring.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/unique_fd.h"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

constexpr int64_t kK = 1024, kN = 1536;
constexpr size_t kBytes = size_t{32} << 20;
// The process that a test kills finds the server's address there.
constexpr char kClientOf[] = "AWQD_TEST_CLIENT_OF";

std::string DeviceSpec() {
  const char* const spec = std::getenv("AWQD_TEST_DEVICE");
  return spec == nullptr ? "" : spec;
}

int DeviceIndex() {
  int index = 0;
  return absl::SimpleAtoi(absl::StripPrefix(DeviceSpec(), "cuda:"), &index) ? index : 0;
}

// Memory of the GPU, and the request that shares all of it.
class Exported {
 public:
  Exported() {
    Check(cudaSetDevice(DeviceIndex()));
    Check(cudaMalloc(&data_, kBytes));
    Check(cudaMemset(data_, 0x5a, kBytes));
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    constexpr unsigned kFlags = cudaEventDisableTiming | cudaEventInterprocess;
    Check(cudaEventCreateWithFlags(&ready_, kFlags));
    Check(cudaEventCreateWithFlags(&finished_, kFlags));
  }
  ~Exported() {
    cudaEventDestroy(ready_);
    cudaEventDestroy(finished_);
    cudaStreamDestroy(stream_);
    cudaFree(data_);
  }

  v1::ShareMemoryRequest Request(const std::string& name, bool with_event = false) const {
    cudaIpcMemHandle_t memory;
    Check(cudaIpcGetMemHandle(&memory, data_));
    char bus_id[32] = {};
    Check(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), DeviceIndex()));
    v1::ShareMemoryRequest out;
    out.set_region(name);
    out.set_device(bus_id);
    out.set_cuda_ipc_memory(std::string(reinterpret_cast<const char*>(&memory), sizeof(memory)));
    out.set_size(kBytes);
    if (with_event) {
      cudaIpcEventHandle_t event;
      Check(cudaIpcGetEventHandle(&event, ready_));
      out.set_ready_event(std::string(reinterpret_cast<const char*>(&event), sizeof(event)));
    }
    return out;
  }
  // A region whose calls are answered before the GPU is done.
  v1::ShareMemoryRequest EarlyRequest(const std::string& name) const {
    v1::ShareMemoryRequest out = Request(name);
    cudaIpcEventHandle_t event;
    Check(cudaIpcGetEventHandle(&event, finished_));
    out.set_finished_event(std::string(reinterpret_cast<const char*>(&event), sizeof(event)));
    out.set_early_answers(true);
    return out;
  }
  void Write(int64_t offset, const std::string& bytes) const {
    Check(cudaMemcpy(At(offset), bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  }
  std::string Read(int64_t offset, size_t size) const {
    std::string out(size, '\0');
    Check(cudaMemcpy(out.data(), At(offset), size, cudaMemcpyDeviceToHost));
    return out;
  }
  char* At(int64_t offset) const { return static_cast<char*>(data_) + offset; }
  cudaStream_t stream() const { return stream_; }
  cudaEvent_t ready() const { return ready_; }
  cudaEvent_t finished() const { return finished_; }

  static void Check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorName(error); }

 private:
  void* data_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t ready_ = nullptr, finished_ = nullptr;
};

v1::SharedMemory RangeOf(int64_t offset, size_t size, const std::string& region = "r") {
  v1::SharedMemory out;
  out.set_region(region);
  out.set_offset(offset);
  out.set_size(static_cast<int64_t>(size));
  return out;
}

class GpuDeviceMemoryTest : public ServerTest {
 protected:
  void SetUp() override {
    if (!absl::StartsWith(DeviceSpec(), "cuda:")) {
      GTEST_SKIP() << "needs AWQD_TEST_DEVICE with a GPU";
    }
    SyntheticAwq::Random(kK, kN, 128, 1).Write(repository_ / "m");
    SyntheticAwq::Random(kN, kK, 128, 2).Write(repository_ / "back");
    exported_.emplace();
    StartOnGpu();
  }
  void StartOnGpu() {
    Start({"--device=" + DeviceSpec(), "--batch_invariant", "--cuda_shared_memory",
           "--ring_path=" + ring_path_});
  }

  // A product whose activations begin at `x` and whose result begins at `y`, of bytes.
  client::MatmulCall SharedCall(const client::MatmulCall& call, int64_t x, int64_t y,
                                const std::string& region = "r") const {
    client::MatmulCall out = call;
    exported_->Write(x, call.activations.bytes);
    out.shared_activations = RangeOf(x, call.activations.bytes.size(), region);
    out.shared_output = RangeOf(y, call.activations.shape[0] * kN * 2, region);
    out.activations.bytes.clear();
    return out;
  }
  TempFolder folder_;
  const std::string ring_path_ = folder_ / "ring.sock";
  std::optional<const Exported> exported_;  // there is a GPU
};

TEST_F(GpuDeviceMemoryTest, ProductsHaveTheBitsOfMessages) {
  const auto region = client_->ShareMemory(exported_->Request("r"));
  ASSERT_TRUE(region.ok()) << region.status();
  for (const v1::DType dtype : {v1::FP16, v1::BF16}) {
    for (const int64_t tokens : {1, 7, 64, 300, 2500}) {
      const client::MatmulCall call = LayerCall(tokens, kK, dtype);
      const auto sent = client_->QuantizedMatmul(call);
      ASSERT_TRUE(sent.ok()) << sent.status();
      // Aligned as kernels want it, as vectors, as elements.
      for (const auto& [x, y] : {std::pair<int64_t, int64_t>{512, 16 << 20},
                                 {528, (16 << 20) + 16},
                                 {514, (16 << 20) + 2},
                                 {0, (16 << 20) + 258}}) {
        SCOPED_TRACE(absl::StrCat(tokens, " tokens at ", x, " and ", y));
        const size_t y_bytes = tokens * kN * 2;
        exported_->Write(y - 256, std::string(y_bytes + 512, '\x5a'));
        const auto got = client_->QuantizedMatmul(SharedCall(call, x, y));
        ASSERT_TRUE(got.ok()) << got.status();
        EXPECT_EQ(exported_->Read(y, y_bytes), sent->output.bytes);
        EXPECT_EQ(exported_->Read(y - 256, 256), std::string(256, '\x5a'));
        EXPECT_EQ(exported_->Read(y + static_cast<int64_t>(y_bytes), 256),
                  std::string(256, '\x5a'));
      }
    }
  }
}

// Some callers share memory, others do not; all run in batches together.
TEST_F(GpuDeviceMemoryTest, ManyCallersHaveTheirOwnRows) {
  const auto region = client_->ShareMemory(exported_->Request("r"));
  ASSERT_TRUE(region.ok()) << region.status();
  constexpr int kCallers = 24, kCalls = 40;
  std::vector<client::MatmulCall> calls;
  std::vector<std::string> expected;
  for (int i = 0; i < kCallers; ++i) {
    calls.push_back(LayerCall(1 + i % 5, kK, v1::FP16));
    const auto sent = client_->QuantizedMatmul(calls.back());
    ASSERT_TRUE(sent.ok()) << sent.status();
    expected.push_back(sent->output.bytes);
  }
  std::atomic<int64_t> merged{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) {
    callers.emplace_back([&, i] {
      Exported::Check(cudaSetDevice(DeviceIndex()));
      const auto own = server_->NewClient();
      const int64_t x = int64_t{i} << 19, y = x + (256 << 10) + 256 * (i % 2) + 2 * (i % 3);
      const client::MatmulCall call = i % 3 == 2 ? calls[i] : SharedCall(calls[i], x, y);
      for (int n = 0; n < kCalls; ++n) {
        const auto got = own->QuantizedMatmul(call);
        ASSERT_TRUE(got.ok()) << got.status();
        merged += got->execution.batch_requests() > 1 ? 1 : 0;
        const std::string bytes =
            i % 3 == 2 ? got->output.bytes : exported_->Read(y, expected[i].size());
        ASSERT_EQ(bytes, expected[i]) << "caller " << i << ", call " << n;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_GT(merged, 0);
}

// The stream writes the activations a while after the call was made.
TEST_F(GpuDeviceMemoryTest, KernelsWaitForTheCallersStream) {
  const auto region = client_->ShareMemory(exported_->Request("r", /*with_event=*/true));
  ASSERT_TRUE(region.ok()) << region.status();
  const client::MatmulCall call = LayerCall(4, kK, v1::FP16);
  const auto sent = client_->QuantizedMatmul(call);
  ASSERT_TRUE(sent.ok()) << sent.status();
  const client::MatmulCall shared = SharedCall(call, 0, 16 << 20);
  const std::string& x = call.activations.bytes;
  for (int i = 0; i < 20; ++i) {
    exported_->Write(0, std::string(x.size(), '\0'));
    Exported::Check(cudaLaunchHostFunc(
        exported_->stream(), [](void*) { usleep(20'000); }, nullptr));
    Exported::Check(cudaMemcpyAsync(exported_->At(0), x.data(), x.size(), cudaMemcpyHostToDevice,
                                    exported_->stream()));
    Exported::Check(cudaEventRecord(exported_->ready(), exported_->stream()));
    const auto got = client_->QuantizedMatmul(shared);
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_EQ(exported_->Read(16 << 20, sent->output.bytes.size()), sent->output.bytes);
  }
}

TEST_F(GpuDeviceMemoryTest, RingsReachItToo) {
  const auto region = client_->ShareMemory(exported_->Request("r"));
  ASSERT_TRUE(region.ok()) << region.status();
  auto ring = client::Ring::Open({.path = ring_path_});
  ASSERT_TRUE(ring.ok()) << ring.status();
  const client::MatmulCall call = LayerCall(1, kK, v1::FP16);
  const auto sent = client_->QuantizedMatmul(call);
  const auto prepared = (*ring)->Prepare(SharedCall(call, 0, 16 << 20));
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  std::vector<absl::Duration> times;
  for (int i = 0; i < 3000; ++i) {
    const absl::Time begin = absl::Now();
    const client::RingAnswer got =
        (*ring)->Run({.call = prepared->number, .tokens = 1, .x_offset = 0, .y_offset = 16 << 20});
    times.push_back(absl::Now() - begin);
    ASSERT_TRUE(got.status.ok()) << got.status;
  }
  EXPECT_EQ(exported_->Read(16 << 20, sent->output.bytes.size()), sent->output.bytes);
  std::sort(times.begin(), times.end());
  std::printf("ring, one token of %ld x %ld on the GPU: p50 %.1f us, p99 %.1f us\n", kK, kN,
              absl::ToDoubleMicroseconds(times[times.size() / 2]),
              absl::ToDoubleMicroseconds(times[times.size() * 99 / 100]));
}

// Medians of a call's time.
template <typename Call>
double MedianUs(Call call) {
  std::vector<double> us;
  for (int i = 0; i < 2000; ++i) {
    const absl::Time begin = absl::Now();
    call();
    us.push_back(absl::ToDoubleMicroseconds(absl::Now() - begin));
  }
  std::nth_element(us.begin(), us.begin() + 1000, us.end());
  return us[1000];
}

// Memory of the driver's own, in which a chain keeps what its steps pass on.
TEST_F(GpuDeviceMemoryTest, DescriptorsByTheRing) {
  using client::DeviceMemory;
  const auto memory =
      DeviceMemory::Allocate(DeviceIndex(), kBytes, DeviceMemory::Kind::kDescriptor);
  ASSERT_TRUE(memory.ok()) << memory.status();
  auto opened = client::Ring::Open({.path = ring_path_});
  ASSERT_TRUE(opened.ok()) << opened.status();
  client::Ring& ring = **opened;
  const auto refuse = [&](const v1::ShareMemoryRequest& request, int fd, const std::string& why) {
    const absl::Status status = ring.ShareMemory(request, fd);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(why));
  };
  v1::ShareMemoryRequest lie = (*memory)->Request("r");
  lie.set_size(kBytes + 1);
  refuse(lie, (*memory)->descriptor(), "descriptor: got memory that has not");
  lie.set_size(int64_t{1} << 62);
  refuse(lie, (*memory)->descriptor(), "descriptor: got memory of");
  for (const char* path : {"/dev/null", "/proc/self/exe"}) {
    const UniqueFd file(open(path, O_RDONLY | O_CLOEXEC));
    refuse((*memory)->Request("r"), file.get(), "descriptor: got a descriptor that");
  }
  ASSERT_TRUE(ring.ShareMemory((*memory)->Request("r"), (*memory)->descriptor()).ok());

  for (const int64_t tokens : {1, 7, 64, 300}) {
    client::MatmulCall call = LayerCall(tokens, kK, v1::FP16);
    const auto middle = client_->QuantizedMatmul(call);
    ASSERT_TRUE(middle.ok()) << middle.status();
    client::MatmulCall back = call;
    back.weight = client::WeightName{"back", "layer"};
    back.activations = middle->output;
    const auto end = client_->QuantizedMatmul(back);
    ASSERT_TRUE(end.ok()) << end.status();
    ASSERT_TRUE((*memory)->Write(0, call.activations.bytes).ok());
    for (client::MatmulCall* const one : {&call, &back}) {
      one->activations.bytes.clear();
      one->shared_activations = one->shared_output = DeviceMemory::Range("r", 0, 0);
    }
    const auto first = ring.Prepare(call), second = ring.Prepare(back);
    ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
    const auto chain = ring.PrepareChain({{*first}, {*second, 1}, {*first, 2}, {*second, 3}});
    ASSERT_TRUE(chain.ok()) << chain.status();
    client::RingCall run = {.call = first->number, .tokens = tokens, .y_offset = 16 << 20};
    const auto y_bytes =
        static_cast<int64_t>(middle->output.bytes.size() + end->output.bytes.size());
    const double single_us = MedianUs([&] { ASSERT_TRUE(ring.Run(run).status.ok()); });
    EXPECT_EQ(*(*memory)->Read(16 << 20, static_cast<int64_t>(middle->output.bytes.size())),
              middle->output.bytes);
    run.call = chain->number;
    const double chain_us = MedianUs([&] { ASSERT_TRUE(ring.Run(run).status.ok()); });
    EXPECT_EQ(*(*memory)->Read(16 << 20, y_bytes), middle->output.bytes + end->output.bytes);
    std::printf(
        "ring, %ld tokens of %ld x %ld in a descriptor's memory: p50 %.1f us; a chain of "
        "four %.1f us\n",
        tokens, kK, kN, single_us, chain_us);
  }
}

// The stream waits for the event in place of the host.
TEST_F(GpuDeviceMemoryTest, EarlyAnswersAreOrderedByTheirEvent) {
  auto ring = client::Ring::Open({.path = ring_path_});
  ASSERT_TRUE(ring.ok()) << ring.status();
  const client::MatmulCall call = LayerCall(300, kK, v1::FP16);
  const auto sent = client_->QuantizedMatmul(call);
  ASSERT_TRUE(sent.ok()) << sent.status();
  const std::string& expected = sent->output.bytes;
  double us[2] = {};
  for (const bool early : {false, true}) {
    const auto region =
        client_->ShareMemory(early ? exported_->EarlyRequest("r") : exported_->Request("r"));
    ASSERT_TRUE(region.ok()) << region.status();
    const auto prepared = (*ring)->Prepare(SharedCall(call, 0, 16 << 20));
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    const client::RingCall run = {
        .call = prepared->number, .tokens = 300, .x_offset = 0, .y_offset = 16 << 20};
    us[early ? 1 : 0] = MedianUs([&] { ASSERT_TRUE((*ring)->Run(run).status.ok()); });
    std::string got(expected.size(), '\0');
    for (int i = 0; i < 200; ++i) {
      Exported::Check(
          cudaMemsetAsync(exported_->At(16 << 20), 0xee, expected.size(), exported_->stream()));
      Exported::Check(cudaStreamSynchronize(exported_->stream()));
      if (i % 2 == 0) {
        ASSERT_TRUE((*ring)->Run(run).status.ok());
      } else {
        ASSERT_TRUE(client_->QuantizedMatmul(SharedCall(call, 0, 16 << 20)).ok());
      }
      if (early) {
        Exported::Check(cudaStreamWaitEvent(exported_->stream(), exported_->finished(), 0));
      }
      Exported::Check(cudaMemcpyAsync(got.data(), exported_->At(16 << 20), got.size(),
                                      cudaMemcpyDeviceToHost, exported_->stream()));
      Exported::Check(cudaStreamSynchronize(exported_->stream()));
      ASSERT_EQ(got, expected) << i;
    }
  }
  std::printf("ring, 300 tokens of %ld x %ld: p50 %.1f us, with early answers %.1f us\n", kK, kN,
              us[0], us[1]);
  // The region has ended under early work; others go on.
  EXPECT_EQ(client_->QuantizedMatmul(call)->output.bytes, expected);
}

// A region that ends right behind early answers: its memory stays mapped until the GPU is done.
TEST_F(GpuDeviceMemoryTest, RegionsThatEndUnderEarlyWork) {
  const client::MatmulCall call = LayerCall(2500, kK, v1::FP16);
  const auto sent = client_->QuantizedMatmul(call);
  for (int i = 0; i < 30; ++i) {
    Exported own;
    auto ring = client::Ring::Open({.path = ring_path_});
    ASSERT_TRUE(ring.ok()) << ring.status();
    // A name of its own: the server may hear of the last ring's end after this.
    const std::string name = absl::StrCat("r", i);
    const absl::Status shared = (*ring)->ShareMemory(own.EarlyRequest(name));
    ASSERT_TRUE(shared.ok()) << shared;
    const auto prepared = (*ring)->Prepare(SharedCall(call, 0, 16 << 20, name));
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    for (int n = 0; n < 20; ++n) {
      const client::RingAnswer answer =
          (*ring)->Run({.call = prepared->number, .tokens = 2500, .y_offset = 16 << 20});
      ASSERT_TRUE(answer.status.ok()) << answer.status;
    }
  }
  const auto got = client_->QuantizedMatmul(call);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->output.bytes, sent->output.bytes);
}

// A host may wait for a short kernel by its stream, or by a word that the stream writes.
TEST(GpuHostWait, HowLongItTakes) {
  if (!absl::StartsWith(DeviceSpec(), "cuda:")) GTEST_SKIP() << "needs AWQD_TEST_DEVICE with a GPU";
  using WriteValue = int (*)(cudaStream_t, unsigned long long, uint32_t, unsigned);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  Exported::Check(cudaSetDevice(DeviceIndex()));
  Exported::Check(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &function, 12000,
                                                   cudaEnableDefault, &found));
  ASSERT_NE(function, nullptr);
  const auto write = reinterpret_cast<WriteValue>(function);
  const Exported memory;
  void* word = nullptr;
  Exported::Check(cudaHostAlloc(&word, sizeof(uint32_t), cudaHostAllocMapped));
  uint32_t count = 0;
  const auto work = [&] {
    Exported::Check(cudaMemsetAsync(memory.At(0), 0, 4096, memory.stream()));
  };
  const double stream_us = MedianUs([&] {
    work();
    Exported::Check(cudaStreamSynchronize(memory.stream()));
  });
  const double word_us = MedianUs([&] {
    work();
    ASSERT_EQ(write(memory.stream(), reinterpret_cast<unsigned long long>(word), ++count, 0), 0);
    while (__atomic_load_n(static_cast<uint32_t*>(word), __ATOMIC_ACQUIRE) != count) {
    }
  });
  EXPECT_EQ(*static_cast<uint32_t*>(word), count);
  std::printf("a short kernel and its wait: p50 %.1f us by the stream, %.1f us by a word\n",
              stream_us, word_us);
  cudaFreeHost(word);
}

TEST_F(GpuDeviceMemoryTest, WrongHandlesAreRefusedAndHarmNobody) {
  std::mt19937 random(3);
  const v1::ShareMemoryRequest good = exported_->Request("r", true);
  const auto refuse = [&](const v1::ShareMemoryRequest& request) {
    const absl::Status status = client_->ShareMemory(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  };
  for (int i = 0; i < 20; ++i) {
    v1::ShareMemoryRequest request = good;
    std::string* const handle =
        i % 2 == 0 ? request.mutable_cuda_ipc_memory() : request.mutable_ready_event();
    for (char& byte : *handle) byte = static_cast<char>(random());
    refuse(request);
  }
  v1::ShareMemoryRequest request = good;
  request.set_size(kBytes * 64);
  refuse(request);
  request = good;
  request.set_device("cuda:63");
  refuse(request);
  const auto region = client_->ShareMemory(good);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_TRUE(client_->QuantizedMatmul(SharedCall(LayerCall(1, kK, v1::FP16), 0, 1 << 20)).ok());
}

// The client of the next test: shares memory and calls until it is killed.
TEST(GpuDeviceMemoryClient, CallsUntilItIsKilled) {
  const char* const address = std::getenv(kClientOf);
  if (address == nullptr) GTEST_SKIP() << "a part of AKilledClientLeavesNothing";
  const Exported exported;
  const auto client = *client::Client::Create({.address = address});
  // The parent asks for the same name for a moment, to see whether it is taken.
  auto region = client->ShareMemory(exported.Request("r"));
  ASSERT_TRUE(Eventually([&] {
    if (!region.ok()) region = client->ShareMemory(exported.Request("r"));
    return region.ok();
  })) << region.status();
  client::MatmulCall call = LayerCall(3, kK, v1::FP16);
  call.shared_activations = RangeOf(0, call.activations.bytes.size());
  call.shared_output = RangeOf(1 << 20, 3 * kN * 2);
  call.activations.bytes.clear();
  while (true) ASSERT_TRUE(client->QuantizedMatmul(call).ok());
}

TEST_F(GpuDeviceMemoryTest, AKilledClientLeavesNothing) {
  size_t before = 0, after = 0, total = 0;
  Exported::Check(cudaMemGetInfo(&before, &total));
  for (int i = 0; i < 5; ++i) {
    setenv(kClientOf, server_->address().c_str(), 1);
    std::string self = "/proc/self/exe";
    std::string filter = "--gtest_filter=GpuDeviceMemoryClient.*";
    char* const argv[] = {self.data(), filter.data(), nullptr};
    pid_t client = 0;
    ASSERT_EQ(posix_spawn(&client, self.c_str(), nullptr, nullptr, argv, environ), 0);
    unsetenv(kClientOf);
    // Its region has the name that nobody else may register then.
    EXPECT_TRUE(Eventually([&] {
      return absl::IsAlreadyExists(client_->ShareMemory(exported_->Request("r")).status());
    }));
    absl::SleepFor(absl::Milliseconds(20 * i));
    kill(client, SIGKILL);
    ASSERT_EQ(waitpid(client, nullptr, 0), client);
    EXPECT_TRUE(Eventually([&] { return client_->ShareMemory(exported_->Request("r")).ok(); }));
  }
  EXPECT_TRUE(Eventually([&] {
    Exported::Check(cudaMemGetInfo(&after, &total));
    return after + (size_t{64} << 20) >= before;
  })) << before
      << " bytes were free before, " << after << " after";
  EXPECT_TRUE(client_->QuantizedMatmul(LayerCall(1, kK, v1::FP16)).ok());
}

TEST_F(GpuDeviceMemoryTest, AKilledServerLeavesTheMemory) {
  const client::MatmulCall call = LayerCall(5, kK, v1::FP16);
  std::string expected;
  for (int i = 0; i < 3; ++i) {
    const auto region = client_->ShareMemory(exported_->Request("r"));
    ASSERT_TRUE(region.ok()) << region.status();
    const auto got = client_->QuantizedMatmul(SharedCall(call, 0, 1 << 20));
    ASSERT_TRUE(got.ok()) << got.status();
    const std::string bytes = exported_->Read(1 << 20, 5 * kN * 2);
    if (i == 0) expected = bytes;
    EXPECT_EQ(bytes, expected);
    server_->Signal(SIGKILL);
    EXPECT_TRUE(Eventually([&] { return !(*region)->alive(); }));
    server_->Wait();
    EXPECT_EQ(exported_->Read(1 << 20, 5 * kN * 2), expected);
    StartOnGpu();
  }
}

// Nothing else than its own results may suffer where a client frees memory that is in use.
TEST_F(GpuDeviceMemoryTest, MemoryThatIsFreedUnderCallsHarmsNobody) {
  const client::MatmulCall call = LayerCall(2, kK, v1::FP16);
  const auto sent = client_->QuantizedMatmul(call);
  for (int i = 0; i < 10; ++i) {
    auto freed = std::make_unique<Exported>();
    const auto region = client_->ShareMemory(freed->Request("r"));
    ASSERT_TRUE(region.ok()) << region.status();
    client::MatmulCall shared = call;
    shared.shared_activations = RangeOf(0, call.activations.bytes.size());
    shared.shared_output = RangeOf(1 << 20, 2 * kN * 2);
    shared.activations.bytes.clear();
    std::thread caller([&] {
      const auto own = server_->NewClient();
      for (int n = 0; n < 50; ++n) own->QuantizedMatmul(shared).IgnoreError();
    });
    absl::SleepFor(absl::Milliseconds(5));
    freed.reset();
    for (int n = 0; n < 20; ++n) {
      const auto got = client_->QuantizedMatmul(call);
      ASSERT_TRUE(got.ok()) << got.status();
      ASSERT_EQ(got->output.bytes, sent->output.bytes);
    }
    caller.join();
  }
}

}  // namespace
}  // namespace awqd
