// Tensors in shared memory against the real server: the same bits as through the socket, and
// clients that truncate objects or die.
#include "client/shared_memory.h"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

using client::SharedMemory;
using client::Tensor;
using client::WeightName;
using ::testing::HasSubstr;

constexpr int64_t kK = 256, kN = 4096;

class SharedMemoryE2eTest : public ServerTest {
 protected:
  ~SharedMemoryE2eTest() override {
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
      if (absl::StartsWith(entry.path().filename().string(), prefix_)) {
        std::filesystem::remove(entry.path());  // left by clients that were killed
      }
    }
  }
  void SetUp() override {
    SyntheticAwq::Random(kK, kN, 64, 1).Write(repository_ / "m");
    Start({"--shared_memory_prefix=" + prefix_}, "unix:" + (folder_ / "s"));
  }

  static client::MatmulCall Call(int64_t tokens, v1::DType dtype) {
    return LayerCall(tokens, kK, dtype);
  }

  // The call with its tensors in `memory`, from byte 64 on.
  static client::MatmulCall Share(client::MatmulCall call, const SharedMemory& memory) {
    const auto in = static_cast<int64_t>(call.activations.bytes.size());
    std::memcpy(memory.data() + 64, call.activations.bytes.data(), static_cast<size_t>(in));
    call.activations.bytes.clear();
    call.shared_activations = memory.Range(64, in);
    call.shared_output = memory.Range(64 + in, memory.size() - 64 - in);
    return call;
  }

  SharedMemory Memory(int64_t bytes) const { return *SharedMemory::Create(prefix_, bytes); }

  const std::string prefix_ = absl::StrCat("awqd-e2e-", getpid(), "-");
  TempFolder folder_;
};

TEST_F(SharedMemoryE2eTest, TheSameBitsAsThroughTheSocket) {
  const SharedMemory memory = Memory(8 << 20);
  for (const v1::DType dtype : {v1::FP16, v1::BF16, v1::FP32}) {
    for (const int64_t tokens : {0, 1, 33, 300}) {
      const client::MatmulCall call = Call(tokens, dtype);
      const auto sent = client_->QuantizedMatmul(call);
      ASSERT_TRUE(sent.ok()) << sent.status();
      const client::MatmulCall shared = Share(call, memory);
      const auto got = client_->QuantizedMatmul(shared);
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_EQ(got->output.shape, sent->output.shape);
      EXPECT_EQ(got->output.dtype, dtype);
      EXPECT_TRUE(got->output.bytes.empty());
      const absl::string_view written(memory.data() + shared.shared_output->offset(),
                                      sent->output.bytes.size());
      EXPECT_EQ(written, sent->output.bytes) << tokens << " tokens of " << client::Name(dtype);
      const auto stream = client_->QuantizedMatmulStream();
      std::memset(memory.data() + shared.shared_output->offset(), 1, written.size());
      ASSERT_TRUE(stream->Send(shared).ok());
      const auto answer = stream->Receive();
      ASSERT_TRUE(answer.ok() && answer->has_value() && (*answer)->result.ok());
      EXPECT_EQ(written, sent->output.bytes);
    }
    client::DequantizeCall call = {
        .weight = WeightName{"m", "layer"}, .output_dtype = dtype, .row_begin = 3};
    const auto sent = client_->Dequantize(call);
    ASSERT_TRUE(sent.ok()) << sent.status();
    call.shared_output = memory.Range(100, memory.size() - 100);
    const auto got = client_->Dequantize(call);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(got->output.shape, sent->output.shape);
    EXPECT_EQ(absl::string_view(memory.data() + 100, sent->output.bytes.size()),
              sent->output.bytes);
  }
}

