// awqd: flags -> Options -> Server -> run until a signal. Exit codes: 0 stopped by a signal or
// printed what was asked for, 1 could not start or go on, 2 bad flags.
#include <sys/resource.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/obs/logging.h"
#include "server/options.h"
#include "server/server.h"
#include "server/signals.h"

namespace {

int Fail(int code, const absl::Status& status) {
  const std::string line = awqd::obs::OneLine(status.message());
  std::fprintf(stderr, "awqd: %s\n", line.c_str());
  return code;
}

// Each shard of a checkpoint stays open during its load, up to 1000 of them, and each connection
// too; the usual soft limit of 1024 is there for select, which nothing here uses.
void RaiseOpenFiles() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);  // where it is refused, the old limit serves on
}

int Serve(const awqd::Options& options) {
  RaiseOpenFiles();
  awqd::obs::SetUpLogging(options.log_level, options.log_format);
  absl::StatusOr<std::unique_ptr<awqd::Server>> server = awqd::Server::Create(options);
  if (!server.ok()) return Fail(1, server.status());
  const absl::Status status = (*server)->Run(awqd::SignalFd());
  return status.ok() ? 0 : Fail(1, status);
}

// Before any library is initialised (OpenBLAS starts threads, Protocol Buffers builds descriptors:
// tens of milliseconds), so that a signal soon after exec still ends in exit code 0.
using Initializer = void (*)(int, char**, char**);
[[gnu::section(".preinit_array"), gnu::used]] const Initializer kBeforeLibraries =
    [](int, char**, char**) { awqd::BlockSignals(); };

}  // namespace

int main(int argc, char** argv) {
  try {
    awqd::AwaitSignals();
    absl::StatusOr<awqd::CommandLine> line = awqd::ParseCommandLine(argc, argv);
    if (!line.ok()) return Fail(2, line.status());
    if (!line->print.empty()) {
      std::fputs(line->print.c_str(), stdout);
      return 0;
    }
    return Serve(line->options);
  } catch (const std::exception& e) {
    return Fail(1, absl::InternalError(e.what()));
  }
}
