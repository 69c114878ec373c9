// The command line of awqctl: every flag, its help and its range. All of it is in this file,
// because CLI11 takes seconds to compile wherever it is included.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/awqctl/commands.h"
#include "client/command_line/help.h"
#include "kernels/base/text.h"

namespace awqd::awqctl {
namespace {

using bench::Plan;
using command_line::HelpDetail;
using command_line::HelpFormatter;
using command_line::Nearest;
using command_line::OneOf;

constexpr char kAbout[] =
    "awqctl: talks to an awqd server, and looks into model folders.\n\n"
    "Examples:\n"
    "  awqctl status\n"
    "  awqctl load my-model && awqctl models my-model\n"
    "  awqctl dequantize my-model model.layers.0.mlp.up_proj -o up_proj.safetensors\n"
    "  awqctl matmul my-model model.layers.0.mlp.up_proj --random 8\n"
    "  awqctl compare got.npy expected.npy --max_relative_error 1e-3\n"
    "  awqctl inspect models/my-model\n"
    "  awqctl --address unix:/run/awqd.sock healthcheck --wait 30\n"
    "  awqctl bench --weight my-model/model.layers.0.mlp.up_proj --concurrency 1..64\n";

constexpr char kExitCodes[] =
    "Exit codes:\n"
    "  0  done\n"
    "  1  bad arguments; compare, diff: they differ; inspect: not all of it loads\n"
    "  2  the server could not be reached\n"
    "  3  the call failed (its status and message are on stderr)\n"
    "  4  healthcheck: the server is not serving\n"
    "  5  a local file or folder could not be read, written or used\n"
    "  128 + n  signal n ended it\n"
    "Results go to stdout, errors and progress to stderr.\n"
    "Each flag of all commands has a twin AWQCTL_<FLAG> in the environment, such as "
    "AWQCTL_TOKEN_FILE.";

// --- Kinds of values ---

// Refuses all but numbers from `min` to `max`. CLI::Range lets NaN pass.
CLI::Validator NumberFrom(double min, double max) {
  const auto check = [min, max](const std::string& text) -> std::string {
    double value = 0;
    if (absl::SimpleAtod(text, &value) && value >= min && value <= max) return "";
    return absl::StrCat("got '", text, "', expected a number from ", min, " to ", max);
  };
  return CLI::Validator(check, absl::StrCat("FLOAT in [", min, " - ", max, "]"));
}

// Words, and the values that they stand for.
template <typename T>
using Words = std::vector<std::pair<std::string, T>>;

// A flag whose value is one of `words`, in either case. Help lists them as "a|b|c", by which the
// shells complete them. CLI::CheckedTransformer would accept the numbers behind the words too.
template <typename T>
CLI::Option* AddWord(CLI::App* app, const std::string& flag, T& target, const Words<T>& words,
                     const std::string& help) {
  std::vector<std::string> names;
  std::string preset;
  for (const auto& [name, value] : words) {
    names.push_back(name);
    if (value == target) preset = name;
  }
  const auto store = [flag, names, words, &target](const std::string& text) {
    for (const auto& [name, value] : words) {
      if (absl::AsciiStrToLower(text) != name) continue;
      target = value;
      return;
    }
    throw CLI::ValidationError(flag, "got '" + text + "', expected " + OneOf(names));
  };
  return app->add_option_function<std::string>(flag, store, help)
      ->type_name(absl::StrJoin(names, "|"))
      ->default_str(preset);
}

// --dtype and its like.
CLI::Option* AddDType(CLI::App* app, const std::string& flag, v1::DType& target,
                      const std::string& help) {
  return AddWord<v1::DType>(app, flag, target,
                            {{"fp16", v1::FP16}, {"bf16", v1::BF16}, {"fp32", v1::FP32}}, help);
}

// --dtype and --output_dtype of products.
void AddDTypes(CLI::App* app, v1::DType& dtype, v1::DType& output_dtype, const std::string& help) {
  AddDType(app, "--dtype", dtype, help);
  AddDType(app, "--output_dtype", output_dtype, "Type of the result (default: --dtype)");
}

void AddPath(CLI::App* app, v1::Path& target) {
  AddWord<v1::Path>(app, "--path", target,
                    {{"auto", v1::AUTO}, {"fused", v1::FUSED}, {"dequantize", v1::DEQUANTIZE}},
                    "How to compute");
}

// "begin:end" with either side left out, as in Python. The end is not included.
void AddRange(CLI::App* sub, const char* name, int64_t& begin, int64_t& end, const char* help) {
  const auto number = [](const std::string& part, int64_t& value) {
    return part.empty() || (absl::SimpleAtoi(part, &value) && value >= 0);
  };
  const auto store = [=, &begin, &end](const std::string& text) {
    const std::vector<std::string> parts = absl::StrSplit(text, ':');
    if (parts.size() == 2 && number(parts[0], begin) && number(parts[1], end) &&
        (parts[1].empty() || end > begin)) {
      return;
    }
    throw CLI::ValidationError(
        name, "got '" + text + "', expected begin:end with begin < end, for example 0:128");
  };
  sub->add_option_function<std::string>(
         name, store, std::string(help) + " begin:end; end is not included; default all")
      ->type_name("BEGIN:END");
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

// A whole number from `min` to `max` with a default.
template <typename T>
void AddNumber(CLI::App* sub, const char* name, T& target, T min, T max, const char* help) {
  sub->add_option(name, target, help)->check(CLI::Range(min, max))->capture_default_str();
}

template <typename T>
T OrThrow(const char* flag, absl::StatusOr<T> value) {
  if (!value.ok()) throw CLI::ValidationError(flag, std::string(value.status().message()));
  return *std::move(value);
}

// --- Flags of several commands ---

// Certificates and tokens, for every command that calls a server.
void AddSecurityFlags(CLI::App* app, client::Security& security) {
  app->add_option("--tls_ca", security.tls_ca,
                  "PEM file of the CAs that may have signed the server's certificate; "
                  "connections to host:port then speak TLS");
  app->add_option("--tls_cert", security.tls_cert,
                  "PEM file with a certificate of this client, for servers that ask for one");
  app->add_option("--tls_key", security.tls_key, "PEM file with its key");
  app->add_option("--token_file", security.token_file, "File with the token that every call shows");
  app->add_flag("--insecure_token", security.insecure_token,
                "Send the token without TLS beyond this machine, where everybody on the way can "
                "read it");
}

// Gives each flag of all commands the variable AWQCTL_<FLAG>. A server refuses variables AWQD_...
// that it does not know, and has files of its own under such names. Names that awqctl had before
// count where the new one is not set.
void NameVariables(CLI::App* app) {
  static const std::map<std::string, const char*> older = {{"address", "AWQD_ADDRESS"},
                                                           {"tls_ca", "AWQD_TLS_CA"},
                                                           {"tls_cert", "AWQD_CLIENT_CERT"},
                                                           {"tls_key", "AWQD_CLIENT_KEY"},
                                                           {"token_file", "AWQD_TOKEN_FILE"}};
  for (CLI::Option* option : app->get_options([](CLI::Option*) { return true; })) {
    if (!option->get_configurable()) continue;  // help, version
    const std::string& flag = option->get_lnames().front();
    const std::string name = "AWQCTL_" + absl::AsciiStrToUpper(flag);
    const char* const value = std::getenv(name.c_str());
    const bool set = value != nullptr && *value != '\0';
    option->envname(set || !older.contains(flag) ? name : older.at(flag));
  }
}

void AddModel(CLI::App* sub, Flags& flags) {
  sub->add_option("model", flags.model, "Name of a loaded model")->required();
}

void AddWeight(CLI::App* sub, Flags& flags) {
  AddModel(sub, flags);
  sub->add_option("weight", flags.weight, "Path of a weight, as 'awqctl models MODEL' lists it")
      ->required();
}

CLI::Option* AddSharedMemory(CLI::App* sub, bool& target) {
  return sub->add_flag(
      "--shared_memory", target,
      "Pass tensors in shared memory instead of messages. The server must be on this "
      "machine, run with --shared_memory_prefix, and be allowed to open this user's files");
}

void AddQuiet(CLI::App* sub, Flags& flags) {
  sub->add_flag("-q,--quiet", flags.quiet,
                "Show no progress bar (without a terminal there is none)");
}

// A router in place of `ids`.
void AddRouter(CLI::App* sub, RouterFlags& router, CLI::Option* ids) {
  CLI::Option* logits =
      sub->add_option("--router_logits", router.logits,
                      "Instead of --expert_ids: .npy with the router's logits [..., experts], by "
                      "which the server chooses --top_k experts and sums their results")
          ->excludes(ids);
  AddWord<v1::RouterScoring>(
      sub, "--scoring", router.scoring,
      {{"softmax", v1::SOFTMAX}, {"sigmoid", v1::SIGMOID}, {"sqrtsoftplus", v1::SQRTSOFTPLUS}},
      "How scores are made of logits")
      ->needs(logits);
  sub->add_option("--correction_bias", router.correction_bias,
                  ".npy [experts], added to the scores that experts are chosen by")
      ->needs(logits);
  sub->add_option("--n_group", router.n_group, "Groups of experts")->needs(logits);
  sub->add_option("--topk_group", router.topk_group, "Groups that experts are chosen from")
      ->needs(logits);
  sub->add_flag("--norm_topk_prob", router.norm_topk_prob, "Weights of a token add up to 1")
      ->needs(logits);
  sub->add_option("--routed_scaling_factor", router.routed_scaling_factor, "Factor of the weights")
      ->needs(logits);
}

// The flags that matmul and mlp have in common.
// `prefix`: of the names of the two flags.
void AddScales(CLI::App* sub, const std::string& prefix, std::optional<double>& scale,
               std::string& scales, const std::string& of) {
  CLI::Option* one =
      sub->add_option("--" + prefix + "activation_scale", scale,
                      "Scale of " + of + ", for --quantize_activations static or fp8_static");
  sub->add_option("--" + prefix + "activation_scales", scales,
                  ".npy with several scales of " + of + ": of experts one for each")
      ->excludes(one);
}

void AddQuantization(CLI::App* sub, Flags& flags) {
  AddWord<v1::ActivationQuantization>(
      sub, "--quantize_activations", flags.quantize_activations,
      {{"none", v1::ACTIVATIONS_AS_SENT},
       {"per_token", v1::INT8_PER_TOKEN},
       {"static", v1::INT8_STATIC},
       {"declared", v1::INT8_AS_DECLARED},
       {"fp8", v1::FP8_PER_TOKEN},
       {"fp8_block", v1::FP8_PER_BLOCK_128},
       {"fp8_static", v1::FP8_STATIC},
       {"fp8_declared", v1::FP8_AS_DECLARED},
       {"never", v1::ACTIVATIONS_FLOATING}},
      "Round activations to INT8, or to E4M3 with fp8, in the server: per_token and fp8 with a "
      "scale for each token, fp8_block for each 128 of K, static by --activation_scale, declared "
      "as the checkpoint says. INT8 is for a weight alone. never: not by the server's own default "
      "either");
  AddScales(sub, "", flags.activation_scale, flags.activation_scales,
            "activations, which may also be sent as int8");
}

void AddProduct(CLI::App* sub, Flags& flags) {
  CLI::Option* input =
      sub->add_option("input", flags.input, "Activations: .npy of float16 or float32");
  sub->add_option("--random", flags.random_tokens,
                  "Instead of a file: send this many rows, drawn uniformly from [-1, 1)")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
      ->excludes(input);
  sub->add_option("--seed", flags.seed, "Seed of --random")->capture_default_str();
  sub->add_option("-o,--output", flags.output,
                  "Write the result as .npy (bf16 as float32, which holds it exactly)");
  AddPath(sub, flags.path);
  AddWord<v1::ActivationFunction>(
      sub, "--activation_function", flags.activation_function,
      {{"none", v1::NONE},
       {"relu", v1::RELU},
       {"gelu", v1::GELU},
       {"silu", v1::SILU},
       {"gelu_tanh", v1::GELU_TANH},
       {"swiglu_oai", v1::SWIGLU_OAI},
       {"situ", v1::SITU}},
      "Function of the product and its bias; gelu is computed by erf; swiglu_oai and situ are for "
      "mlp");
  AddDTypes(sub, flags.dtype, flags.output_dtype,
            "Type in which activations are sent (default: the file's; fp16 with --random)");
  AddQuantization(sub, flags);
  CLI::Option* ids = sub->add_option("--expert_ids", flags.expert_ids,
                                     "Experts of each token: .npy of int32 [..., top_k]");
  sub->add_option("--router_weights", flags.router_weights,
                  "Weights of each token's experts, shaped like --expert_ids. Without them the "
                  "result has a row for each expert of each token")
      ->needs(ids);
  sub->add_option("--top_k", flags.top_k,
                  "With --random: so many experts for each token, drawn with weights (default 2); "
                  "with --router_logits: so many are chosen")
      ->check(CLI::Range(int64_t{1}, int64_t{64}))
      ->excludes(ids);
  AddRouter(sub, flags.router, ids);
  AddSharedMemory(sub, flags.shared_memory);
  // Without activations there is nothing to do.
  sub->callback([&flags, sub] {
    if (!flags.input.empty() || flags.random_tokens) return;
    throw CLI::ValidationError(sub->get_name(), "expected an input file or --random");
  });
}

// --- awqctl bench ---

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
  AddNumber<int64_t>(sub, "--top_k", plan.top_k, 1, 64,
                     "Experts of each token, where there are experts");
  sub->add_option_function<std::string>(
         "--tokens",
         [&plan](const std::string& text) {
           plan.tokens = OrThrow("--tokens", bench::ParseTokens(text));
         },
         "Tokens of a request, or a mix: 1,16:3,256 sends 16 three times as often as the others "
         "(default 1)")
      ->type_name("M[:SHARE],...");
  AddDTypes(sub, plan.dtype, plan.output_dtype, "Type of the activations");
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
  AddWord<bool>(sub, "--arrivals", plan.poisson, {{"poisson", true}, {"constant", false}},
                "How requests of --rate arrive");
  AddNumber(sub, "--channels", plan.channels, 1, 1024, "Connections that the callers share");
  AddNumber(sub, "--max_in_flight", plan.max_in_flight, 1, 1 << 20,
            "With --rate: calls that may be unanswered at a time; requests that are due beyond "
            "them wait, and the report says so");
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

void AddBenchFlags(CLI::App* sub, Flags& all) {
  BenchFlags& flags = all.bench;
  AddRequests(sub, flags.plan);
  CLI::Option* const shared = AddSharedMemory(sub, flags.shared_memory);
  CLI::Option* const protocol = AddWord<bench::Protocol>(
      sub, "--protocol", flags.plan.protocol,
      {{"awqd", bench::Protocol::kAwqd}, {"oip", bench::Protocol::kInference}},
      "Protocol of the requests; oip is the Open Inference Protocol, whose answers do not say what "
      "ran");
  protocol->excludes(shared)->excludes(sub->get_option("--priority"));
  CLI::Option* const ring =
      sub->add_option("--ring", flags.plan.ring_path,
                      "Send the requests through rings of the server's --ring_path PATH, one for "
                      "each of at most 8 threads, a quarter of the cores")
          ->type_name("PATH")
          ->excludes(shared)
          ->excludes(protocol);
  sub->add_flag("--ring_empty", flags.plan.ring_empty,
                "Make the ring's empty call instead: what the ring takes by itself")
      ->needs(ring);
  const auto set_gpu = [&plan = flags.plan](const std::string& text) {
    int gpu = 0;
    if (!text.empty() && (!absl::SimpleAtoi(text, &gpu) || gpu < 0)) {
      throw CLI::ValidationError("--device_tensors",
                                 absl::StrCat("got '", text, "', expected the number of a GPU"));
    }
    plan.gpu = gpu;
  };
  sub->add_option_function<std::string>(
         "--device_tensors", set_gpu,
         "Keep activations and results in memory of GPU N of this process (default 0), which the "
         "server, run with --cuda_shared_memory, reads and writes there")
      ->expected(0, 1)
      ->default_str("0")
      ->type_name("[N]")
      ->excludes(shared)
      ->excludes(protocol);
  AddLoad(sub, flags.plan);
  ring->excludes(sub->get_option("--rate"));
  AddMeasure(sub, flags);
}

// --- Flags of one command ---

void AddKernelsFlags(CLI::App* sub, Flags& flags) {
  sub->add_flag("--markdown", flags.markdown, "Print a Markdown table");
  sub->add_flag("--wide", flags.wide, "Print all columns, however long a line is");
}

void AddTopFlags(CLI::App* sub, Flags& flags) {
  AddTime(sub, "--interval", absl::Seconds(1), flags.interval,
          "Seconds from one screen to the next (default 1)");
  AddNumber<int64_t>(sub, "--screens", flags.screens, 0, int64_t{1} << 40,
                     "How many to show; 0: no end");
}

void AddModelsFlags(CLI::App* sub, Flags& flags) {
  sub->add_option("model", flags.model, "Name of a loaded model");
}

void AddLoadFlags(CLI::App* sub, Flags& flags) {
  sub->add_option("model", flags.model, "A directory of the server's model repository")->required();
  sub->add_flag("--require_all_weights", flags.require_all_weights,
                "Fail, with the reason, where a quantised weight cannot be read. Otherwise the "
                "server serves the others, unless it was started with this flag.");
}

void AddDequantizeFlags(CLI::App* sub, Flags& flags) {
  AddWeight(sub, flags);
  sub->add_option("-o,--output", flags.output, "File to write: .npy or .safetensors")->required();
  AddDType(sub, "--dtype", flags.dtype, "Type to write (default fp16); bf16 for .safetensors only");
  AddRange(sub, "--rows", flags.row_begin, flags.row_end, "Rows (of K)");
  AddRange(sub, "--columns", flags.column_begin, flags.column_end, "Columns (of N)");
  AddSharedMemory(sub, flags.shared_memory);
  AddQuiet(sub, flags);
}

void AddMatmulFlags(CLI::App* sub, Flags& flags) {
  AddWeight(sub, flags);
  AddProduct(sub, flags);
  sub->add_option("--bias", flags.bias,
                  "Bias to use instead of the weight's own: .npy of N numbers, of experts "
                  "[experts, N]");
}

void AddMlpFlags(CLI::App* sub, Flags& flags) {
  AddModel(sub, flags);
  sub->add_option("mlp", flags.weight,
                  "Common beginning of the paths of gate_proj, up_proj and down_proj")
      ->required();
  sub->add_option("--gate", flags.gate, "Path of the gate projection, if it is not MLP.gate_proj");
  sub->add_option("--up", flags.up, "Path of the up projection, if it is not MLP.up_proj");
  sub->add_option("--down", flags.down, "Path of the down projection, if it is not MLP.down_proj");
  AddProduct(sub, flags);
  sub->add_option("--gate_bias", flags.gate_bias,
                  "Bias of gate to use instead of its own: .npy of its columns, of experts "
                  "[experts, columns]; with --up_bias");
  sub->add_option("--up_bias", flags.up_bias, "Bias of up, with --gate_bias");
  sub->add_option("--down_bias", flags.down_bias, "Bias of down");
  CLI::Option* shared =
      sub->add_option("--shared_expert", flags.shared_expert,
                      "Common beginning of the paths of a gated MLP whose result is added to that "
                      "of the experts");
  sub->add_option("--shared_expert_gate", flags.shared_expert_gate,
                  ".npy w [K]: the shared expert's result is multiplied by sigmoid(x . w)")
      ->needs(shared);
  AddScales(sub, "down_", flags.down_activation_scale, flags.down_activation_scales,
            "what enters down");
  using Parameters = v1::ActivationParameters;
  const auto add = [&](const char* flag, void (Parameters::*set)(float), const char* help) {
    sub->add_option_function<float>(
        flag, [&flags, set](const float& value) { (flags.activation_parameters.*set)(value); },
        help);
  };
  add("--activation_limit", &Parameters::set_limit,
      "Clamp gate to at most this, and up on both sides (default: swiglu_oai 7, others none)");
  add("--activation_alpha", &Parameters::set_alpha, "Constant of swiglu_oai (default 1.702)");
  add("--activation_beta", &Parameters::set_beta, "Constant of situ (default 4)");
  add("--activation_linear_beta", &Parameters::set_linear_beta,
      "Constant of situ (default 25); 0 leaves up as it is");
}

void AddQuantizeKvFlags(CLI::App* sub, Flags& flags) {
  sub->add_option("input", flags.input, "The block: .npy of float16 or float32")->required();
  sub->add_option("-o,--output", flags.output,
                  "Write PREFIX.codes.npy, PREFIX.scales.npy and PREFIX.zeros.npy")
      ->type_name("PREFIX");
  AddDType(sub, "--dtype", flags.dtype, "Type in which the block is sent (default: the file's)");
  AddDType(sub, "--scale_dtype", flags.scale_dtype,
           "Type of scales and zeros, fp16 (default) or fp32");
}

void AddCompareFlags(CLI::App* sub, Flags& flags) {
  sub->add_option("actual", flags.actual, "A.npy")->required();
  sub->add_option("expected", flags.expected, "B.npy")->required();
  CLI::Option_group* how = sub->add_option_group("Criterion");
  how->add_option("--max_relative_error", flags.max_relative_error,
                  "Pass when the relative error is at most this")
      ->check(NumberFrom(0, 1e300));
  how->add_flag("--bit_exact", flags.bit_exact, "Pass when type, shape and every bit are the same");
  how->require_option(1);
}

void AddHealthcheckFlags(CLI::App* sub, Flags& flags) {
  sub->add_option(
      "--service", flags.service,
      "Service to ask about, such as awqd.v1.QuantizedInference; default: the whole server");
  AddTime(sub, "--wait", absl::Seconds(1), flags.wait,
          "Keep asking for this many seconds until it serves", true);
}

// The model that a tool reads.
void AddFolder(CLI::App* sub, Flags& flags, const char* name, const char* help) {
  AddQuiet(sub, flags);
  sub->add_option(name, flags.tool.folder, help)->required();
}

// The flags for what a tool writes. Returns --to.
CLI::Option* AddTarget(CLI::App* sub, Flags& flags, const std::vector<std::string>& more_formats,
                       const std::string& usual = "") {
  flags.tool.to = usual;
  sub->preparse_callback([&flags, usual](size_t) { flags.tool.to = usual; });
  sub->add_option("-o,--output", flags.tool.output,
                  "The directory to make, or with --to gguf a file NAME.gguf")
      ->required();
  Words<std::string> formats;
  for (const char* name : {"awq", "gptq", "compressed-tensors", "gemlite", "ft", "mlx", "gguf"}) {
    formats.emplace_back(name, name);
  }
  for (const std::string& name : more_formats) formats.emplace_back(name, name);
  return AddWord(sub, "--to", flags.tool.to, formats, "Format to write");
}

void AddInspectFlags(CLI::App* sub, Flags& flags) {
  AddFolder(sub, flags, "folder", "The model's directory");
}

void AddDiffFlags(CLI::App* sub, Flags& flags) {
  AddFolder(sub, flags, "a", "A, a model's directory");
  sub->add_option("b", flags.tool.other, "B, what it is compared with")->required();
  AddNumber<int64_t>(sub, "--worst", flags.tool.worst, 0, 1000, "Elements to show of each linear");
}

void AddRoundingFlags(CLI::App* sub, Flags& flags) {
  AddNumber(sub, "--bits", flags.tool.bits, 2, 8, "Bits of a code");
  sub->add_option("--group_size", flags.tool.group_size,
                  "Rows of K that share a scale; -1: all of K")
      ->check(CLI::Range(int64_t{-1}, int64_t{1} << 31))
      ->default_str("128, of mlx 64, of gguf 32");
  sub->add_flag("--symmetric", flags.tool.symmetric,
                "No zero points: one in the middle for all (default with --to ft)");
  sub->add_flag("--search", flags.tool.search,
                "For each group, search for the range that gives the least squared error");
  sub->add_option("--leave_out", flags.tool.leave_out,
                  "Leave linears dense whose path contains this; may be repeated");
}

void AddTypeOfDense(CLI::App* sub, Flags& flags) {
  AddWord<std::string>(
      sub, "--dtype", flags.tool.dtype,
      {{"fp16", "F16"}, {"bf16", "BF16"}, {"fp32", "F32"}, {"q8_0", "Q8_0"}, {"q4_0", "Q4_0"}},
      "Type of dense weights, and of linears that mlx or gguf does not hold; fp32 keeps every bit, "
      "q8_0 and q4_0 are of gguf (default: what config.json says, else fp16)");
}

void AddQuantizeFlags(CLI::App* sub, Flags& flags) {
  AddFolder(sub, flags, "folder", "The dense model's directory");
  AddTarget(sub, flags, {}, "gptq");
  AddRoundingFlags(sub, flags);
}

void AddMergeFlags(CLI::App* sub, Flags& flags) {
  AddFolder(sub, flags, "base", "The model's directory, dense or quantised");
  sub->add_option("adapter", flags.tool.other, "The directory with adapter_config.json")
      ->required();
  AddTarget(sub, flags, {"dense"}, "dense");
  AddTypeOfDense(sub, flags);
  AddRoundingFlags(sub, flags);
}

void AddConvertFlags(CLI::App* sub, Flags& flags) {
  AddFolder(sub, flags, "folder",
            "The quantised model's directory, or a .gguf file; for gguf a dense model's too");
  AddTarget(sub, flags, {"dense"})->required()->default_str("");
  AddTypeOfDense(sub, flags);
  sub->add_flag("--verify", flags.tool.verify,
                "Read OUT back, compare every element, tensor and file, and write what was "
                "compared to OUT/verified.json");
}

// An error, or "". The server reads the same names (its README).
std::string CheckName(const std::string& name) {
  const bool good = name.size() <= 64 && std::all_of(name.begin(), name.end(), [](char c) {
                      return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
                             std::string("._@-").find(c) != std::string::npos;
                    });
  return good ? "" : "got '" + name + "', expected at most 64 letters, digits and . _ @ -";
}

void AddTokenFlags(CLI::App* sub, Flags& flags) {
  const std::vector<std::string> roles = {"infer", "read", "admin", "metrics", "attach"};
  sub->add_option("name", flags.token.name, "Name of the identity, for logs and limits")
      ->required()
      ->check(CLI::Validator(CheckName, "NAME"));
  sub->add_option_function<std::vector<std::string>>(
         "--roles",
         [&flags](const std::vector<std::string>& words) {
           flags.token.roles = absl::StrJoin(words, ",");
         },
         "What it may do")
      ->required()
      ->delimiter(',')
      ->expected(1)
      ->take_all()
      ->check(CLI::IsMember(roles))
      ->type_name(absl::StrJoin(roles, "|") + ",...");
  sub->add_option("--out", flags.token.out,
                  "Make this file of the token, which only its owner may read; without it the "
                  "token is printed on stdout");
  sub->add_option("--append", flags.token.append,
                  "Add the line to this file; without it the line is printed on stderr");
}

// --- The commands ---

// The groups of the commands in the help.
constexpr char kServer[] = "Server", kModels[] = "Models", kCalls[] = "Calls",
               kFiles[] = "Files, without a server";

struct CommandRow {
  const char* group;
  std::variant<Command*, LocalCommand*> run;
  const char* name;
  void (*add_flags)(CLI::App* sub, Flags& flags);  // its own; null: none
  const char* about;
};

// In the order of the help.
constexpr CommandRow kCommands[] = {
    {kServer, Status, "status", nullptr, "Version, devices, limits and models of the server"},
    {kServer, Kernels, "kernels", AddKernelsFlags,
     "The support matrix: every kernel, and whether this server can run it"},
    {kServer, Top, "top", AddTopFlags,
     "Watch the server: throughput, latency, batches, queues and memory, for each device and "
     "model. q or Ctrl-C ends it."},
    {kModels, Models, "models", AddModelsFlags,
     "List models, or one model's weights with their kernels"},
    {kModels, Load, "load", AddLoadFlags,
     "Load a model, or reload it; requests in flight finish with the old weights"},
    {kModels, Unload, "unload", AddModel, "Unload a model"},
    {kCalls, Dequantize, "dequantize", AddDequantizeFlags,
     "Write a weight, or a block of it, to a .npy or .safetensors file.\n"
     "Rows arrive in blocks, so the weight may be larger than memory. The file appears when it is "
     "complete.\n\n"
     "Example: awqctl dequantize my-model layers.0.q_proj -o q.npy --rows 0:128"},
    {kCalls, Matmul, "matmul", AddMatmulFlags,
     "Multiply activations [..., K] by a weight [K, N] and say which kernel ran.\n"
     "A path with '*' is a stack of experts: each token goes to its own of them.\n\n"
     "Examples: awqctl matmul my-model layers.0.q_proj x.npy -o y.npy\n"
     "          awqctl matmul my-model layers.0.q_proj --random 256 --path fused\n"
     "          awqctl matmul my-model 'layers.0.mlp.experts.*.up_proj' --random 64 --top_k 2"},
    {kCalls, Mlp, "mlp", AddMlpFlags,
     "Run a gated MLP in one call: y = down(activation_function(gate(x)) * up(x)).\n\n"
     "Examples: awqctl mlp my-model model.layers.0.mlp --random 16\n"
     "          awqctl mlp my-model 'model.layers.0.mlp.experts.*' x.npy --expert_ids ids.npy "
     "--router_weights weights.npy -o y.npy"},
    {kCalls, QuantizeKv, "quantize-kv", AddQuantizeKvFlags,
     "Quantize a block of keys or values [tokens, heads, head_dim] to 4-bit codes with a scale and "
     "a zero for each head of each token, and say what that loses.\n\n"
     "Example: awqctl quantize-kv keys.npy -o keys"},
    {kFiles, Compare, "compare", AddCompareFlags,
     "Compare two .npy files; exit 1 when they differ. Needs no server.\n"
     "The relative error is |A - B| / |B| over all elements (Frobenius norm)."},
    {kServer, Healthcheck, "healthcheck", AddHealthcheckFlags,
     "Ask grpc.health.v1. Exit codes are those of grpc_health_probe: 0 serving, 1 bad arguments, "
     "2 no connection, 3 the call failed, 4 not serving"},
    {kCalls, Bench, "bench", AddBenchFlags,
     "Load the server with products, of experts too, and gated MLPs, and measure latency and "
     "throughput.\n\n"
     "Examples:\n"
     "  awqctl bench --weight my-model/layers.0.q_proj --concurrency 1..256 --svg plot.svg\n"
     "  awqctl bench --weight my-model/layers.0.q_proj --rate 1000,2000 --deadline_ms 20\n"
     "  awqctl bench --weight m/a:3 --weight m/b --tokens 1:8,16:2,256 --concurrency 32 --health"},
    {kFiles, Inspect, "inspect", AddInspectFlags,
     "Say what is in a model's folder: the format, every quantised linear, what is not quantised "
     "and why, what would not load and why. Needs no server; exit 1 when not all of it loads.\n\n"
     "Example: awqctl inspect models/my-model"},
    {kFiles, Diff, "diff", AddDiffFlags,
     "Compare the weights of two model folders, quantised or dense, linear by linear: the relative "
     "error |A - B| / |B| (Frobenius norm), the largest one, the worst elements, codes, zeros and "
     "scales that differ. Needs no server; exit 1 when anything differs.\n\n"
     "Example: awqctl diff models/my-model-awq models/my-model"},
    {kFiles, Quantize, "quantize", AddQuantizeFlags,
     "Quantise a dense model (safetensors of FP16, BF16 or FP32) by rounding to nearest, and say "
     "what each linear loses. Embeddings, heads and routers stay as they are. Needs no server. OUT "
     "appears when it is complete.\n\n"
     "Example: awqctl quantize models/my-model -o models/my-model-w4 --search"},
    {kFiles, Convert, "convert", AddConvertFlags,
     "Write a quantised model, or a GGUF file, in another format, without changing a bit of any "
     "element. Refuses a linear that the format cannot hold; mlx and gguf get it dense, rounded "
     "once to --dtype. Needs no server. OUT appears when it is complete.\n\n"
     "Examples: awqctl convert models/my-model -o models/my-model-awq --to awq --verify\n"
     "          awqctl convert models/my-model -o my-model.gguf --to gguf --dtype q8_0"},
    {kFiles, Merge, "merge", AddMergeFlags,
     "Add a LoRA or DoRA adapter of peft to its base model, dense or quantised, in FP32, and write "
     "the result dense or quantised by rounding to nearest, linear by linear. Says what rounding "
     "lost. Needs no server. OUT appears when it is complete.\n\n"
     "Example: awqctl merge models/my-model my-lora -o models/my-model-merged --dtype bf16"},
    {kFiles, Token, "token", AddTokenFlags,
     "Make a random token of 256 bits, and the line for the server's --tokens file, which holds "
     "its SHA-256 alone. Needs no server.\n\n"
     "Example: awqctl token alice --roles infer,read --out alice.token --append tokens"}};

// `topic` becomes that of the command "help".
void AddCommands(CLI::App* app, Flags& flags, std::string& topic) {
  for (const CommandRow& row : kCommands) {
    CLI::App* const sub = app->add_subcommand(row.name, row.about)->group(row.group);
    if (row.add_flags != nullptr) row.add_flags(sub, flags);
  }
  app->add_subcommand("help", "Tell about a command: awqctl help COMMAND")
      ->add_option("command", topic, "Name of a command; without it they are listed");
}

std::vector<std::string> CommandNames() {
  std::vector<std::string> names;
  for (const CommandRow& row : kCommands) names.emplace_back(row.name);
  return names;
}

// The error for `got`, which is no command.
std::string NoCommand(const std::string& got) {
  const std::string meant = Nearest(got, CommandNames());
  if (meant.empty()) return absl::StrCat("got '", got, "', expected ", OneOf(CommandNames()));
  return absl::StrCat("got '", got, "', expected a command; did you mean '", meant, "'?");
}

// The error of a line without a command. CLI11's own does not say which word was given.
std::string CommandError(const CLI::App& app) {
  const std::vector<std::string> words = app.remaining();
  if (words.empty()) return absl::StrCat("got no command, expected ", OneOf(CommandNames()));
  const auto found = std::find_if(words.begin(), words.end(),
                                  [](const std::string& word) { return word[0] != '-'; });
  return NoCommand(found == words.end() ? words[0] : *found);
}

// The flags of all commands, and the commands. The formatter of `app` at first becomes its
// commands'.
void AddAll(CLI::App* app, Flags& flags, std::string& topic) {
  app->require_subcommand(1);
  app->fallthrough();
  app->footer(kExitCodes);
  app->formatter(std::make_shared<HelpFormatter>(HelpDetail::kAll));
  app->set_help_flag("-h,--help", "Tell about a command, or list them; --help=all: tell all");
  app->set_version_flag("--version", "awqctl " AWQD_VERSION, "Print the version");
  app->add_option("--address", flags.address,
                  "Address of the server: host:port or unix:/path, of a list the first; default "
                  "AWQCTL_ADDRESS, else 127.0.0.1:8001");
  app->add_option_function<double>(
         "--timeout",
         [&flags](const double& seconds) {
           flags.timeout = seconds == 0 ? absl::InfiniteDuration() : absl::Seconds(seconds);
         },
         "Seconds a call may take; 0 = no limit (default 60; none for load and dequantize; 5 for "
         "healthcheck)")
      ->check(NumberFrom(0, 1e9));
  app->add_flag("--json", flags.json, "Print JSON for programs");
  AddSecurityFlags(app, flags.security);
  NameVariables(app);
  AddCommands(app, flags, topic);
  app->formatter(std::make_shared<HelpFormatter>(HelpDetail::kShort));
}

// The list of commands.
std::string List(const CLI::App& app) {
  return app.get_formatter()->make_help(&app, "awqctl", CLI::AppFormatMode::Normal);
}

// The list and every command's own help.
std::string WholeHelp(const CLI::App& app) {
  std::string out = List(app);
  const std::string line(command_line::kHelpColumns, '-');
  for (const CommandRow& row : kCommands) {
    absl::StrAppend(&out, "\n", line, "\n", app.get_subcommand(row.name)->help("awqctl"));
  }
  return out;
}

// The line that refuses a command line: a misspelled flag first, whatever else is wrong.
std::string ParseFailure(const CLI::App& app, const std::vector<std::string>& args,
                         const CLI::ParseError& error) {
  const auto commands = app.get_subcommands();
  const bool no_command =
      commands.empty() && error.get_exit_code() == static_cast<int>(CLI::ExitCodes::RequiredError);
  const auto unknown = command_line::FindUnknownFlag(commands.empty() ? app : *commands[0], args);
  const bool misspelled = unknown && (!no_command || !unknown->meant.empty());
  const std::string what = misspelled   ? unknown->Message()
                           : no_command ? CommandError(app)
                                        : error.what();
  return absl::StrCat("awqctl: ", OneLine(what), " (awqctl ",
                      commands.empty() ? "" : commands[0]->get_name() + " ",
                      "--help tells more)\n");
}

}  // namespace

std::optional<Flags> ParseFlags(const std::vector<std::string>& args, std::ostream& out,
                                std::ostream& err, int& exit_code) {
  Flags flags;
  std::string topic;
  CLI::App app(kAbout, "awqctl");
  AddAll(&app, flags, topic);
  exit_code = kOk;
  if (command_line::HelpAsked(args) == HelpDetail::kAll) {
    out << WholeHelp(app);
    return std::nullopt;
  }
  std::vector<std::string> reversed(args.rbegin(), args.rend());  // as CLI11 wants it
  try {
    app.parse(reversed);
    for (const CommandRow& row : kCommands) {
      if (!app.got_subcommand(row.name)) continue;
      flags.command = row.run;
      // The server's AWQD_ADDRESS counts too, and may name several.
      flags.address.resize(std::min(flags.address.find(','), flags.address.size()));
      return flags;
    }
    if (topic.empty()) {
      out << List(app);
    } else if (absl::c_linear_search(CommandNames(), topic)) {
      out << app.get_subcommand(topic)->help("awqctl");
    } else {
      err << "awqctl: " << OneLine(NoCommand(topic)) << "\n";
      exit_code = kBadArguments;
    }
  } catch (const CLI::CallForHelp&) {
    out << app.help();
  } catch (const CLI::CallForVersion& version) {
    out << version.what() << "\n";
  } catch (const CLI::ParseError& error) {
    err << ParseFailure(app, args, error);
    exit_code = kBadArguments;
  }
  return std::nullopt;
}

}  // namespace awqd::awqctl