// Forever truncates the object and grows it again while requests read and write it.
TEST_F(SharedMemoryE2eTest, AClientThatCutsItsObjectHarmsNobody) {
  ASSERT_TRUE(client_->QuantizedMatmul(Call(1, v1::FP16)).ok());
  const int files = server_->open_files();
  {
    const SharedMemory memory = Memory(8 << 20);
    const client::MatmulCall shared = Share(Call(300, v1::FP16), memory);
    std::atomic<bool> stop{false};
    std::thread cutter([&] {
      while (!stop) {
        EXPECT_EQ(truncate(("/dev/shm/" + memory.name()).c_str(), 100), 0);
        EXPECT_EQ(truncate(("/dev/shm/" + memory.name()).c_str(), 8 << 20), 0);
      }
    });
    int refused = 0;
    for (int i = 0; i < 300 || (refused == 0 && i < 10000); ++i) {
      const auto got = client_->QuantizedMatmul(shared);
      if (got.ok()) continue;
      ++refused;
      EXPECT_TRUE(absl::IsInvalidArgument(got.status())) << got.status();
      EXPECT_THAT(std::string(got.status().message()), HasSubstr("a range that cannot be used"));
      EXPECT_THAT(std::string(got.status().message()), ::testing::Not(HasSubstr(memory.name())));
    }
    stop = true;
    cutter.join();
    EXPECT_GT(refused, 0);
  }
  const auto alive = client_->QuantizedMatmul(Call(1, v1::FP16));
  EXPECT_TRUE(alive.ok()) << alive.status();
  EXPECT_LE(server_->OpenFilesAgain(files), files);
}

TEST_F(SharedMemoryE2eTest, AKilledClientLeavesNothingInTheServer) {
  ASSERT_TRUE(client_->QuantizedMatmul(Call(1, v1::FP16)).ok());
  const int files = server_->open_files();
  for (int i = 0; i < 3; ++i) {
    const ExitReport report =
        server_->Awqctl({"bench", "--shared_memory", "--weight", "m/layer", "--tokens", "300",
                         "--concurrency", "4", "--duration", "60"},
                        absl::Milliseconds(700 + 100 * i));
    EXPECT_FALSE(report.exited) << report.log;
  }
  EXPECT_LE(server_->OpenFilesAgain(files), files);
}

TEST_F(SharedMemoryE2eTest, AwqctlGivesTheSameFilesEitherWay) {
  const auto run = [&](std::vector<std::string> args) {
    const ExitReport report = server_->Awqctl(std::move(args));
    EXPECT_EQ(report.code, 0) << report.log;
  };
  run({"matmul", "m", "layer", "--random", "9", "--path", "fused", "-o", folder_ / "a.npy"});
  run({"matmul", "m", "layer", "--random", "9", "--path", "fused", "-o", folder_ / "b.npy",
       "--shared_memory"});
  run({"compare", folder_ / "a.npy", folder_ / "b.npy", "--bit_exact"});
  run({"dequantize", "m", "layer", "--rows", "5:100", "-o", folder_ / "c.npy"});
  run({"dequantize", "m", "layer", "--rows", "5:100", "-o", folder_ / "d.npy", "--shared_memory"});
  run({"compare", folder_ / "c.npy", folder_ / "d.npy", "--bit_exact"});
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    EXPECT_FALSE(absl::StartsWith(entry.path().filename().string(), prefix_)) << entry.path();
  }
}

TEST_F(SharedMemoryE2eTest, WithoutTheFlagEverythingSaysSo) {
  Start();
  const SharedMemory memory = Memory(1 << 20);
  const auto got = client_->QuantizedMatmul(Share(Call(1, v1::FP16), memory));
  EXPECT_TRUE(absl::IsUnimplemented(got.status())) << got.status();
  EXPECT_THAT(std::string(got.status().message()), HasSubstr("--shared_memory_prefix"));
  for (const std::vector<std::string>& command :
       std::vector<std::vector<std::string>>{{"matmul", "m", "layer", "--random", "1"},
                                             {"dequantize", "m", "layer", "-o", folder_ / "x.npy"},
                                             {"bench", "--weight", "m/layer"}}) {
    std::vector<std::string> args = command;
    args.push_back("--shared_memory");
    const ExitReport report = server_->Awqctl(args);
    EXPECT_EQ(report.code, 3) << report.log;
    EXPECT_THAT(report.log, HasSubstr("--shared_memory_prefix"));
  }
}

}  // namespace
}  // namespace awqd
