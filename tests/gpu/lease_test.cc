// Weights on a GPU that a server lends to this process: the bits of the RPC through reload, unload
// and the server's death, and in a CUDA graph; a borrower that stores dies alone; what a lease of a
// large model costs in time and memory; and that freeing lent memory waits for no other work.
#include <cuda_runtime_api.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/kernels.h"
#include "kernels/lending/arena.h"
#include "kernels/library/awqd.h"
#include "kernels/library/objects.h"
#include "tests/e2e/server_test.h"
#include "tests/gpu/safetensors_header.h"

namespace awqd {
namespace {

constexpr int64_t kK = 1024, kN = 1536;
// The process that stores finds the lender's path there.
constexpr char kStoreAt[] = "AWQD_TEST_STORE_AT";

std::string DeviceSpec() {
  const char* const spec = std::getenv("AWQD_TEST_DEVICE");
  return spec == nullptr ? "" : spec;
}

void Check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

int64_t FreeDeviceBytes() {
  size_t free = 0, total = 0;
  Check(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(free);
}

// A lease, a weight of it, and a stream with memory for products.
class Borrower {
 public:
  Borrower(const std::string& path, const std::string& linear, int64_t n = kN) : n_(n) {
    EXPECT_EQ(awqd_device_open(DeviceSpec().c_str(), nullptr, &device_), AWQD_OK)
        << awqd_error_message();
    code_ = awqd_lease_open(device_, path.c_str(), "m", nullptr, &lease_);
    if (code_ != AWQD_OK) return;
    EXPECT_EQ(awqd_lease_weight(lease_, linear.c_str(), &weight_), AWQD_OK) << awqd_error_message();
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    Check(cudaMalloc(&memory_, kBytes));
    workspace_ = {static_cast<char*>(memory_) + kBytes / 2, kBytes / 2};
    EXPECT_EQ(awqd_workspace_init(device_, workspace_, stream_), AWQD_OK);
  }
  ~Borrower() {
    if (stream_ != nullptr) Check(cudaStreamSynchronize(stream_));
    awqd_weight_free(weight_);
    awqd_lease_close(lease_);
    awqd_device_close(device_);
    if (memory_ != nullptr) Check(cudaFree(memory_));
    if (stream_ != nullptr) Check(cudaStreamDestroy(stream_));
  }

  int code() const { return code_; }
  const DeviceWeight& weight() const { return *weight_->weight; }
  cudaStream_t stream() const { return stream_; }

  void Enqueue(int64_t m) {
    awqd_matmul_args args = AWQD_INIT(args);
    args.m = m, args.x = memory_, args.y = y();
    args.x_dtype = args.y_dtype = AWQD_FP16;
    args.path = AWQD_PATH_FUSED;  // as LayerCall says
    EXPECT_EQ(awqd_matmul(weight_, &args, workspace_, stream_), AWQD_OK) << awqd_error_message();
  }
  std::string Multiply(const client::Tensor& x) {
    Check(
        cudaMemcpyAsync(memory_, x.bytes.data(), x.bytes.size(), cudaMemcpyHostToDevice, stream_));
    Enqueue(x.shape[0]);
    return Fetch(x.shape[0]);
  }
  std::string Fetch(int64_t m) {
    std::string out(m * n_ * 2, '\0');
    Check(cudaMemcpyAsync(out.data(), y(), out.size(), cudaMemcpyDeviceToHost, stream_));
    Check(cudaStreamSynchronize(stream_));
    return out;
  }

 private:
  static constexpr int64_t kBytes = int64_t{640} << 20;
  void* y() const { return static_cast<char*>(memory_) + kBytes / 4; }

  const int64_t n_;
  awqd_device* device_ = nullptr;
  awqd_lease* lease_ = nullptr;
  awqd_weight* weight_ = nullptr;
  int code_ = 0;
  cudaStream_t stream_ = nullptr;
  void* memory_ = nullptr;
  awqd_workspace workspace_ = {};
};

class GpuLeaseTest : public ServerTest {
 protected:
  void SetUp() override {
    int index = 0;
    if (!absl::SimpleAtoi(absl::StripPrefix(DeviceSpec(), "cuda:"), &index)) {
      GTEST_SKIP() << "needs AWQD_TEST_DEVICE with a GPU";
    }
    Check(cudaSetDevice(index));
    Check(cudaFree(nullptr));
  }
  void StartSmall() {
    SyntheticAwq::Random(kK, kN, 128, 1).Write(repository_ / "m");
    Start({"--device=" + DeviceSpec(), "--lend=" + path_});
  }
  std::string ByRpc(const client::MatmulCall& call) const {
    const auto answer = client_->QuantizedMatmul(call);
    EXPECT_TRUE(answer.ok()) << answer.status();
    return answer.ok() ? answer->output.bytes : "";
  }

  TempFolder folder_;
  const std::string path_ = folder_ / "lend.sock";
  int64_t free_ = 0;
};

TEST_F(GpuLeaseTest, TheBitsOfTheRpcWhateverTheServerDoes) {
  StartSmall();
  Borrower borrower(path_, "layer");
  ASSERT_EQ(borrower.code(), AWQD_OK) << awqd_error_message();
  std::vector<client::MatmulCall> calls;
  std::vector<std::string> expected;
  for (const int64_t tokens : {1, 8, 33, 300}) {
    calls.push_back(LayerCall(tokens, kK, v1::FP16));
    expected.push_back(ByRpc(calls.back()));
  }
  const auto expect_same = [&](const char* when) {
    for (size_t i = 0; i < calls.size(); ++i) {
      EXPECT_TRUE(borrower.Multiply(calls[i].activations) == expected[i]) << i << " " << when;
    }
  };
  expect_same("first");
  SyntheticAwq::Random(kK, kN, 128, 2).Write(repository_ / "m");
  ASSERT_TRUE(client_->LoadModel("m").ok());
  EXPECT_NE(ByRpc(calls[0]), expected[0]);
  expect_same("after a reload");
  ASSERT_TRUE(client_->UnloadModel("m").ok());
  expect_same("after an unload");
  server_->Signal(SIGKILL);
  server_->Wait();
  expect_same("after the server's death");
}

TEST_F(GpuLeaseTest, InAGraph) {
  StartSmall();
  Borrower borrower(path_, "layer");
  ASSERT_EQ(borrower.code(), AWQD_OK) << awqd_error_message();
  const client::MatmulCall call = LayerCall(16, kK, v1::FP16);
  const std::string expected = borrower.Multiply(call.activations);
  EXPECT_TRUE(expected == ByRpc(call));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t run = nullptr;
  Check(cudaStreamBeginCapture(borrower.stream(), cudaStreamCaptureModeThreadLocal));
  borrower.Enqueue(16);
  Check(cudaStreamEndCapture(borrower.stream(), &graph));
  Check(cudaGraphInstantiate(&run, graph, 0));
  for (int i = 0; i < 5; ++i) {
    Check(cudaGraphLaunch(run, borrower.stream()));
    EXPECT_TRUE(borrower.Fetch(16) == expected) << i;
  }
  Check(cudaGraphExecDestroy(run));
  Check(cudaGraphDestroy(graph));
}

// Run by the next test in a process of its own.
TEST_F(GpuLeaseTest, DISABLED_Store) {
  const char* const path = std::getenv(kStoreAt);
  ASSERT_NE(path, nullptr);
  const Borrower borrower(path, "layer");
  ASSERT_EQ(borrower.code(), AWQD_OK) << awqd_error_message();
  cudaError_t error = cudaMemset(borrower.weight().storage.data(), 0, 256);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  _exit(error == cudaSuccess ? 7 : 8);
}

TEST_F(GpuLeaseTest, AStoreEndsTheBorrowerAlone) {
  StartSmall();
  const client::MatmulCall call = LayerCall(33, kK, v1::FP16);
  const std::string expected = ByRpc(call);
  Borrower borrower(path_, "layer");
  ASSERT_EQ(borrower.code(), AWQD_OK) << awqd_error_message();
  setenv(kStoreAt, path_.c_str(), 1);
  const ExitReport report = RunProgram(
      "/proc/self/exe", {"--gtest_filter=*DISABLED_Store", "--gtest_also_run_disabled_tests"},
      absl::Seconds(60));
  EXPECT_EQ(report.code, 8) << report.log;
  EXPECT_TRUE(ByRpc(call) == expected);
  EXPECT_TRUE(borrower.Multiply(call.activations) == expected);
}

TEST_F(GpuLeaseTest, FreeingWaitsForNoOtherWork) {
  const std::unique_ptr<Device> device = OpenDevice(DeviceSpec(), {}).value();
  const int64_t free = FreeDeviceBytes();
  auto arena = WeightArena::Create(*device, int64_t{1} << 30).value();
  EXPECT_EQ(arena->bytes(), int64_t{1} << 30);
  EXPECT_LE(FreeDeviceBytes(), free - arena->bytes());
  cudaStream_t stream = nullptr;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Check(cudaLaunchHostFunc(
      stream, [](void*) { absl::SleepFor(absl::Seconds(1)); }, nullptr));
  const absl::Time start = absl::Now();
  arena = nullptr;
  const absl::Duration took = absl::Now() - start;
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady) << "freed in " << took;
  std::printf("a GiB freed in %s beside other work\n", absl::FormatDuration(took).c_str());
  EXPECT_LT(took, absl::Milliseconds(500));
  EXPECT_EQ(device->UsedBytes(), 0);
  Check(cudaStreamSynchronize(stream));
  Check(cudaStreamDestroy(stream));
  EXPECT_GE(FreeDeviceBytes(), free - (int64_t{64} << 20));
}

// --- A large model: AWQD_TEST_LEASE_GIB, 16 by default ---

struct SparseMatrix {
  std::string name, dtype;
  int64_t rows, cols;
  int64_t bytes() const { return rows * cols * (dtype == "I32" ? 4 : 2); }
};

// A model of zeros, whose file takes no disk. Returns how many linears "layer.N" it has.
int64_t WriteSparseModel(const std::string& folder, int64_t bytes, int64_t k, int64_t n) {
  constexpr int64_t kGroup = 128;
  const int64_t layers = bytes / (k * n / 2);
  std::vector<SparseMatrix> matrices;
  int64_t total = 0;
  for (int64_t i = 0; i < layers; ++i) {
    const std::string path = absl::StrCat("layer.", i);
    matrices.push_back({path + ".qweight", "I32", k, n / 8});
    matrices.push_back({path + ".qzeros", "I32", k / kGroup, n / 8});
    matrices.push_back({path + ".scales", "F16", k / kGroup, n});
  }
  for (const SparseMatrix& matrix : matrices) total += matrix.bytes();
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/config.json")
      << R"({"model_type": "synthetic", "quantization_config": {"quant_method": "awq", "bits": 4, )"
      << R"("group_size": 128, "zero_point": true, "version": "gemm"}})";
  const std::string header = testing::SafetensorsHeader(matrices);
  const uint64_t length = header.size();
  const std::string file = folder + "/model.safetensors";
  std::ofstream(file, std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&length), 8) << header;
  std::filesystem::resize_file(file, 8 + header.size() + total);
  return layers;
}

TEST_F(GpuLeaseTest, ALargeModel) {
  constexpr int64_t kLargeK = 8192, kLargeN = 28672;
  const char* const wish = std::getenv("AWQD_TEST_LEASE_GIB");
  const int64_t gib = wish == nullptr ? 16 : std::atoi(wish);
  ASSERT_GT(WriteSparseModel(repository_ / "m", gib << 30, kLargeK, kLargeN), 0);
  const auto start_and_measure = [&](std::vector<std::string> flags) {
    flags.push_back("--device=" + DeviceSpec());
    server_ = nullptr;
    // Code that this process has loaded since may stay.
    const int64_t before = free_ - (int64_t{64} << 20);
    EXPECT_TRUE(Eventually([&] { return FreeDeviceBytes() >= before; })) << FreeDeviceBytes();
    server_ = std::make_unique<ServerProcess>(Args(flags));
    EXPECT_TRUE(server_->WaitServing(absl::Seconds(200))) << server_->log();
    return free_ - FreeDeviceBytes();
  };
  free_ = FreeDeviceBytes();
  const int64_t without = start_and_measure({});
  const int64_t lent = start_and_measure({"--lend=" + path_});
  const double growth = static_cast<double>(lent) / static_cast<double>(without) - 1;
  EXPECT_LT(growth, 0.02);
  {
    const Borrower first(path_, "layer.0", kLargeN);  // its kernels are loaded before
    ASSERT_EQ(first.code(), AWQD_OK) << awqd_error_message();
  }
  const int64_t before = FreeDeviceBytes();
  awqd_device* device = nullptr;
  awqd_lease* lease = nullptr;
  ASSERT_EQ(awqd_device_open(DeviceSpec().c_str(), nullptr, &device), AWQD_OK);
  absl::Time start = absl::Now();
  ASSERT_EQ(awqd_lease_open(device, path_.c_str(), "m", nullptr, &lease), AWQD_OK)
      << awqd_error_message();
  const absl::Duration attach = absl::Now() - start;
  start = absl::Now();
  EXPECT_EQ(awqd_lease_check(lease), AWQD_OK) << awqd_error_message();
  const absl::Duration check = absl::Now() - start;
  const int64_t attached = before - FreeDeviceBytes();
  awqd_lease_close(lease);
  awqd_device_close(device);
  // Open, lease and a product, in this process, which has a context.
  start = absl::Now();
  Borrower borrower(path_, "layer.0", kLargeN);
  const std::string y = borrower.Multiply(LayerCall(1, kLargeK, v1::FP16).activations);
  const absl::Duration product = absl::Now() - start;
  EXPECT_EQ(y, std::string(kLargeN * 2, '\0')) << "zeros times anything";
  std::printf(
      "%d GiB: %.2f %% more device memory with --lend; attach %s, check of contents %s, first "
      "product "
      "%s, %.2f MiB more for the borrower\n",
      static_cast<int>(gib), 100 * growth, absl::FormatDuration(attach).c_str(),
      absl::FormatDuration(check).c_str(), absl::FormatDuration(product).c_str(),
      static_cast<double>(attached) / (1 << 20));
  EXPECT_LT(attach, absl::Milliseconds(500));
  EXPECT_LT(product, absl::Milliseconds(500));
  EXPECT_LT(attached, (gib << 30) / 100);
}

}  // namespace
}  // namespace awqd
