// awqctl convert: its output, its exit codes, and a signal in the middle.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "client/awqctl/commands.h"
#include "client/remove_on_signal.h"
#include "client/tools/convert.h"
#include "client/tools/quantize.h"
#include "tests/client/awqctl_command.h"
#include "tests/client/tools/dense_model.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/places.h"

namespace awqd::awqctl {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(AwqctlConvert, ConvertsAndVerifies) {
  const awqd::testing::TempDirectory folder;
  const std::string awq = DataPath("awq/all-MiniLM-L6-v2-awq");
  CommandResult got =
      RunCommand({"convert", awq, "-o", folder.At("gptq"), "--to", "gptq", "--verify"});
  EXPECT_EQ(got.code, kOk) << got.err;
  EXPECT_THAT(got.out, AllOf(HasSubstr("6 linears from awq to gptq"),
                             HasSubstr("verified: 1769472 elements of 6 linears are the same")));
  EXPECT_EQ(RunCommand({"diff", awq, folder.At("gptq")}).code, kOk);
  got = RunCommand({"--json", "convert", awq, "-o", folder.At("dense"), "--to", "dense", "--dtype",
                    "fp16", "--verify"});
  EXPECT_EQ(got.code, kOk) << got.err;
  const auto json = nlohmann::json::parse(got.out);
  EXPECT_EQ(json.at("dtype"), "F16");
  EXPECT_GT(json.at("verified").at("elements_rounded_once"), 0);
}

TEST(AwqctlConvert, Refuses) {
  const awqd::testing::TempDirectory folder;
  const std::string gptq = DataPath("gptq/v2-act"), out = folder.At("out");
  EXPECT_EQ(RunCommand({"convert", gptq, "-o", out}).code, kBadArguments);
  EXPECT_EQ(RunCommand({"convert", gptq, "-o", out, "--to", "other"}).code, kBadArguments);
  const CommandResult got = RunCommand({"convert", gptq, "-o", out, "--to", "awq"});
  EXPECT_EQ(got.code, kFileFailed);
  EXPECT_THAT(got.err, HasSubstr("linear \""));
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

// The child's status after `run`, which a signal should end.
template <typename Run>
int StatusOf(Run run) {
  const pid_t child = fork();
  if (child == 0) {
    client::RemoveFilesOnSignals();
    run();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

TEST(AwqctlConvert, ASignalInTheMiddleLeavesNothing) {
  const awqd::testing::TempDirectory folder;
  awqd::testing::WriteDenseModel(folder, "in/dense");
  fs::create_directory(folder.At("out"));
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    for (const int after : {1, 5}) {  // number of tensors; also in the second shard
      int seen = 0;
      const auto end = [&](int64_t, int64_t) {
        if (++seen != after) return;
        // The partial file must exist before the signal, or the test would prove nothing.
        if (!fs::exists(folder.At("out/m.partial"))) _exit(9);
        raise(signal);
      };
      int status = StatusOf([&] {
        (void)tools::Convert({.folder = DataPath("awq/all-MiniLM-L6-v2-awq"),
                              .output = folder.At("out/m"),
                              .target = tools::TargetNamed("gptq"),
                              .guard = RemovedOnSignal},
                             end);
      });
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << status;
      EXPECT_TRUE(fs::is_empty(folder.At("out"))) << signal;
      seen = 0;
      status = StatusOf([&] {
        (void)tools::Quantize({.folder = folder.At("in/dense"),
                               .output = folder.At("out/m"),
                               .target = tools::TargetNamed("gptq"),
                               .rtn = {.bits = 4, .group_size = 64},
                               .guard = RemovedOnSignal},
                              end);
      });
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << status;
      EXPECT_TRUE(fs::is_empty(folder.At("out"))) << signal;
    }
  }
}

}  // namespace
}  // namespace awqd::awqctl
