// ServerProcess: the real awqd binary on a free loopback port, for one test.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/awqd_client.h"
#include "grpcpp/channel.h"
#include "grpcpp/support/channel_arguments.h"
#include "tests/testing/places.h"

namespace awqd {

// A directory that is removed with its test, in the test's temporary directory.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// The repository with the demo checkpoint, its name, and its expected results.
std::string DemoRepository();
inline constexpr char kDemoModel[] = "all-MiniLM-L6-v2-awq";
std::string Golden(const std::string& name);

struct ExitReport {
  bool exited = false;  // in time, by itself
  int code = -1;        // 128 + the signal's number if a signal ended it
  std::string log;      // stdout and stderr
  absl::Duration took;
};

// Runs a program to its end, or kills it after `limit`.
ExitReport RunProgram(const std::string& program, const std::vector<std::string>& args,
                      absl::Duration limit = absl::Seconds(20));

// Not thread-safe. Kills the server when it is destroyed.
class ServerProcess {
 public:
  // Adds --address, --port_file and, unless `args` names devices, --device=cpu. Returns at once.
  // `log_fd`: the caller's descriptor for the log, instead of a file that log() reads.
  explicit ServerProcess(std::vector<std::string> args, const std::string& address = "127.0.0.1:0",
                         int log_fd = -1);
  ~ServerProcess();

  // Waits until the server listens, or until it serves. Returns false if it ended or `timeout` (30
  // s) passed.
  bool WaitListening();
  bool WaitServing(absl::Duration timeout = absl::Seconds(30));

  // The server's address; only after WaitListening.
  const std::string& address() const { return address_; }
  std::unique_ptr<client::Client> NewClient(absl::Duration timeout = absl::Seconds(60)) const;
  // Without security.
  std::shared_ptr<grpc::Channel> NewChannel(
      const grpc::ChannelArguments& arguments = grpc::ChannelArguments()) const;
  // Runs awqctl against this server, as RunProgram.
  ExitReport Awqctl(std::vector<std::string> args, absl::Duration limit = absl::Seconds(20)) const;
  // The security of later clients, including WaitServing's.
  void set_security(client::Security security) { security_ = std::move(security); }

  void Signal(int signal_number) const;
  // Waits for the server's end; kills it after `limit`.
  ExitReport Wait(absl::Duration limit = absl::Seconds(30));
  // SIGTERM, then Wait.
  ExitReport Stop();

  std::string log() const;
  pid_t pid() const { return pid_; }
  // Resident set, in bytes: the largest so far, and now.
  int64_t peak_rss_bytes() const;
  int64_t rss_bytes() const;
  // The anonymous part of it: the heap, stacks and the driver's own mappings.
  int64_t anonymous_bytes() const;
  int open_files() const;
  // Waits until open_files() are at most `before`, for ten seconds. There may be fewer, because a
  // connection of an earlier client may have closed since.
  int OpenFilesAgain(int before) const;

 private:
  TempFolder folder_;
  pid_t pid_ = -1;
  bool ended_ = false;
  std::string address_;
  client::Security security_;
};

}  // namespace awqd
