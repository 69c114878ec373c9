// libawqd on a GPU: products on the caller's stream give the goldens, and a CUDA graph that captured
// them the same bits, whatever else the workspace served.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/library/awqd.h"
#include "tests/gpu/library_check.h"
#include "tests/testing/npy.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

constexpr char kGate[] = "encoder.layer.0.intermediate.dense";
constexpr char kDown[] = "encoder.layer.0.output.dense";
constexpr int64_t kK = 384, kN = 1536;

testing::Npy Golden(const std::string& name) {
  auto npy = testing::ReadNpy(DataPath("awq/goldens/" + name + ".npy"));
  EXPECT_TRUE(npy.ok()) << npy.status();
  return *std::move(npy);
}

class GpuLibraryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* const name = std::getenv("AWQD_TEST_DEVICE");
    if (name == nullptr || std::string(name).find("cuda") != 0) {
      GTEST_SKIP() << "AWQD_TEST_DEVICE names no GPU";
    }
    Check(awqd_device_open(name, nullptr, &device_));
    Check(awqd_checkpoint_open(DataPath("awq/all-MiniLM-L6-v2-awq").c_str(), &checkpoint_));
    Check(awqd_weight_load(device_, checkpoint_, kGate, &gate_));
    Check(awqd_weight_load(device_, checkpoint_, kDown, &down_));
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    const testing::Npy activations = Golden("activations_384");
    m_ = activations.shape[0];
    x_ = Allocate(static_cast<int64_t>(activations.bytes.size()));
    Check(
        cudaMemcpy(x_, activations.bytes.data(), activations.bytes.size(), cudaMemcpyHostToDevice));
    y_ = Allocate(m_ * kN * 4);
    workspace_ = {Allocate(kWorkspace), kWorkspace};
    Check(awqd_workspace_init(device_, workspace_, stream_));
  }
  void TearDown() override {
    if (stream_ != nullptr) Check(cudaStreamSynchronize(stream_));
    for (void* memory : memory_) Check(cudaFree(memory));
    awqd_weight_free(gate_);
    awqd_weight_free(down_);
    awqd_checkpoint_close(checkpoint_);
    awqd_device_close(device_);
    if (stream_ != nullptr) Check(cudaStreamDestroy(stream_));
  }

  void* Allocate(int64_t bytes) {
    void* out = nullptr;
    Check(cudaMalloc(&out, bytes));
    memory_.push_back(out);
    return out;
  }

  void Multiply(int32_t path) {
    awqd_matmul_args args = AWQD_INIT(args);
    args.m = m_, args.x = x_, args.y = y_, args.path = path;
    args.x_dtype = AWQD_FP16, args.y_dtype = AWQD_FP32;
    int64_t bytes = 0;
    Check(awqd_matmul_workspace(gate_, &args, &bytes));
    ASSERT_LE(bytes, kWorkspace);
    Check(awqd_matmul(gate_, &args, workspace_, stream_));
  }
  void RunMlp() {
    awqd_gated_mlp_args args = AWQD_INIT(args);
    args.gate = args.up = gate_, args.down = down_;
    args.m = m_, args.x = x_, args.y = y_, args.activation = AWQD_SILU;
    args.x_dtype = AWQD_FP16, args.y_dtype = AWQD_FP32;
    Check(awqd_gated_mlp(&args, workspace_, stream_));
  }

  // y, once the stream has computed it; then it is overwritten.
  std::vector<float> Fetch(int64_t columns) {
    std::vector<float> out(m_ * columns);
    Check(cudaStreamSynchronize(stream_));
    Check(cudaMemcpy(out.data(), y_, out.size() * 4, cudaMemcpyDeviceToHost));
    Check(cudaMemset(y_, 0xff, out.size() * 4));
    Check(cudaDeviceSynchronize());
    return out;
  }

  static constexpr int64_t kWorkspace = int64_t{64} << 20;
  awqd_device* device_ = nullptr;
  awqd_checkpoint* checkpoint_ = nullptr;
  awqd_weight *gate_ = nullptr, *down_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::vector<void*> memory_;
  int64_t m_ = 0;
  void *x_ = nullptr, *y_ = nullptr;
  awqd_workspace workspace_ = {};
};

TEST_F(GpuLibraryTest, ProductsAreTheGoldens) {
  const testing::Npy golden = Golden(std::string(kGate) + ".matmul");
  for (const int32_t path : {AWQD_PATH_AUTO, AWQD_PATH_FUSED, AWQD_PATH_DEQUANTIZE}) {
    Multiply(path);
    const std::vector<float> y = Fetch(kN);
    for (size_t i = 0; i < y.size(); ++i) {
      ASSERT_NEAR(y[i], golden.At<double>(static_cast<int64_t>(i)), 1e-2) << i;
    }
  }
}

TEST_F(GpuLibraryTest, TheDefaultStreamGivesTheSameBits) {
  Multiply(AWQD_PATH_FUSED);
  const std::vector<float> expected = Fetch(kN);
  const cudaStream_t own = std::exchange(stream_, nullptr);
  Multiply(AWQD_PATH_FUSED);
  EXPECT_EQ(Fetch(kN), expected);
  stream_ = own;
}

TEST_F(GpuLibraryTest, AGraphGivesTheBitsOfTheCalls) {
  RunMlp();
  const std::vector<float> expected = Fetch(kK);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t run = nullptr;
  Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  RunMlp();
  Check(cudaStreamEndCapture(stream_, &graph));
  Check(cudaGraphInstantiate(&run, graph, 0));
  for (int i = 0; i < 20; ++i) {
    Check(cudaGraphLaunch(run, stream_));
    EXPECT_EQ(Fetch(kK), expected) << i;
    Multiply(AWQD_PATH_AUTO);  // the same workspace between two launches
  }
  Check(cudaStreamSynchronize(stream_));
  Check(cudaGraphExecDestroy(run));
  Check(cudaGraphDestroy(graph));
}

}  // namespace
}  // namespace awqd
