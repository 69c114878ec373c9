// Connections, one call of each kind, then the points; their JSON and their SVG plot.
#include "client/bench/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <future>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "client/bench/payload.h"
#include "client/convert.h"
#include "client/tensor.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "kernels/base/status.h"
#include "nlohmann/json.hpp"

namespace awqd::bench {
namespace {

constexpr auto kConnectLimit = std::chrono::seconds(10);
constexpr auto kFirstCallLimit = std::chrono::minutes(2);
constexpr auto kHealthInterval = std::chrono::milliseconds(10);
constexpr auto kHealthLimit = std::chrono::seconds(5);

absl::StatusOr<Connections> Connect(const Target& target, int count) {
  AWQD_ASSIGN_OR_RETURN(client::Credentials credentials,
                        client::Credentials::Read(target.address, target.security));
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(-1);
  args.SetMaxSendMessageSize(-1);
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Otherwise channels of the same arguments would share one connection.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  Connections out = {.credentials = std::move(credentials)};
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
  grpc::ByteBuffer response;
  std::promise<absl::Status> status;
  stub.UnaryCall(&context, payload.method, grpc::StubOptions(), &payload.request, &response,
                 [&](const grpc::Status& result) { status.set_value(client::FromGrpc(result)); });
  AWQD_RETURN_IF_ERROR(status.get_future().get());
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
  if (plan.ring_path.empty()) {
    result.load = RunLoad(plan, point, payloads, connections, progress);
  } else {
    AWQD_ASSIGN_OR_RETURN(result.load,
                          RunRingLoad(plan, point, payloads, target.security, progress));
  }
  probe.request_stop();
  if (probe.joinable()) probe.join();
  return result;
}

// --- JSON ---

using Json = nlohmann::ordered_json;

double Us(int64_t ns) { return static_cast<double>(ns) / 1000; }

Json Times(const Histogram& histogram) {
  Json json = {{"count", histogram.count()}, {"mean_us", histogram.mean_ns() / 1000}};
  for (const NamedQuantile& quantile : kQuantiles) {
    json[std::string(quantile.name) + "_us"] = Us(histogram.QuantileNs(quantile.share));
  }
  json["max_us"] = Us(histogram.max_ns());
  return json;
}

Json PlanJson(const Plan& plan) {
  Json weights = Json::array(), tokens = Json::array();
  for (const WeightShare& weight : plan.weights) {
    weights.push_back({{"model", weight.model},
                       {"weight", weight.weight},
                       {"share", weight.share},
                       {"k", weight.k},
                       {"n", weight.n}});
  }
  for (const TokensShare& entry : plan.tokens) {
    tokens.push_back({{"tokens", entry.tokens}, {"share", entry.share}});
  }
  const bool awqd = plan.protocol == Protocol::kAwqd;
  Json json = {{"protocol", awqd ? "awqd" : "oip"},
               {"ring", !plan.ring_path.empty()},
               {"device_tensors", plan.gpu.has_value()},
               {"weights", weights},
               {"tokens", tokens},
               {"dtype", std::string(client::Name(plan.dtype))},
               {"path", absl::AsciiStrToLower(v1::Path_Name(plan.path))},
               {"arrivals", plan.poisson ? "poisson" : "constant"},
               {"warmup_s", absl::ToDoubleSeconds(plan.warmup)},
               {"duration_s", absl::ToDoubleSeconds(plan.duration)},
               {"requests", plan.requests},
               {"deadline_ms", nullptr},
               {"channels", plan.channels},
               {"max_in_flight", plan.max_in_flight},
               {"seed", plan.seed}};
  if (plan.deadline != absl::InfiniteDuration()) {
    json["deadline_ms"] = absl::ToDoubleMilliseconds(plan.deadline);
  }
  return json;
}

Json Errors(const Tally& tally) {
  Json json = Json::object();
  for (int code = 1; code < kCodes; ++code) {
    if (tally.answers[code] == 0) continue;
    json[CodeName(code)] = {{"count", tally.answers[code]},
                            {"first_message", tally.first_message[code]}};
  }
  return json;
}

Json PointJson(const PointResult& result) {
  const Tally& tally = result.load.tally;
  const Rates rates = RatesOf(result.load);
  Json json = {{"load", result.point.Name()},      {"concurrency", result.point.concurrency},
               {"rate", result.point.rate},        {"seconds", result.load.seconds},
               {"requests_per_s", rates.requests}, {"goodput_per_s", rates.good},
               {"tokens_per_s", rates.tokens},     {"bytes_per_s", rates.bytes},
               {"latency", Times(tally.latency)},  {"refused", Times(tally.refused)},
               {"send_lag", Times(tally.lag)},     {"errors", Errors(tally)},
               {"malformed", tally.malformed},     {"unsent", result.load.unsent}};
  if (tally.executed > 0) {
    const double executed = static_cast<double>(tally.executed);
    json["batch_tokens_mean"] = tally.batch_tokens / executed;
    json["batch_requests_mean"] = tally.batch_requests / executed;
    json["queue"] = Times(tally.queue);
    json["compute"] = Times(tally.compute);
  }
  if (result.health_probed) {
    json["health"] = Times(result.health.latency);
    json["health"]["failed"] = result.health.failed;
    json["health"]["not_serving"] = result.health.not_serving;
  }
  return json;
}

// --- The plot: axes, grid, three lines ---

constexpr double kWidth = 760, kHeight = 460;
constexpr double kLeft = 80, kRight = 24, kTop = 56, kBottom = 56;

struct Line {
  const char* name;
  const char* color;
  double share;
};
constexpr Line kLines[] = {
    {"p50", "#1f77b4", 0.5}, {"p99", "#ff7f0e", 0.99}, {"p99.9", "#d62728", 0.999}};

std::string Escaped(const std::string& text) {
  return absl::StrReplaceAll(text,
                             {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

// 1, 2 or 5 times a power of ten, at least `value`.
double NiceStep(double value) {
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= value * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

std::string Duration(double us) {
  if (us < 1000) return absl::StrFormat("%g us", us);
  if (us < 1e6) return absl::StrFormat("%g ms", us / 1000);
  return absl::StrFormat("%g s", us / 1e6);
}

// Where throughput and latency lie on the page.
class Page {
 public:
  explicit Page(const std::vector<PointResult>& results) {
    double top_rate = 1, low_us = 1e12, high_us = 1;
    for (const PointResult& result : results) {
      top_rate = std::max(top_rate, RatesOf(result.load).requests);
      for (const Line& line : kLines) {
        const double us = Us(result, line);
        if (us <= 0) continue;
        low_us = std::min(low_us, us);
        high_us = std::max(high_us, us);
      }
    }
    step_ = NiceStep(top_rate / 6);
    top_rate_ = std::ceil(top_rate / step_ * (1 + 1e-9)) * step_;
    low_ = std::floor(std::log10(std::min(low_us, high_us)));
    high_ = std::max(low_ + 1, std::ceil(std::log10(high_us)));
  }

  static double Us(const PointResult& result, const Line& line) {
    return static_cast<double>(result.load.tally.latency.QuantileNs(line.share)) / 1000;
  }
  double X(double rate) const { return kLeft + rate / top_rate_ * (kWidth - kLeft - kRight); }
  double Y(double us) const {
    const double part = (std::log10(us) - low_) / (high_ - low_);
    return kHeight - kBottom - part * (kHeight - kTop - kBottom);
  }

  std::string Axes() const {
    std::string svg;
    for (double rate = 0; rate <= top_rate_ * (1 + 1e-9); rate += step_) {
      absl::StrAppendFormat(&svg,
                            "<line class=\"grid\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>"
                            "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%.6g</text>\n",
                            X(rate), kTop, X(rate), kHeight - kBottom, X(rate),
                            kHeight - kBottom + 18, rate);
    }
    for (double power = low_; power <= high_ + 1e-9; power += 1) {
      const double us = std::pow(10, power);
      absl::StrAppendFormat(&svg,
                            "<line class=\"grid\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>"
                            "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n",
                            kLeft, Y(us), kWidth - kRight, Y(us), kLeft - 8, Y(us) + 4,
                            Duration(us));
    }
    absl::StrAppendFormat(
        &svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">requests per second</text>\n",
        (kLeft + kWidth - kRight) / 2, kHeight - 14);
    absl::StrAppendFormat(&svg,
                          "<text transform=\"translate(16 %.1f) rotate(-90)\" "
                          "text-anchor=\"middle\">latency (us, ms, s; logarithmic)</text>\n",
                          (kTop + kHeight - kBottom) / 2);
    return svg;
  }

 private:
  double step_ = 1, top_rate_ = 1, low_ = 0, high_ = 1;
};

std::string Curve(const Page& page, const Line& line, const std::vector<PointResult>& results) {
  std::string corners, marks;
  for (const PointResult& result : results) {
    const double us = Page::Us(result, line);
    if (us <= 0) continue;  // nothing was answered
    const double x = page.X(RatesOf(result.load).requests), y = page.Y(us);
    absl::StrAppendFormat(&corners, "%.1f,%.1f ", x, y);
    absl::StrAppendFormat(&marks,
                          "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" fill=\"%s\">"
                          "<title>%s: %s %s</title></circle>\n",
                          x, y, line.color, result.point.Name(), line.name, Duration(us));
  }
  return absl::StrCat("<polyline fill=\"none\" stroke-width=\"2\" stroke=\"", line.color,
                      "\" points=\"", corners, "\"/>\n", marks);
}

// The load beside the lowest line's marks.
std::string Labels(const Page& page, const std::vector<PointResult>& results) {
  std::string svg;
  for (const PointResult& result : results) {
    const double us = Page::Us(result, kLines[0]);
    if (us <= 0) continue;
    absl::StrAppendFormat(&svg,
                          "<text class=\"load\" x=\"%.1f\" y=\"%.1f\" "
                          "text-anchor=\"middle\">%s</text>\n",
                          page.X(RatesOf(result.load).requests), page.Y(us) + 16,
                          result.point.Name());
  }
  return svg;
}

}  // namespace

absl::Status RunBench(const Target& target, const Plan& plan, const BenchProgress& progress,
                      std::vector<PointResult>* results) {
  AWQD_ASSIGN_OR_RETURN(auto payloads, Payloads::Make(plan));
  AWQD_ASSIGN_OR_RETURN(auto connections, Connect(target, plan.channels));
  client::ClientOptions options = {.address = target.address};
  options.security = target.security;
  AWQD_ASSIGN_OR_RETURN(const auto sharing, client::Client::Create(options));
  std::vector<std::unique_ptr<client::SharedRegion>> regions;
  for (const Payload& payload : payloads.all()) {
    if (payload.device_memory != nullptr) {
      AWQD_ASSIGN_OR_RETURN(regions.emplace_back(),
                            sharing->ShareMemory(payload.device_memory->Request(payload.region)));
    }
    AWQD_RETURN_IF_ERROR(TryOnce(connections, payload));
  }
  for (const LoadPoint& point : plan.points) {
    const auto sink = [&](const LoadProgress& now) { return progress(point, now); };
    AWQD_ASSIGN_OR_RETURN(auto result, RunPoint(target, plan, point, payloads, connections, sink));
    const bool interrupted = result.load.interrupted, gone = result.load.server_gone;
    results->push_back(std::move(result));
    if (gone) return absl::UnavailableError("the server has gone away");
    if (interrupted) break;
  }
  return absl::OkStatus();
}

Rates RatesOf(const LoadResult& load) {
  const auto rate = [&](double count) { return count / load.seconds; };
  const Tally& tally = load.tally;
  return {rate(static_cast<double>(tally.completed)), rate(static_cast<double>(tally.good)),
          rate(static_cast<double>(tally.tokens)),
          rate(static_cast<double>(tally.request_bytes + tally.response_bytes))};
}

std::string ToJson(const std::string& address, const Plan& plan,
                   const std::vector<PointResult>& results) {
  Json points = Json::array();
  for (const PointResult& result : results) points.push_back(PointJson(result));
  const Json json = {{"address", address}, {"plan", PlanJson(plan)}, {"points", points}};
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string ToSvg(const std::string& title, const std::vector<PointResult>& results) {
  const Page page(results);
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" width=\"%g\" "
      "height=\"%g\">\n<style>text{font:12px sans-serif;fill:#333}.load{font-size:10px;fill:#777}"
      ".title{font-size:15px}.grid{stroke:#ddd}</style>\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
      "<text class=\"title\" x=\"%g\" y=\"22\">%s</text>\n",
      kWidth, kHeight, kWidth, kHeight, kLeft, Escaped(title));
  double x = kLeft;
  for (const Line& line : kLines) {
    absl::StrAppendFormat(&svg,
                          "<rect x=\"%g\" y=\"34\" width=\"12\" height=\"4\" fill=\"%s\"/>"
                          "<text x=\"%g\" y=\"41\">%s</text>\n",
                          x, line.color, x + 18, line.name);
    x += 80;
  }
  absl::StrAppend(&svg, page.Axes());
  for (const Line& line : kLines) absl::StrAppend(&svg, Curve(page, line, results));
  absl::StrAppend(&svg, Labels(page, results), "</svg>\n");
  return svg;
}

}  // namespace awqd::bench
