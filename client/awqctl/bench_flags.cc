// Help and ranges of awqctl bench.
#include <cmath>
#include <vector>

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
  CLI::Option_group* what = sub->add_option_group("What to ask for");
  const auto add = [&](const char* flag, bool mlp, const char* help) {
    what->add_option_function<std::vector<std::string>>(
            flag,
            [&plan, flag, mlp](const std::vector<std::string>& words) {
              for (const std::string& word : words) {
                plan.weights.push_back(OrThrow(flag, bench::ParseWeight(word)));
                plan.weights.back().mlp = mlp;
              }
            },
            help)
        ->take_all()
        ->expected(1);
  };
  add("--weight", false,
      "MODEL/WEIGHT or MODEL/STACK, as 'awqctl models MODEL' lists them. Repeat it for a mix; "
      "MODEL/WEIGHT:3 is asked for three times as often");
  add("--mlp", true,
      "MODEL/PATH of a gated MLP, as 'awqctl mlp' takes it; may be mixed with --weight");
  what->require_option(1, 0);
  sub->add_option("--top_k", plan.top_k, "Experts of each token, where there are experts")
      ->check(CLI::Range(int64_t{1}, int64_t{64}))
      ->capture_default_str();
  sub->add_option_function<std::string>(
         "--tokens",
         [&plan](const std::string& text) {
           plan.tokens = OrThrow("--tokens", bench::ParseTokens(text));
         },
         "Tokens of a request, or a mix: 1,16:3,256 sends 16 three times as often as the others "
         "(default 1)")
      ->type_name("M[:SHARE],...");
  AddDType(sub, "--dtype", plan.dtype, "Type of the activations: fp16 (default), bf16 or fp32");
  AddDType(sub, "--output_dtype", plan.output_dtype,
           "Type of the results: fp16, bf16 or fp32 (default: --dtype)");
  AddPath(sub, plan.path);
  sub->add_option("--priority", plan.priority,
                  "Priority of the requests; larger goes first (default 0)");
  sub->add_option("--seed", plan.seed, "Seed of activations, mix and arrivals")
      ->capture_default_str();
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
             "Closed loop: this many callers; each sends its next request when it has its answer. "
             "A list, or a sweep that doubles: 1,8,32 or 1..256 (default 1)")
          ->type_name("N,...");
  sub->add_option_function<std::string>(
         "--rate",
         [&plan](const std::string& text) {
           for (const double rate : OrThrow("--rate", bench::ParseSweep(text))) {
             plan.points.push_back({.rate = rate});
           }
         },
         "Open loop: this many requests a second. Each is sent when it is due, however slow the "
         "server is, and its latency counts from then. A list or a sweep, as above")
      ->type_name("R,...")
      ->excludes(closed);
  AddWord(sub, "--arrivals", plan.poisson, Words<bool>{{"poisson", true}, {"constant", false}},
          "How requests of --rate arrive: poisson (default) or constant");
  sub->add_option("--channels", plan.channels, "Connections that the callers share")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  sub->add_option(
         "--max_in_flight", plan.max_in_flight,
         "With --rate: calls that may be unanswered at a time; requests that are due beyond "
         "them wait, and the report says so")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
}

// Seconds or milliseconds into a duration.
CLI::Option* AddTime(CLI::App* sub, const char* name, absl::Duration unit, absl::Duration& target,
                     const char* help, bool may_be_zero = false) {
  const auto store = [=, &target](const double& count) {
    target = count * unit;
    if (target > absl::ZeroDuration() || may_be_zero) return;
    throw CLI::ValidationError(name, "expected more than 0");
  };
  return sub->add_option_function<double>(name, store, help)->check(NumberFrom(0, 1e7));
}

void AddMeasure(CLI::App* sub, BenchFlags& flags) {
  Plan& plan = flags.plan;
  CLI::Option* duration =
      AddTime(sub, "--duration", absl::Seconds(1), plan.duration, "Seconds to measure (default 5)");
  AddTime(sub, "--warmup", absl::Seconds(1), plan.warmup,
          "Seconds of load before the measured ones, not counted (default 1)", true);
  sub->add_option("--requests", plan.requests, "Measure this many requests instead of a time")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->excludes(duration);
  AddTime(sub, "--deadline_ms", absl::Milliseconds(1), plan.deadline,
          "Deadline of each request, from when it is due; goodput counts requests that meet it");
  sub->add_flag("--health", plan.health,
                "Also ask grpc.health.v1 every 10 ms and report how long the answers took");
  sub->add_option("--svg", flags.svg, "Write a latency-throughput plot to this file");
  sub->add_option("--json_file", flags.json_file, "Write what --json prints to this file");
}

}  // namespace

void AddBenchFlags(CLI::App* sub, BenchFlags& flags) {
  AddRequests(sub, flags.plan);
  CLI::Option* const shared =
      sub->add_flag("--shared_memory", flags.shared_memory,
                    "Pass tensors in shared memory instead of messages. The server must be on this "
                    "machine and run with --shared_memory_prefix");
  using bench::Protocol;
  CLI::Option* const protocol = AddWord(
      sub, "--protocol", flags.plan.protocol,
      Words<Protocol>{{"awqd", Protocol::kAwqd}, {"oip", Protocol::kInference}},
      "Protocol of the requests: awqd (default), or oip, the Open Inference Protocol, whose "
      "answers do not say what ran");
  protocol->excludes(shared)->excludes(sub->get_option("--priority"));
  AddLoad(sub, flags.plan);
  AddMeasure(sub, flags);
}

}  // namespace awqd::awqctl
