// Connections, one call of each kind, then the points.
#include "client/bench/bench.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "client/bench/payload.h"
#include "client/convert.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"

namespace awqd::bench {
namespace {

constexpr auto kConnectLimit = std::chrono::seconds(10);
constexpr auto kFirstCallLimit = std::chrono::minutes(2);
constexpr auto kHealthInterval = std::chrono::milliseconds(10);
constexpr auto kHealthLimit = std::chrono::seconds(5);

absl::StatusOr<Connections> Connect(const Target& target, int count) {
  absl::StatusOr<client::Credentials> credentials =
      client::Credentials::Read(target.address, target.security);
  if (!credentials.ok()) return credentials.status();
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(-1);
  args.SetMaxSendMessageSize(-1);
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Otherwise channels of the same arguments would share one connection.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  Connections out = {.credentials = *std::move(credentials)};
  for (int i = 0; i < count; ++i) {
    out.channels.push_back(
        grpc::CreateCustomChannel(target.address, out.credentials.channel(), args));
  }
  const auto until = std::chrono::system_clock::now() + kConnectLimit;
  for (const auto& channel : out.channels) {
    if (!channel->WaitForConnected(until)) return absl::UnavailableError("no connection");
  }
  return out;
}

// One call: a mistake in the plan or on the server is told as itself, not as an error count.
absl::Status TryOnce(const Connections& connections, const Payload& payload) {
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(connections.channels.front());
  grpc::ClientContext context;
  connections.credentials.Authorize(context);
  context.set_deadline(std::chrono::system_clock::now() + kFirstCallLimit);
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareUnaryCall(&context, payload.method, payload.request, &queue);
  call->StartCall();
  grpc::ByteBuffer response;
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  if (!status.ok()) return client::FromGrpc(status);
  if (!ReadResponse(payload.protocol, response).has_value()) {
    return absl::InternalError("the answer is not one of a product");
  }
  return absl::OkStatus();
}

// Checks the server's health, one blocking call after another, until it is told to stop.
void ProbeHealth(const std::stop_token& stop, const Connections& connection, HealthFacts& facts) {
  const auto stub = grpc::health::v1::Health::NewStub(connection.channels.front());
  auto next = std::chrono::steady_clock::now();
  while (!stop.stop_requested()) {
    grpc::ClientContext context;
    connection.credentials.Authorize(context);
    context.set_deadline(std::chrono::system_clock::now() + kHealthLimit);
    grpc::health::v1::HealthCheckResponse response;
    const int64_t sent_ns = NowNs();
    if (stub->Check(&context, grpc::health::v1::HealthCheckRequest(), &response).ok()) {
      facts.latency.Add(NowNs() - sent_ns);
      if (response.status() != grpc::health::v1::HealthCheckResponse::SERVING) ++facts.not_serving;
    } else {
      ++facts.failed;
    }
    next = std::max(next + kHealthInterval, std::chrono::steady_clock::now());
    std::this_thread::sleep_until(next);
  }
}

absl::StatusOr<PointResult> RunPoint(const Target& target, const Plan& plan, const LoadPoint& point,
                                     const Payloads& payloads, const Connections& connections,
                                     const ProgressSink& progress) {
  PointResult result;
  result.point = point;
  result.health_probed = plan.health;
  std::jthread probe;
  if (plan.health) {
    // Its own connection: behind the load's requests a Check would measure their queue.
    auto own = Connect(target, 1);
    if (!own.ok()) return own.status();
    probe = std::jthread([own = *std::move(own), &result](const std::stop_token& stop) {
      ProbeHealth(stop, own, result.health);
    });
  }
  auto load = RunLoad(plan, point, payloads, connections, progress);
  probe.request_stop();
  if (probe.joinable()) probe.join();
  if (!load.ok()) return load.status();
  result.load = *std::move(load);
  return result;
}

}  // namespace

absl::StatusOr<std::vector<PointResult>> RunBench(const Target& target, const Plan& plan,
                                                  const BenchProgress& progress) {
  auto payloads = Payloads::Make(plan);
  if (!payloads.ok()) return payloads.status();
  auto connections = Connect(target, plan.channels);
  if (!connections.ok()) return connections.status();
  for (const Payload& payload : payloads->all()) {
    if (absl::Status status = TryOnce(*connections, payload); !status.ok()) return status;
  }
  std::vector<PointResult> results;
  for (const LoadPoint& point : plan.points) {
    ProgressSink sink;
    if (progress) sink = [&](const LoadProgress& now) { return progress(point, now); };
    auto result = RunPoint(target, plan, point, *payloads, *connections, sink);
    if (!result.ok()) return result.status();
    results.push_back(*std::move(result));
    if (results.back().load.interrupted) break;
  }
  return results;
}

}  // namespace awqd::bench
