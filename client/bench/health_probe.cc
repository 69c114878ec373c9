// One blocking Check after another.
#include "client/bench/health_probe.h"

#include <chrono>
#include <utility>

#include "client/bench/clock.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace awqd::bench {
namespace {
constexpr auto kInterval = std::chrono::milliseconds(10);
constexpr auto kLimit = std::chrono::seconds(5);
}  // namespace

HealthProbe::HealthProbe(std::shared_ptr<grpc::Channel> channel)
    : channel_(std::move(channel)), thread_([this] { Loop(); }) {}

HealthProbe::~HealthProbe() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

HealthFacts HealthProbe::Stop() {
  stop_ = true;
  thread_.join();
  return std::move(facts_);
}

void HealthProbe::Loop() {
  auto next = std::chrono::steady_clock::now();
  while (!stop_) {
    CheckOnce();
    next = std::max(next + kInterval, std::chrono::steady_clock::now());
    std::this_thread::sleep_until(next);
  }
}

void HealthProbe::CheckOnce() {
  const auto stub = grpc::health::v1::Health::NewStub(channel_);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kLimit);
  grpc::health::v1::HealthCheckResponse response;
  const int64_t sent_ns = NowNs();
  const grpc::Status status =
      stub->Check(&context, grpc::health::v1::HealthCheckRequest(), &response);
  if (!status.ok()) {
    ++facts_.failed;
    return;
  }
  facts_.latency.Add(NowNs() - sent_ns);
  if (response.status() != grpc::health::v1::HealthCheckResponse::SERVING) ++facts_.not_serving;
}

}  // namespace awqd::bench
