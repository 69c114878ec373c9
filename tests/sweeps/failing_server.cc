// The shared page, and a server with the shim preloaded.
#include "tests/sweeps/failing_server.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/synthetic_awq.h"

namespace awqd::sweeps {

FailingServer::FailingServer(std::vector<std::string> args) : args_(std::move(args)) {
  SyntheticAwq::Random(256, 64, 64, 1).Write(repository_ / "m");
  SyntheticAwq::Random(256, 64, 64, 2).Write(repository_ / "other");
  const std::string page = page_ / "control";
  const int fd = open(page.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  EXPECT_EQ(ftruncate(fd, sizeof(Control)), 0);
  void* memory = mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  EXPECT_NE(memory, MAP_FAILED);
  close(fd);
  control_ = static_cast<Control*>(memory);
  struct stat info = {};
  EXPECT_EQ(stat(repository_.path().c_str(), &info), 0);
  control_->device = info.st_dev;
  std::strncpy(control_->repository, repository_.path().c_str(), sizeof(control_->repository) - 1);
  Start();
}

FailingServer::~FailingServer() {
  client_.reset();
  process_.reset();
  munmap(control_, sizeof(Control));
}

void FailingServer::Start() {
  std::vector<std::string> args = args_;
  args.push_back("--model_repository=" + repository_.path());
  setenv("AWQD_TEST_FAULTS", (page_ / "control").c_str(), 1);
  setenv("LD_PRELOAD", AWQD_FAULTS_SHIM, 1);
  control_->kind = kNothing;
  process_ = std::make_unique<ServerProcess>(args);
  unsetenv("LD_PRELOAD");
  unsetenv("AWQD_TEST_FAULTS");
  ASSERT_TRUE(process_->WaitServing()) << process_->log();
  client_ = process_->NewClient(absl::Seconds(3));
  EXPECT_EQ(Product("m"), absl::OkStatus());
  EXPECT_EQ(Product("other"), absl::OkStatus());
}

void FailingServer::Restart() {
  client_.reset();
  process_.reset();
  Start();
}

int64_t FailingServer::Count(Kind kind, absl::FunctionRef<void()> body) {
  FailAt(kind, 0, body);
  return control_->seen;
}

bool FailingServer::FailAt(Kind kind, int64_t number, absl::FunctionRef<void()> body) {
  control_->seen = 0;
  control_->failed = 0;
  control_->fail_at = number;
  control_->where[0] = '\0';
  control_->kind = kind;
  body();
  absl::SleepFor(absl::Milliseconds(2));  // time for the log line after the answer
  control_->kind = kNothing;
  return control_->failed > 0;
}

bool FailingServer::alive() const {
  siginfo_t info = {};
  waitid(P_PID, static_cast<id_t>(process_->pid()), &info, WEXITED | WNOHANG | WNOWAIT);
  return info.si_pid == 0;
}

absl::Status FailingServer::Product(const std::string& model) {
  const auto y = client_->QuantizedMatmul(OneToken(model));
  if (!y.ok()) return y.status();
  std::string& right = right_[model == "m" ? 0 : 1];
  if (right.empty()) right = y->output.bytes;
  if (y->output.bytes != right) return absl::DataLossError(absl::StrCat(model, ": other bytes"));
  return absl::OkStatus();
}

absl::Status FailingServer::IsWell() {
  absl::Status status;
  for (const absl::Time end = absl::Now() + absl::Seconds(6); absl::Now() < end && alive();) {
    status = Product("m");
    if (status.ok()) status = Product("other");
    if (status.ok()) return status;
    client_ = process_->NewClient(absl::Seconds(3));
    absl::SleepFor(absl::Milliseconds(10));
  }
  return alive() ? status : absl::AbortedError("the server has ended");
}

}  // namespace awqd::sweeps
