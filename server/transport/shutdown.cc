// Gather, announce, refuse, wait, close.
#include "server/transport/shutdown.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "grpc/grpc.h"

namespace awqd::transport {
namespace {

// Until every caller that repeats itself stands at the gate: so long after the last that came, or
// whose call ended. The most is for callers that do not wait for answers, of whom more always come.
constexpr absl::Duration kGather = absl::Milliseconds(50);
constexpr absl::Duration kGatherMost = absl::Milliseconds(500);
// Until gRPC has written to every connection that the server goes away. It does so within its
// Shutdown, which does not say when.
constexpr absl::Duration kAnnounce = absl::Milliseconds(20);
constexpr absl::Duration kPoll = absl::Milliseconds(2);

void Gather(const Drain& gate, absl::Time deadline) {
  // Calls that came and calls that run.
  const auto look = [&] {
    const int64_t came = gate.turned_away();
    return std::make_pair(came, gate.in_flight() - came);
  };
  const absl::Time most = std::min(absl::Now() + kGatherMost, deadline);
  absl::Time moved = absl::Now();
  for (auto last = look(); absl::Now() < std::min(moved + kGather, most);) {
    absl::SleepFor(kPoll);
    if (const auto seen = look(); seen != last) {
      last = seen;
      moved = absl::Now();
    }
  }
}

// Not joinable when the process is out of threads.
std::thread ThreadFor(std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error&) {
    return std::thread();
  }
}

bool IsTcpConnection(int fd) {
  int protocol = 0, listening = 0;
  socklen_t size = sizeof(protocol);
  if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) != 0) return false;
  size = sizeof(listening);
  if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0) return false;
  return protocol == IPPROTO_TCP && listening == 0;
}

}  // namespace

// Asks the kernel about each socket of the process.
bool AllSent() {
  std::error_code error;
  std::filesystem::directory_iterator files("/proc/self/fd", error);
  for (; !error && files != std::filesystem::directory_iterator(); files.increment(error)) {
    int fd = -1, unsent = 0;
    if (!absl::SimpleAtoi(files->path().filename().string(), &fd) || !IsTcpConnection(fd)) continue;
    if (ioctl(fd, SIOCOUTQ, &unsent) == 0 && unsent > 0) return false;
  }
  return true;
}

void ShutDown(grpc::Server* server, Drain* gate, Acceptor* acceptor, absl::Time deadline) {
  gate->Close();
  Gather(*gate, deadline);
  acceptor->Stop();
  std::atomic<bool> ended{false};
  // Without that thread clients are not told to go away, but calls end as ever.
  std::thread shutdown = ThreadFor([&] {
    server->Shutdown(absl::ToChronoTime(deadline));
    ended = true;
  });
  const absl::Time announced = absl::Now() + kAnnounce;
  while (!ended && absl::Now() < std::min(announced, deadline)) absl::SleepFor(kPoll);
  gate->Refuse();
  // For clients to answer that and close by themselves.
  const absl::Time goodbye = absl::Now() + kRoundTrip;
  const auto idle = [&] { return gate->in_flight() == 0 && absl::Now() > goodbye && AllSent(); };
  while (!ended && absl::Now() < deadline && !idle()) absl::SleepFor(kPoll);
  if (shutdown.joinable()) {
    // Harmless when it has ended; past the deadline gRPC does the same by itself.
    grpc_server_cancel_all_calls(server->c_server());
    acceptor->Cut();
    shutdown.join();
  } else {
    acceptor->Cut();
    server->Shutdown(absl::ToChronoTime(absl::Now()));
  }
  server->Wait();
}

}  // namespace awqd::transport
