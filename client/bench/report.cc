// JSON of a bench.
#include "client/bench/report.h"

#include "absl/strings/ascii.h"
#include "client/tensor.h"
#include "nlohmann/json.hpp"

namespace awqd::bench {
namespace {

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

}  // namespace

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

}  // namespace awqd::bench
