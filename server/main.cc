// awqd: parses flags to Options, creates a Server, and runs it until a signal. Exit codes: 0 after
// a signal or after printing what was requested, 1 when the server cannot start or go on, 2 for bad
// flags.
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "kernels/base/process_limits.h"
#include "server/config/options.h"
#include "server/obs/logging.h"
#include "server/security/watched_files.h"
#include "server/server.h"

namespace {

// The longest time that the exit waits for a slow reader of the log.
constexpr absl::Duration kFlush = absl::Seconds(1);

void WriteToStderr(absl::string_view text) {
  (void)!write(STDERR_FILENO, text.data(), text.size());
}

int Fail(int code, const absl::Status& status) {
  const std::string line = absl::StrCat("awqd: ", status.message());
  try {
    awqd::obs::WriteLastLine(line, kFlush);
  } catch (const std::system_error&) {  // there is no thread for the log
    WriteToStderr(line + "\n");
  }
  return code;
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

// The fewest descriptors with which a server can load a model and take a call.
constexpr int kDescriptors = 13;

// The threads that compute on CPUs, of all of them.
int CountKernelThreads(const awqd::Options& options) {
  const int each = options.cpu_threads > 0 ? options.cpu_threads : awqd::UsableThreads();
  int count = 0;
  for (const absl::string_view device : absl::StrSplit(options.device, ',')) {
    if (!absl::StartsWith(device, "cuda")) count += each;
  }
  return count;
}

// The threads of a server with these options and of gRPC (server/README.md has the table), and some
// more: gRPC starts a few only when it is busy.
int CountThreads(const awqd::Options& options) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const std::vector<absl::string_view> devices = absl::StrSplit(options.device, ',');
  const int of_device =
      std::max(options.engine.lanes, 2) + std::max(options.engine.answer_threads, 4);
  return 30 + std::clamp(cores, 2, 32) + std::max(options.rpc.rpc_threads, 2) +
         static_cast<int>(devices.size()) * of_device + CountKernelThreads(options);
}

// OpenBLAS has a buffer for each thread that calls it.
constexpr int64_t kBlasBufferBytes = int64_t{128} << 20;

// The first SIGTERM or SIGINT asks for an orderly end. A signal within one second of it counts as
// the same one, because a terminal or a supervisor may send it twice. A later one ends the process
// at once. SIGHUP reloads certificates and tokens; where the server's terminal is gone it asks for
// the end. The signals are blocked in every thread but one, which waits for them: so no handler
// interrupts other code, and it does not matter which thread the kernel picks.
constexpr auto kSameSignal = std::chrono::seconds(1);

// The first end of the pair becomes readable at the first signal.
int g_pipe[2] = {-1, -1};

sigset_t AwaitedSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&set, number);
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

// Whether the descriptors 0 to 2 were a terminal at the start.
bool g_terminal[3] = {};

bool IsTerminalGone() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (g_terminal[fd] && isatty(fd) != 1) return true;
  }
  return false;
}

void Reload() {
  const bool any = awqd::security::WatchedFiles::RequestReload() > 0;
  awqd::obs::LogEvent(awqd::obs::LogLevel::kInfo,
                      any ? "SIGHUP: reloading certificates and tokens"
                          : "SIGHUP: there are no certificates or tokens to reload",
                      {});
}

void WaitForSignals() {
  const sigset_t awaited = AwaitedSignals();
  int number = 0;
  sigwait(&awaited, &number);
  while (number == SIGHUP && !IsTerminalGone()) {
    Reload();
    sigwait(&awaited, &number);
  }
  const auto first = std::chrono::steady_clock::now();
  const char byte = 1;
  // The process ends in an orderly way only if the main thread is told; otherwise it ends by the
  // signal.
  if (write(g_pipe[1], &byte, 1) == 1) {
    do {
      sigwait(&awaited, &number);
    } while (number == SIGHUP || std::chrono::steady_clock::now() - first < kSameSignal);
    g_exit_status = 128 + number;
    TellWhatIsAbandoned();
  }
  _exit(128 + number);
}

