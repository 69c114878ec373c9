// Connections, one call of each kind, then the points.
#include "client/bench/bench.h"

#include <chrono>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/bench/payload.h"
#include "client/bench/response.h"
#include "client/convert.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"

namespace awqd::bench {
namespace {

using Channels = std::vector<std::shared_ptr<grpc::Channel>>;

constexpr auto kConnectLimit = std::chrono::seconds(10);
constexpr auto kFirstCallLimit = std::chrono::minutes(2);

absl::StatusOr<Channels> Connect(const std::string& address, int count) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(-1);
  args.SetMaxSendMessageSize(-1);
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Otherwise channels of the same arguments would share one connection.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  Channels channels;
  for (int i = 0; i < count; ++i) {
    channels.push_back(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), args));
  }
  const auto until = std::chrono::system_clock::now() + kConnectLimit;
  for (const auto& channel : channels) {
    if (!channel->WaitForConnected(until)) return absl::UnavailableError("no connection");
  }
  return channels;
}

// One call: a mistake in the plan or on the server is told as itself, not as an error count.
absl::Status TryOnce(const std::shared_ptr<grpc::Channel>& channel, const Payload& payload) {
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kFirstCallLimit);
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareUnaryCall(&context, kMatmulMethod, payload.request, &queue);
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
  if (!ReadResponse(response).has_value()) {
    return absl::InternalError("the answer is not a QuantizedMatmulResponse");
  }
  return absl::OkStatus();
}

absl::StatusOr<PointResult> RunPoint(const std::string& address, const Plan& plan,
                                     const LoadPoint& point, const Payloads& payloads,
                                     const Channels& channels, const ProgressSink& progress) {
  PointResult result;
  result.point = point;
  std::unique_ptr<HealthProbe> probe;
  if (plan.health) {
    auto own = Connect(address, 1);
    if (!own.ok()) return own.status();
    probe = std::make_unique<HealthProbe>(own->front());
  }
  auto load = RunLoad(plan, point, payloads, channels, progress);
  if (probe != nullptr) result.health = probe->Stop();
  result.health_probed = plan.health;
  if (!load.ok()) return load.status();
  result.load = *std::move(load);
  return result;
}

}  // namespace

absl::Status FindShapes(client::Client& client, const client::CallOptions& options, Plan& plan) {
  for (WeightShare& wanted : plan.weights) {
    const auto model = client.GetModel(wanted.model, options);
    if (!model.ok()) return model.status();
    for (const v1::WeightInfo& weight : model->weights()) {
      if (weight.path() != wanted.weight) continue;
      wanted.k = weight.k();
      wanted.n = weight.n();
    }
    if (wanted.k == 0) {
      return absl::NotFoundError(absl::StrCat("model '", wanted.model, "' has no weight '",
                                              wanted.weight, "'; 'awqctl models ", wanted.model,
                                              "' lists them"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<PointResult>> RunBench(const std::string& address, const Plan& plan,
                                                  const BenchEvents& events) {
  auto payloads = Payloads::Make(plan);
  if (!payloads.ok()) return payloads.status();
  auto channels = Connect(address, plan.channels);
  if (!channels.ok()) return channels.status();
  for (const Payload& payload : payloads->all()) {
    if (absl::Status status = TryOnce(channels->front(), payload); !status.ok()) return status;
  }
  std::vector<PointResult> results;
  for (const LoadPoint& point : plan.points) {
    ProgressSink progress;
    if (events.progress) {
      progress = [&](const LoadProgress& now) { events.progress(point, now); };
    }
    auto result = RunPoint(address, plan, point, *payloads, *channels, progress);
    if (!result.ok()) return result.status();
    results.push_back(*std::move(result));
    if (events.point_done) events.point_done(results.back());
  }
  return results;
}

}  // namespace awqd::bench
