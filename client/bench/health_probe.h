// HealthProbe: asks grpc.health.v1 beside a load, on a connection of its own.
#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "client/bench/histogram.h"
#include "grpcpp/channel.h"

namespace awqd::bench {

struct HealthFacts {
  Histogram latency;   // of every Check that was answered
  int64_t failed = 0;  // not answered with OK within 5 s
  int64_t not_serving = 0;
};

class HealthProbe {
 public:
  // Checks every 10 ms until stopped, one at a time. `channel` should carry nothing else.
  explicit HealthProbe(std::shared_ptr<grpc::Channel> channel);
  ~HealthProbe();
  HealthProbe(const HealthProbe&) = delete;
  HealthProbe& operator=(const HealthProbe&) = delete;

  // Ends the probe; once.
  HealthFacts Stop();

 private:
  void Loop();
  void CheckOnce();

  const std::shared_ptr<grpc::Channel> channel_;
  std::atomic<bool> stop_{false};
  HealthFacts facts_;
  std::thread thread_;
};

}  // namespace awqd::bench
