// Weights of the real server, leased by this process through libawqd: the bits of the RPC; reload,
// unload, and either side killed while they are leased; roles; and where the memory goes.
#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/library/awqd.h"
#include "tests/e2e/server_test.h"
#include "tests/testing/borrower.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using client::Tensor;
using ::testing::HasSubstr;

constexpr int64_t kK = 256, kN = 512;

using testing::FindMappings;

// A leased weight "layer".
class Borrower : public testing::Borrower {
 public:
  explicit Borrower(const std::string& path, const char* token = nullptr, const char* model = "m")
      : testing::Borrower(path, "layer", model, token) {}

  std::string Multiply(const Tensor& x) const {
    const int64_t m = x.shape[0];
    std::string y(m * kN * 2, '\0');
    awqd_matmul_args args = AWQD_INIT(args);
    args.m = m, args.x = x.bytes.data(), args.y = y.data();
    args.x_dtype = args.y_dtype = AWQD_FP16;
    args.path = AWQD_PATH_FUSED;  // as LayerCall says
    testing::MultiplyOnCpu(weight(), args);
    return y;
  }
};

class LeaseE2eTest : public ServerTest {
 protected:
  void SetUp() override {
    SyntheticAwq::Random(kK, kN, 64, 1).Write(repository_ / "m");
    Start({"--lend=" + path_});
  }
  std::string ByRpc(const client::MatmulCall& call) const {
    const auto answer = client_->QuantizedMatmul(call);
    EXPECT_TRUE(answer.ok()) << answer.status();
    return answer.ok() ? answer->output.bytes : "";
  }
  int64_t Leases() const {
    const auto listed = client_->ListModels();
    EXPECT_TRUE(listed.ok()) << listed.status();
    return listed.ok() && listed->models_size() > 0 ? listed->models(0).leases() : -1;
  }

  TempFolder folder_;
  const std::string path_ = folder_ / "lend.sock";
};

TEST_F(LeaseE2eTest, TheBitsOfTheRpc) {
  const Borrower borrower("unix:" + path_);
  ASSERT_EQ(borrower.code(), AWQD_OK) << borrower.error();
  EXPECT_EQ(borrower.version(), 1);
  for (const int64_t tokens : {1, 2, 16, 33, 300}) {
    const client::MatmulCall call = LayerCall(tokens, kK, v1::FP16);
    EXPECT_TRUE(borrower.Multiply(call.activations) == ByRpc(call)) << tokens << " tokens";
  }
  EXPECT_EQ(Leases(), 1);
  EXPECT_EQ(FindMappings(server_->pid()).size(), 1u);
}

TEST_F(LeaseE2eTest, ReloadAndUnloadChangeNothingOfIt) {
  const client::MatmulCall call = LayerCall(33, kK, v1::FP16);
  const std::string first = ByRpc(call);
  auto borrower = std::make_unique<Borrower>(path_);
  ASSERT_EQ(borrower->code(), AWQD_OK) << borrower->error();
  SyntheticAwq::Random(kK, kN, 64, 2).Write(repository_ / "m");
  ASSERT_TRUE(client_->LoadModel("m").ok());
  EXPECT_NE(ByRpc(call), first);
  EXPECT_EQ(borrower->Multiply(call.activations), first);
  const Borrower second(path_);
  ASSERT_EQ(second.code(), AWQD_OK) << second.error();
  EXPECT_EQ(second.version(), 2);
  EXPECT_EQ(second.Multiply(call.activations), ByRpc(call));
  EXPECT_EQ(Leases(), 2);
  // The server drops the first version.
  EXPECT_TRUE(Eventually([&] { return FindMappings(server_->pid()).size() == 1; }));
  ASSERT_TRUE(client_->UnloadModel("m").ok());
  EXPECT_TRUE(Eventually([&] { return FindMappings(server_->pid()).empty(); }));
  EXPECT_EQ(borrower->Multiply(call.activations), first);
  EXPECT_EQ(Leases(), 2) << "an unloaded model's too";
  EXPECT_EQ(Borrower(path_).code(), AWQD_NOT_FOUND);
  EXPECT_EQ(FindMappings(getpid()).size(), 2u);
  borrower = nullptr;
  EXPECT_EQ(FindMappings(getpid()).size(), 1u);
  EXPECT_TRUE(Eventually([&] { return Leases() == 1; }));
}