// Blocks the signals in the calling thread and all that start later, so that a signal during
// start-up is kept for AwaitSignals, and threads of libraries block it too. Uses libc only. Also
// ignores SIGPIPE and SIGXFSZ, so that writes beyond a limit on file sizes fail instead.
void BlockSignals() {
  const sigset_t awaited = AwaitedSignals();
  pthread_sigmask(SIG_BLOCK, &awaited, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
}

// Starts the thread that waits for the signals. Called once, first in main.
void AwaitSignals() {
  for (int fd = 0; fd <= 2; ++fd) g_terminal[fd] = isatty(fd) == 1;
  if (pipe2(g_pipe, O_CLOEXEC | O_NONBLOCK) != 0) g_pipe[0] = g_pipe[1] = -1;
  std::thread(WaitForSignals).detach();
}

int Serve(const awqd::Options& options) {
  RaiseOpenFiles();
  absl::Status limits = awqd::TryDescriptors(kDescriptors);
  if (limits.ok()) {
    limits =
        awqd::TryThreads(CountThreads(options), CountKernelThreads(options) * kBlasBufferBytes);
  }
  if (!limits.ok()) return Fail(1, limits);
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

// OpenBLAS starts a thread for each core when it is loaded. The kernels call it on one thread, so
// they only cost memory and time, and where a limit forbids them OpenBLAS prints lines of its own
// and sends SIGINT. While libraries are loaded, the process therefore has one core. Uses the system
// calls themselves, because functions of sanitizers do not work yet.
cpu_set_t g_cores;
bool g_narrowed = false;

void NarrowToOneCore() {
  if (syscall(SYS_sched_getaffinity, 0, sizeof(g_cores), &g_cores) <= 0) return;
  int first = 0;
  while (first < CPU_SETSIZE && !CPU_ISSET(first, &g_cores)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  g_narrowed = syscall(SYS_sched_setaffinity, 0, sizeof(one), &one) == 0;
}

[[gnu::constructor]] void UseAllCores() {
  if (g_narrowed) syscall(SYS_sched_setaffinity, 0, sizeof(g_cores), &g_cores);
}

// Runs before any library is initialised (Protocol Buffers builds descriptors: tens of
// milliseconds), so that a signal soon after exec still ends in exit code 0.
using Initializer = void (*)(int, char**, char**);
[[gnu::section(".preinit_array"), gnu::used]] const Initializer kBeforeLibraries = [](int, char**,
                                                                                      char**) {
  awqd::OpenStandardDescriptors();
  BlockSignals();
  NarrowToOneCore();
};

// Threads get as much stack as the main thread may have at most (ulimit -s). Where that is too
// little for libraries, they get this. Returns whether it is.
bool WidenStacks() {
  constexpr size_t kStackBytes = size_t{1} << 20;
  rlimit limit = {};
  if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur >= kStackBytes) return false;
  pthread_attr_t wide;
  pthread_attr_init(&wide);
  pthread_attr_setstacksize(&wide, kStackBytes);
  const bool widened = pthread_setattr_default_np(&wide) == 0;
  pthread_attr_destroy(&wide);
  return widened;
}

int Run(int argc, char** argv) {
  try {
    if (const absl::Status thread = awqd::TryThreads(1); !thread.ok()) return Fail(1, thread);
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

}  // namespace

int main(int argc, char** argv) {
  std::set_terminate(EndOverException);
  if (!WidenStacks()) return Run(argc, argv);
  int code = 1;
  try {
    std::thread([&] { code = Run(argc, argv); }).join();
  } catch (const std::system_error&) {
    return Fail(1, absl::ResourceExhaustedError("threads: the system has none for this process"));
  }
  return code;
}
