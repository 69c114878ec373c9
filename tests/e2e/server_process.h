// ServerProcess: the real awqd binary on a free loopback port, for one test.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/awqd_client.h"
#include "tests/testing/places.h"

namespace awqd {

// A directory that goes away with its tests, beneath the test's temporary directory.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// The repository that holds the demo checkpoint, its name, and its expected results.
std::string DemoRepository();
inline constexpr char kDemoModel[] = "all-MiniLM-L6-v2-awq";
std::string Golden(const std::string& name);

struct ExitReport {
  bool exited = false;  // in time, by itself
  int code = -1;        // 128 + the signal's number when it died of one
  std::string log;      // stdout and stderr
  absl::Duration took;
};

// Runs a program to its end; kills it after `limit`.
ExitReport RunProgram(const std::string& program, const std::vector<std::string>& args,
                      absl::Duration limit = absl::Seconds(20));

// Not thread-safe. Kills the server when destroyed.
class ServerProcess {
 public:
  // Adds --address, --port_file and, unless `args` names devices, --device=cpu. Returns at once.
  // `log_fd`: where its log goes instead of to a file that log() reads; the caller's.
  explicit ServerProcess(std::vector<std::string> args, const std::string& address = "127.0.0.1:0",
                         int log_fd = -1);
  ~ServerProcess();

  // Until it listens, or until it serves. False when it ended or 30 s passed, or `timeout`.
  bool WaitListening();
  bool WaitServing(absl::Duration timeout = absl::Seconds(30));

  // Its address; only after WaitListening.
  const std::string& address() const { return address_; }
  std::unique_ptr<client::Client> NewClient(absl::Duration timeout = absl::Seconds(60)) const;
  // Of the clients to come, WaitServing's too.
  void set_security(client::Security security) { security_ = std::move(security); }

  void Signal(int signal_number) const;
  // Waits for the end; kills after `limit`.
  ExitReport Wait(absl::Duration limit = absl::Seconds(30));
  // SIGTERM, then Wait.
  ExitReport Stop();

  std::string log() const;
  pid_t pid() const { return pid_; }
  // Resident set, in bytes: the largest so far, and now.
  int64_t peak_rss_bytes() const;
  int64_t rss_bytes() const;
  // Of those, pages of no file: the heap, stacks and what the driver maps for itself.
  int64_t anonymous_bytes() const;
  int open_files() const;
  // open_files() once they are no more than `before`, or after ten seconds. They may be fewer: the
  // connection of a client that was gone when `before` was counted closes some time later.
  int OpenFilesAgain(int before) const;

 private:
  TempFolder folder_;
  pid_t pid_ = -1;
  bool ended_ = false;
  std::string address_;
  client::Security security_;
};

}  // namespace awqd
