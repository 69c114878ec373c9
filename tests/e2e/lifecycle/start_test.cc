// Starts of the real server that fail, and files that a start leaves unchanged.
#include <signal.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/lifecycle/lifecycle_fixture.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

class StartTest : public LifecycleTest {
 protected:
  // Expects a program that exits soon, with this code and one line that has the reason.
  static void ExpectRefusal(const ExitReport& report, int code, const char* text) {
    EXPECT_LT(report.took, absl::Seconds(5));
    EXPECT_THAT(LastWords(report, code), HasSubstr(text));
  }
};

TEST_F(StartTest, RefusesToStartWithOneLine) {
  ExpectRefusal(ServerProcess(Args({"--bogus"})).Wait(), 2, "--bogus");
  ExpectRefusal(ServerProcess(Args({"--token_threshold=many"})).Wait(), 2, "token_threshold");
  ExpectRefusal(ServerProcess({}).Wait(), 2, "model_repository");
  ExpectRefusal(ServerProcess({"--model_repository=/nonexistent"}).Wait(), 1, "/nonexistent");
  ExpectRefusal(ServerProcess(Args({"--load_model=absent"})).Wait(), 1, "absent");
  ExpectRefusal(ServerProcess(Args({"--load_model=../m"})).Wait(), 1, "load_model");
  ExpectRefusal(ServerProcess(Args(), "nowhere").Wait(), 2, "nowhere");
}

TEST_F(StartTest, RefusesABusyPort) {
  ServerProcess first(Args());
  ASSERT_TRUE(first.WaitServing()) << first.log();
  ExpectRefusal(ServerProcess(Args(), first.address()).Wait(), 1, first.address().c_str());
  EXPECT_TRUE(first.NewClient()->QuantizedMatmul(OneToken()).ok());
  EXPECT_EQ(first.Stop().code, 0);
}

TEST_F(StartTest, RefusesACheckpointItCannotRead) {
  std::filesystem::remove(repository_ / "m/model.safetensors");
  ExpectRefusal(ServerProcess(Args()).Wait(), 1, "m");
  std::filesystem::create_directory(repository_ / "m/model.safetensors");
  ExpectRefusal(ServerProcess(Args()).Wait(), 1, "model.safetensors");
  std::filesystem::remove(repository_ / "m/model.safetensors");
  std::ofstream(repository_ / "m/model.safetensors") << "not a checkpoint at all";
  ExpectRefusal(ServerProcess(Args()).Wait(), 1, "model.safetensors");
}

TEST_F(StartTest, AModelThatCannotBeOpenedIsNotMissedInSilence) {
  std::filesystem::create_directory_symlink(repository_ / "m", repository_ / "linked");
  ExpectRefusal(ServerProcess(Args()).Wait(), 1, "linked/config.json");
  Start({"--load_model=m"});
  const auto models = client_->ListModels();
  ASSERT_TRUE(models.ok() && models->models_size() == 2) << models.status();
  EXPECT_EQ(models->models(0).name(), "linked");
  EXPECT_EQ(models->models(0).state(), v1::FAILED);
  EXPECT_THAT(models->models(0).message(), HasSubstr("leads out of the model repository"));
  EXPECT_EQ(models->models(1).state(), v1::READY);
  const ExitReport report = Stop();
  const std::vector<std::string> parts =
      absl::StrSplit(report.log, "model cannot be opened model=linked");
  EXPECT_EQ(parts.size(), 2u) << "told once, whatever clients ask: " << report.log;
}

TEST_F(StartTest, OpensAsManyFilesAsItMay) {
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit low = {.rlim_cur = 128, .rlim_max = limit.rlim_max};
  ASSERT_GT(limit.rlim_max, low.rlim_cur);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  ServerProcess server(Args());
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_TRUE(server.WaitServing()) << server.log();
  ASSERT_EQ(prlimit(server.pid(), RLIMIT_NOFILE, nullptr, &limit), 0);
  EXPECT_EQ(limit.rlim_cur, limit.rlim_max);
  EXPECT_EQ(server.Stop().code, 0);
}

TEST_F(StartTest, ClosedDescriptorsAreNotTakenByFilesAndConnections) {
  const std::string port = repository_ / ".port";
  const ExitReport report = RunProgram(
      "/bin/sh", {"-c",
                  "\"$0\" --model_repository=\"$1\" --address=127.0.0.1:0 --port_file=\"$2\" "
                  "--device=cpu <&- >&- 2>&- & "
                  "until [ -s \"$2\" ]; do sleep 0.02; done; "
                  "for fd in 0 1 2; do readlink /proc/$!/fd/$fd; done; kill $!; wait $!; echo $?",
                  BinaryPath("awqd"), repository_.path(), port});
  EXPECT_EQ(report.log, "/dev/null\n/dev/null\n/dev/null\n0\n");
}

