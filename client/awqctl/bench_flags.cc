// Help and ranges of awqctl bench.
#include "client/awqctl/bench_flags.h"

#include <cmath>
#include <vector>

#include "CLI/CLI.hpp"
#include "client/awqctl/flag_values.h"

namespace awqd::awqctl {
namespace {

using bench::Plan;

template <typename T>
T OrThrow(const char* flag, absl::StatusOr<T> value) {
  if (!value.ok()) throw CLI::ValidationError(flag, std::string(value.status().message()));
  return *std::move(value);
}

void AddRequests(CLI::App* sub, Plan& plan) {
  sub->add_option_function<std::vector<std::string>>(
         "--weight",
         [&plan](const std::vector<std::string>& words) {
           for (const std::string& word : words) {
             plan.weights.push_back(OrThrow("--weight", bench::ParseWeight(word)));
           }
         },
         "MODEL/WEIGHT, as 'awqctl models MODEL' lists it, or MODEL/WEIGHT:SHARE; repeat it for a "
         "mix")
      ->required()
      ->take_all()
      ->expected(1)
      ->type_name("MODEL/WEIGHT");
  sub->add_option_function<std::string>(
         "--tokens",
         [&plan](const std::string& text) {
           plan.tokens = OrThrow("--tokens", bench::ParseTokens(text));
         },
         "Rows of a request, or a mix with shares: 1,16:3,256 sends 16 three times as often "
         "(default 1)")
      ->type_name("M[:SHARE],...");
  AddDType(sub, "--dtype", plan.dtype, "Of the activations: fp16 (default), bf16 or fp32");
  AddDType(sub, "--output_dtype", plan.output_dtype, "fp16, bf16 or fp32 (default: --dtype)");
  AddPath(sub, plan.path);
  sub->add_option("--priority", plan.priority, "Larger is served first (default 0)");
  sub->add_option("--seed", plan.seed, "Of activations, mix and arrivals")->capture_default_str();
}

void AddLoad(CLI::App* sub, Plan& plan) {
  CLI::Option* closed =
      sub->add_option_function<std::string>(
             "--concurrency",
             [&plan](const std::string& text) {
               for (const double count : OrThrow("--concurrency", bench::ParseSweep(text))) {
                 if (count > 65536 || count != std::floor(count)) {
                   throw CLI::ValidationError("--concurrency",
                                              "expected whole numbers from 1 to 65536");
                 }
                 plan.points.push_back({.concurrency = static_cast<int>(count)});
               }
             },
             "Closed loop: so many callers, each sends again when it has its answer. A list or a "
             "doubling sweep: 1,8,32 or 1..256 (default 1)")
          ->type_name("N,...");
  sub->add_option_function<std::string>(
         "--rate",
         [&plan](const std::string& text) {
           for (const double rate : OrThrow("--rate", bench::ParseSweep(text))) {
             plan.points.push_back({.rate = rate});
           }
         },
         "Open loop: so many requests a second, sent when they are due whatever the server does; "
         "latency counts from then. A list or sweep")
      ->type_name("R,...")
      ->excludes(closed);
  AddWord(sub, "--arrivals", plan.poisson, Words<bool>{{"poisson", true}, {"constant", false}},
          "Of --rate: poisson (default) or constant");
  sub->add_option("--channels", plan.channels, "Connections that the callers share")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  sub->add_option("--max_in_flight", plan.max_in_flight,
                  "Of --rate: calls that may be unanswered; what is due beyond waits, and is told")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
}

// Seconds or milliseconds into a duration.
CLI::Option* AddTime(CLI::App* sub, const char* name, absl::Duration unit, absl::Duration& target,
                     const char* help) {
  return sub
      ->add_option_function<double>(
          name, [&target, unit](const double& count) { target = count * unit; }, help)
      ->check(NumberFrom(0, 1e7));
}

void AddMeasure(CLI::App* sub, BenchFlags& flags) {
  Plan& plan = flags.plan;
  CLI::Option* duration =
      AddTime(sub, "--duration", absl::Seconds(1), plan.duration, "Seconds to measure (default 5)");
  AddTime(sub, "--warmup", absl::Seconds(1), plan.warmup,
          "Seconds of load before that, not counted (default 1)");
  sub->add_option("--requests", plan.requests, "Measure so many requests instead of a time")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->excludes(duration);
  AddTime(sub, "--deadline_ms", absl::Milliseconds(1), plan.deadline,
          "Deadline of each request from the time it is due; goodput counts what meets it");
  sub->add_flag("--health", plan.health,
                "Ask grpc.health.v1 every 10 ms beside the load and tell how long it took");
  sub->add_option("--svg", flags.svg, "Write a latency-throughput plot to this file");
  sub->add_option("--json_file", flags.json_file, "Write what --json prints to this file");
}

}  // namespace

void AddBenchFlags(CLI::App* sub, BenchFlags& flags) {
  AddRequests(sub, flags.plan);
  sub->add_flag("--shared_memory", flags.shared_memory,
                "Pass tensors in shared memory instead of messages, to a server on this machine "
                "that runs with --shared_memory_prefix");
  AddLoad(sub, flags.plan);
  AddMeasure(sub, flags);
}

std::string CheckBenchFlags(const BenchFlags& flags) {
  if (flags.plan.deadline <= absl::ZeroDuration()) return "--deadline_ms: expected more than 0";
  if (flags.plan.duration <= absl::ZeroDuration()) return "--duration: expected more than 0";
  return "";
}

}  // namespace awqd::awqctl
