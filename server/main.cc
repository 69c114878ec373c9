// awqd: parses flags to Options, creates a Server, and runs it until a signal. Exit codes: 0 after
// a signal or after printing what was requested, 1 when the server cannot start or go on, 2 for bad
// flags.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "server/config/options.h"
#include "server/obs/logging.h"
#include "server/server.h"

namespace {

// The longest time that the exit waits for a slow reader of the log.
constexpr absl::Duration kFlush = absl::Seconds(1);

int Fail(int code, const absl::Status& status) {
  awqd::obs::WriteLastLine(absl::StrCat("awqd: ", status.message()), kFlush);
  return code;
}

void WriteToStderr(absl::string_view text) {
  (void)!write(STDERR_FILENO, text.data(), text.size());
}

// Ends the process after an exception that cannot be handled, usually a failed allocation. It
// writes one line directly, because the log needs memory, and then exits, so that a supervisor
// starts another server.
[[noreturn]] void EndOverException() {
  try {
    // The compiler does not always tell which exception it is.
    if (const std::exception_ptr what = std::current_exception()) std::rethrow_exception(what);
    WriteToStderr("awqd: ended where nothing can be undone, most likely out of memory\n");
  } catch (const std::bad_alloc&) {
    WriteToStderr("awqd: ended where nothing can be undone, out of memory\n");
  } catch (const std::exception& e) {
    WriteToStderr("awqd: ended where nothing can be undone: ");
    WriteToStderr(e.what());
    WriteToStderr("\n");
  }
  std::abort();
}

// Raises the soft limit of open files. Each shard of a checkpoint stays open during its load, up to
// 1000 of them, and so does each connection; the usual soft limit of 1024 exists for select, which
// is not used here.
void RaiseOpenFiles() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);  // if it is refused, the old limit stays
}

// The first SIGTERM or SIGINT asks for an orderly end. A signal within one second of it counts as
// the same one, because a terminal or a supervisor may send it twice. A later one ends the process
// at once. The signals are blocked in every thread but one, which waits for them: so no handler
// interrupts other code, and it does not matter which thread the kernel picks.
constexpr auto kSameSignal = std::chrono::seconds(1);

// The first end of the pair becomes readable at the first signal.
int g_pipe[2] = {-1, -1};

sigset_t Stopping() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

// The running server, for the thread that waits for signals.
awqd::Mutex g_mu;
const awqd::Server* g_server ABSL_GUARDED_BY(g_mu) = nullptr;

void SetServer(const awqd::Server* server) {
  awqd::MutexLock lock(&g_mu);
  g_server = server;
}

// The exit status after a second signal.
volatile sig_atomic_t g_exit_status = 0;

// Logs what the process abandons. Neither the server nor an unread log may keep the process from
// ending: the alarm, which also ends it, comes after the wait for the log.
void TellWhatIsAbandoned() {
  signal(SIGALRM, [](int) { _exit(g_exit_status); });
  alarm(2);
  awqd::MutexLock lock(&g_mu);
  if (g_server == nullptr) return;
  const awqd::Server::Unfinished unfinished = g_server->unfinished();
  awqd::obs::LogEvent(awqd::obs::LogLevel::kWarning, "another signal: ends at once",
                      {{"abandoned_calls", unfinished.calls},
                       {"abandoned_loads", unfinished.loading ? "of the start" : "none"}});
  awqd::obs::FlushLog(kFlush);
}

void WaitForSignals() {
  const sigset_t stopping = Stopping();
  int number = 0;
  sigwait(&stopping, &number);
  const auto first = std::chrono::steady_clock::now();
  const char byte = 1;
  // The process ends in an orderly way only if the main thread is told; otherwise it ends by the
  // signal.
  if (write(g_pipe[1], &byte, 1) == 1) {
    do {
      sigwait(&stopping, &number);
    } while (std::chrono::steady_clock::now() - first < kSameSignal);
    g_exit_status = 128 + number;
    TellWhatIsAbandoned();
  }
  _exit(128 + number);
}

// Blocks the signals in the calling thread and all that start later, so that a signal during
// start-up is kept for AwaitSignals, and threads of libraries block it too. Uses libc only. Also
// ignores SIGPIPE and SIGXFSZ, so that writes beyond a limit on file sizes fail instead.
void BlockSignals() {
  const sigset_t stopping = Stopping();
  pthread_sigmask(SIG_BLOCK, &stopping, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
}

// Starts the thread that waits for the signals. Called once, first in main.
void AwaitSignals() {
  if (pipe2(g_pipe, O_CLOEXEC | O_NONBLOCK) != 0) g_pipe[0] = g_pipe[1] = -1;
  std::thread(WaitForSignals).detach();
}

int Serve(const awqd::Options& options) {
  RaiseOpenFiles();
  awqd::obs::SetUpLogging(options.log_level, options.log_format);
  absl::StatusOr<std::unique_ptr<awqd::Server>> server = awqd::Server::Create(options);
  if (!server.ok()) return Fail(1, server.status());
  SetServer(server->get());
  const absl::Status status = (*server)->Run(g_pipe[0]);
  SetServer(nullptr);
  if (!status.ok()) return Fail(1, status);
  awqd::obs::FlushLog(kFlush);
  return 0;
}

// Runs before any library is initialised (OpenBLAS starts threads, Protocol Buffers builds
// descriptors: tens of milliseconds), so that a signal soon after exec still ends in exit code 0.
using Initializer = void (*)(int, char**, char**);
[[gnu::section(".preinit_array"), gnu::used]] const Initializer kBeforeLibraries =
    [](int, char**, char**) { BlockSignals(); };

}  // namespace

int main(int argc, char** argv) {
  std::set_terminate(EndOverException);
  try {
    AwaitSignals();
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