// As OpenShift runs containers: a user without a name, in group 0, without a home.
TEST_F(StartTest, ServesAsAnyUser) {
  const std::vector<std::string> user = {
      "-i",        "PATH=/usr/bin:/bin", "setpriv",       "--reuid=1000800000",
      "--regid=0", "--clear-groups",     "--no-new-privs"};
  const auto run = [&](std::vector<std::string> args) {
    args.insert(args.begin(), user.begin(), user.end());
    return RunProgram("/usr/bin/env", args);
  };
  if (run({"test", "-x", BinaryPath("awqd"), "-a", "-r", DemoRepository()}).code != 0) {
    GTEST_SKIP() << "needs root, setpriv, and a build that every user can read";
  }
  const ExitReport report =
      run({"sh", "-c",
           "port=$(mktemp); \"$0\" --model_repository=\"$2\" --address=127.0.0.1:0 --device=cpu "
           "--port_file=$port & until [ -s $port ]; do sleep 0.02; done; "
           "\"$1\" --address=127.0.0.1:$(cat $port) healthcheck --wait 20 && kill $! && wait $!; "
           "status=$?; rm $port; exit $status",
           BinaryPath("awqd"), BinaryPath("awqctl"), DemoRepository()});
  EXPECT_EQ(report.code, 0) << report.log;
}

TEST_F(StartTest, LimitsOfThreadsEndItWithOneLine) {
#if defined(AWQD_ADDRESS_SANITIZER) || defined(AWQD_THREAD_SANITIZER)
  GTEST_SKIP() << "sanitizers need more address space than the limit allows";
#endif
  // The limit of memory forbids the threads' stacks; that of processes does not hold for root.
  ExpectRefusal(RunProgram("/bin/sh", {"-c",
                                       "ulimit -v 250000; exec \"$0\" --model_repository=\"$1\" "
                                       "--address=127.0.0.1:0 --device=cpu",
                                       BinaryPath("awqd"), repository_.path()}),
                1, "threads, only ");
  // They have their stacks, and OpenBLAS would wait for its buffers.
  ExpectRefusal(RunProgram("/bin/sh", {"-c",
                                       "ulimit -v 500000; exec \"$0\" --model_repository=\"$1\" "
                                       "--address=127.0.0.1:0 --device=cpu",
                                       BinaryPath("awqd"), DemoRepository()}),
                1, "(ulimit -v)");
}

TEST_F(StartTest, LimitsOfFilesEndItWithOneLine) {
#if defined(AWQD_ADDRESS_SANITIZER)
  GTEST_SKIP() << "UndefinedBehaviorSanitizer needs descriptors to look at a type";
#endif
  for (const char* limit : {"6", "9", "12", "15"}) {
    ExpectRefusal(RunProgram("/bin/sh", {"-c",
                                         "ulimit -n $2; exec \"$0\" --model_repository=\"$1\" "
                                         "--address=127.0.0.1:0 --device=cpu",
                                         BinaryPath("awqd"), repository_.path(), limit}),
                  1, "Too many open files; raise the limit of open files");
  }
}

// Libraries take more stack for granted than threads would have.
TEST_F(StartTest, ServesWithLittleStack) {
#if defined(AWQD_ADDRESS_SANITIZER) || defined(AWQD_THREAD_SANITIZER)
  GTEST_SKIP() << "sanitizers need more stack to start";
#endif
  for (const char* limit : {"32", "64"}) {
    const ExitReport report = RunProgram(
        "/bin/sh",
        {"-c",
         "port=$(mktemp); (ulimit -s $3; exec \"$0\" --model_repository=\"$2\" --device=cpu "
         "--address=127.0.0.1:0 --port_file=$port) & pid=$!; "
         "until [ -s $port ]; do kill -0 $pid || exit 9; sleep 0.02; done; "
         "\"$1\" --address=127.0.0.1:$(cat $port) healthcheck --wait 20 && kill $pid && wait $pid; "
         "status=$?; rm $port; exit $status",
         BinaryPath("awqd"), BinaryPath("awqctl"), DemoRepository(), limit});
    EXPECT_EQ(report.code, 0) << limit << " KiB: " << report.log;
  }
}

TEST_F(StartTest, AModelThatAClientLoadsDuringStartIsNotLoadedAgain) {
  WriteBigModels();
  ServerProcess server(Args());
  ASSERT_TRUE(server.WaitListening()) << server.log();
  const auto client = server.NewClient();
  ASSERT_TRUE(client->LoadModel("m").ok()) << server.log();
  ASSERT_TRUE(server.WaitServing(absl::Seconds(120))) << server.log();
  const auto model = client->GetModel("m");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->model().version(), 1);
  EXPECT_EQ(server.Stop().code, 0);
}

TEST_F(StartTest, RestartsOnItsPortAfterAKill) {
  ServerProcess first(Args());
  ASSERT_TRUE(first.WaitServing()) << first.log();
  const auto client = first.NewClient();
  ASSERT_TRUE(client->QuantizedMatmul(OneToken()).ok());
  first.Signal(SIGKILL);
  EXPECT_EQ(first.Wait().code, 128 + SIGKILL);
  EXPECT_EQ(client->QuantizedMatmul(OneToken()).status().code(), absl::StatusCode::kUnavailable);
  ServerProcess second(Args(), first.address());
  ASSERT_TRUE(second.WaitServing()) << second.log();
  absl::Status status;
  for (int i = 0; i < 1000; ++i) {
    status = client->QuantizedMatmul(OneToken()).status();
    if (status.ok()) break;
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_TRUE(status.ok()) << "the client reconnects by itself: " << status;
  EXPECT_EQ(second.Stop().code, 0);
}

}  // namespace
}  // namespace awqd