TEST_F(LeaseE2eTest, ADrainWaitsForNoLease) {
  const client::MatmulCall call = LayerCall(1, kK, v1::FP16);
  const std::string expected = ByRpc(call);
  const Borrower borrower(path_);
  ASSERT_EQ(borrower.code(), AWQD_OK) << borrower.error();
  EXPECT_LT(Stop().took, absl::Seconds(10));
  EXPECT_EQ(borrower.Multiply(call.activations), expected);
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(LeaseE2eTest, TheLenderIsKilled) {
  const client::MatmulCall call = LayerCall(300, kK, v1::FP16);
  const std::string expected = ByRpc(call);
  const Borrower borrower(path_);
  ASSERT_EQ(borrower.code(), AWQD_OK) << borrower.error();
  server_->Signal(SIGKILL);
  EXPECT_EQ(server_->Wait().code, 128 + SIGKILL);
  EXPECT_EQ(borrower.Multiply(call.activations), expected);
  const Borrower late(path_);
  EXPECT_EQ(late.code(), AWQD_UNAVAILABLE);
  EXPECT_THAT(late.error(), HasSubstr("connect: Connection refused"));
}

TEST_F(LeaseE2eTest, TheBorrowerIsKilled) {
  EXPECT_EQ(Leases(), 0);  // opens the connection
  const int files = server_->open_files();
  auto borrower = std::make_unique<Borrower>(path_);
  ASSERT_EQ(borrower->code(), AWQD_OK) << borrower->error();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    for (;;) pause();  // it has the lease and the mapping, and nothing else is called in it
  }
  borrower = nullptr;
  EXPECT_EQ(FindMappings(child).size(), 1u);
  EXPECT_EQ(Leases(), 1);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(Eventually([&] { return Leases() == 0; }));
  EXPECT_LE(server_->OpenFilesAgain(files), files);
  const client::MatmulCall call = LayerCall(1, kK, v1::FP16);
  const Borrower next(path_);
  EXPECT_EQ(next.Multiply(call.activations), ByRpc(call));
}

TEST_F(LeaseE2eTest, AStoreEndsTheBorrowerAlone) {
  const client::MatmulCall call = LayerCall(33, kK, v1::FP16);
  const std::string expected = ByRpc(call);
  const Borrower borrower(path_);
  const std::vector<uintptr_t> mappings = FindMappings(getpid());
  ASSERT_EQ(mappings.size(), 1u);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL);
    auto* const memory = reinterpret_cast<volatile char*>(mappings[0]);
    mprotect(reinterpret_cast<void*>(mappings[0]), 4096, PROT_READ | PROT_WRITE);
    *memory = 1;
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) << status;
  EXPECT_EQ(ByRpc(call), expected);
  EXPECT_EQ(borrower.Multiply(call.activations), expected);
}

TEST_F(LeaseE2eTest, TheRoleIsAsked) {
  const std::string tokens = folder_ / "tokens";
  const auto make_token = [&](const std::string& name, const std::string& roles) {
    EXPECT_EQ(RunProgram(BinaryPath("awqctl"), {"token", name, "--roles", roles, "--out",
                                                folder_ / name, "--append", tokens})
                  .code,
              0);
    std::ifstream file(folder_ / name);
    std::string token;
    std::getline(file, token);
    return token;
  };
  const std::string alice = make_token("alice", "attach"), bob = make_token("bob", "infer,read");
  Stop();
  server_ = std::make_unique<ServerProcess>(Args({"--lend=" + path_, "--tokens=" + tokens}));
  ASSERT_TRUE(server_->WaitListening());
  EXPECT_TRUE(Eventually([&] { return Borrower(path_, alice.c_str()).code() == AWQD_OK; }));
  const Borrower refused(path_, bob.c_str());
  EXPECT_EQ(refused.code(), AWQD_PERMISSION_DENIED);
  EXPECT_THAT(refused.error(), HasSubstr("needs the role attach; \"bob\" has infer,read"));
  EXPECT_EQ(Borrower(path_).code(), AWQD_UNAUTHENTICATED);
  EXPECT_EQ(Borrower(path_, "guessed").code(), AWQD_UNAUTHENTICATED);
  EXPECT_EQ(FindMappings(getpid()).size(), 0u);
}

TEST_F(LeaseE2eTest, NamesOfNothing) {
  const Borrower other(path_, nullptr, "other");
  EXPECT_EQ(other.code(), AWQD_NOT_FOUND);
  EXPECT_THAT(other.error(), HasSubstr("model \"other\": no such model is loaded"));
  EXPECT_EQ(Borrower(path_, nullptr, "../m").code(), AWQD_INVALID_ARGUMENT);
}

TEST_F(LeaseE2eTest, ManyLeases) {
  EXPECT_EQ(Leases(), 0);  // opens the connection
  const int files = server_->open_files();
  for (int i = 0; i < 300; ++i) ASSERT_EQ(Borrower(path_).code(), AWQD_OK) << i;
  EXPECT_TRUE(Eventually([&] { return Leases() == 0; }));
  EXPECT_LE(server_->OpenFilesAgain(files), files);
  EXPECT_TRUE(FindMappings(getpid()).empty());
  std::vector<std::unique_ptr<Borrower>> at_once;
  for (int i = 0; i < 257; ++i) at_once.push_back(std::make_unique<Borrower>(path_));
  EXPECT_EQ(at_once[255]->code(), AWQD_OK) << at_once[255]->error();
  EXPECT_EQ(at_once[256]->code(), AWQD_RESOURCE_EXHAUSTED);
  EXPECT_THAT(at_once[256]->error(), HasSubstr("expected at most 256 and 512"));
}

}  // namespace
}  // namespace awqd
