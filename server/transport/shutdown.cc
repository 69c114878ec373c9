// Gather, announce, refuse, wait, close.
#include "server/transport/shutdown.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "grpc/grpc.h"
#include "server/transport/unsent.h"

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

void Gather(const CallGate& gate, absl::Time deadline) {
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

}  // namespace

void ShutDown(grpc::Server* server, CallGate* gate, absl::Time deadline) {
  gate->Close();
  Gather(*gate, deadline);
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
    shutdown.join();
  } else {
    server->Shutdown(absl::ToChronoTime(absl::Now()));
  }
  server->Wait();
}

}  // namespace awqd::transport
