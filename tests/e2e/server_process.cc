// Starts, watches and ends the server binary.
#include "tests/e2e/server_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "gtest/gtest.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(5);
constexpr absl::Duration kStartLimit = absl::Seconds(30);

std::string ReadFile(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// A line of /proc/<pid>/status, in bytes; -1 without it.
int64_t MemoryOf(pid_t pid, const std::string& name) {
  std::istringstream status(ReadFile(absl::StrCat("/proc/", pid, "/status")));
  for (std::string word; status >> word;) {
    int64_t kib = 0;
    if (word == name && status >> kib) return kib * 1024;
  }
  return -1;
}

pid_t Spawn(const std::string& program, const std::vector<std::string>& args,
            const std::string& log, int log_fd = -1) {
  std::vector<char*> argv = {const_cast<char*>(program.c_str())};
  for (const std::string& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // the server dies with its test
  const int fd = log_fd >= 0 ? log_fd : open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  dup2(fd, STDOUT_FILENO);
  dup2(fd, STDERR_FILENO);
  execv(program.c_str(), argv.data());
  _exit(127);
}

ExitReport WaitFor(pid_t pid, const std::string& log, absl::Duration limit) {
  const absl::Time start = absl::Now();
  ExitReport report;
  int status = 0;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (absl::Now() - start > limit) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      report.log = ReadFile(log);
      report.took = absl::Now() - start;
      return report;
    }
    absl::SleepFor(kPoll);
  }
  report.exited = true;
  report.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  report.log = ReadFile(log);
  report.took = absl::Now() - start;
  return report;
}

}  // namespace

TempFolder::TempFolder() {
  path_ = testing::TempDir() + "/awqd_e2e_XXXXXX";
  if (mkdtemp(path_.data()) == nullptr) path_.clear();
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

std::string DemoRepository() { return DataPath("awq"); }
std::string Golden(const std::string& name) { return DemoRepository() + "/goldens/" + name; }

ExitReport RunProgram(const std::string& program, const std::vector<std::string>& args,
                      absl::Duration limit) {
  TempFolder folder;
  return WaitFor(Spawn(program, args, folder / "log"), folder / "log", limit);
}

ServerProcess::ServerProcess(std::vector<std::string> args, const std::string& address, int log_fd)
    : address_(address) {
  const bool has_device = std::any_of(args.begin(), args.end(), [](const std::string& arg) {
    return absl::StartsWith(arg, "--device=");
  });
  if (!has_device) args.insert(args.begin(), "--device=" + TestDeviceName());
  args.insert(args.begin(), {"--address=" + address, "--port_file=" + (folder_ / "port")});
  pid_ = Spawn(BinaryPath("awqd"), args, folder_ / "log", log_fd);
}

ServerProcess::~ServerProcess() {
  if (ended_) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

bool ServerProcess::WaitListening() {
  for (const absl::Time until = absl::Now() + kStartLimit; absl::Now() < until;) {
    const std::string text = ReadFile(folder_ / "port");
    int port = 0;
    if (!text.empty() && text.back() == '\n' && absl::SimpleAtoi(text, &port)) {
      // 0: it listens on the socket that the test named.
      if (port != 0) address_ = absl::StrCat("127.0.0.1:", port);
      return true;
    }
    siginfo_t info = {};
    waitid(P_PID, pid_, &info, WEXITED | WNOHANG | WNOWAIT);
    if (info.si_pid == pid_) return false;
    absl::SleepFor(kPoll);
  }
  return false;
}

bool ServerProcess::WaitServing(absl::Duration timeout) {
  if (!WaitListening()) return false;
  const auto client = NewClient();
  for (const absl::Time until = absl::Now() + timeout; absl::Now() < until;) {
    const auto serving = client->IsServing("", {.timeout = absl::Seconds(5)});
    if (serving.ok() && *serving) return true;
    absl::SleepFor(kPoll);
  }
  return false;
}

std::unique_ptr<client::Client> ServerProcess::NewClient(absl::Duration timeout) const {
  return *client::Client::Create({.address = address_, .timeout = timeout, .security = security_});
}

std::shared_ptr<grpc::Channel> ServerProcess::NewChannel(
    const grpc::ChannelArguments& arguments) const {
  return grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments);
}

ExitReport ServerProcess::Awqctl(std::vector<std::string> args, absl::Duration limit) const {
  args.insert(args.begin(), {"--address", address_});
  return RunProgram(BinaryPath("awqctl"), args, limit);
}

void ServerProcess::Signal(int signal_number) const { kill(pid_, signal_number); }

ExitReport ServerProcess::Wait(absl::Duration limit) {
  ended_ = true;
  return WaitFor(pid_, folder_ / "log", limit);
}

ExitReport ServerProcess::Stop() {
  Signal(SIGTERM);
  return Wait();
}

std::string ServerProcess::log() const { return ReadFile(folder_ / "log"); }

int64_t ServerProcess::peak_rss_bytes() const { return MemoryOf(pid_, "VmHWM:"); }
int64_t ServerProcess::rss_bytes() const { return MemoryOf(pid_, "VmRSS:"); }
int64_t ServerProcess::anonymous_bytes() const { return MemoryOf(pid_, "RssAnon:"); }

int ServerProcess::open_files() const {
  std::error_code error;
  const std::filesystem::directory_iterator files(absl::StrCat("/proc/", pid_, "/fd"), error);
  return error ? -1 : static_cast<int>(std::distance(files, {}));
}

int ServerProcess::OpenFilesAgain(int before) const {
  for (const absl::Time until = absl::Now() + absl::Seconds(10);
       open_files() > before && absl::Now() < until;) {
    absl::SleepFor(kPoll);
  }
  return open_files();
}

}  // namespace awqd
