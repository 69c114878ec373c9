// The command line of awqctl: every flag, its help and its range.
#include "client/awqctl/flags.h"

#include <algorithm>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/awqctl/commands.h"
#include "client/awqctl/flag_values.h"
#include "client/command_line/help.h"
#include "client/command_line/spelling.h"
#include "kernels/base/text.h"

namespace awqd::awqctl {
namespace {

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
    "  5  a local file could not be read or written\n"
    "Results go to stdout, errors and progress to stderr.";

// "begin:end" with either side left out, as in Python.
std::string ParseRange(const std::string& text, int64_t& begin, int64_t& end) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  const auto number = [](const std::string& part, int64_t& value) {
    return part.empty() || (absl::SimpleAtoi(part, &value) && value >= 0);
  };
  if (parts.size() != 2 || !number(parts[0], begin) || !number(parts[1], end) ||
      (!parts[1].empty() && end <= begin)) {
    return "got '" + text + "', expected begin:end with begin < end, for example 0:128";
  }
  return "";
}

std::vector<const CLI::App*> Commands(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* command) { return command->get_name() != "help"; });
}

std::vector<std::string> CommandNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : Commands(app)) names.push_back(command->get_name());
  return names;
}

// What each command is for; a command that is not here stands by itself.
struct Purpose {
  const char* group;
  std::vector<const char*> commands;
};
void GroupByPurpose(CLI::App* app) {
  const std::vector<Purpose> purposes = {
      {"Server", {"status", "kernels", "healthcheck", "top"}},
      {"Models", {"models", "load", "unload"}},
      {"Calls", {"dequantize", "matmul", "mlp", "quantize-kv", "bench"}},
      {"Files, without a server", {"inspect", "diff", "quantize", "convert", "compare", "token"}}};
  for (const Purpose& purpose : purposes) {
    for (const char* command : purpose.commands) app->get_subcommand(command)->group(purpose.group);
  }
}

// That `got` is no command.
std::string NoCommand(const CLI::App& app, const std::string& got) {
  const std::vector<std::string> commands = CommandNames(app);
  const std::string meant = Nearest(got, commands);
  if (meant.empty()) return absl::StrCat("got '", got, "', expected ", OneOf(commands));
  return absl::StrCat("got '", got, "', expected a command; did you mean '", meant, "'?");
}

// What is wrong with a line without a command, which CLI11 tells without the word it was given.
std::string CommandError(const CLI::App& app) {
  const std::vector<std::string> words = app.remaining();
  if (words.empty()) return absl::StrCat("got no command, expected ", OneOf(CommandNames(app)));
  const auto found = std::find_if(words.begin(), words.end(),
                                  [](const std::string& word) { return word[0] != '-'; });
  return NoCommand(app, found == words.end() ? words[0] : *found);
}

// The first help that fits: an application's own text has no place for both ends.
class App {
 public:
  explicit App(Flags& flags) : flags_(flags), app_(kAbout, "awqctl") {
    app_.require_subcommand(1);
    app_.fallthrough();
    app_.footer(kExitCodes);
    app_.formatter(std::make_shared<HelpFormatter>(HelpDetail::kAll));  // of the commands
    app_.set_help_flag("-h,--help", "Tell about a command, or list them; --help=all: tell all");
    app_.set_version_flag("--version", "awqctl " AWQD_VERSION, "Print the version");
    app_.add_option("--address", flags_.address,
                    "Address of the server: host:port or unix:/path, of a list the first; default "
                    "AWQD_ADDRESS, else 127.0.0.1:8001")
        ->envname("AWQD_ADDRESS")
        ->capture_default_str();
    app_.add_option_function<double>(
            "--timeout",
            [this](const double& seconds) {
              flags_.timeout = seconds == 0 ? absl::InfiniteDuration() : absl::Seconds(seconds);
            },
            "Seconds a call may take; 0 = no limit (default 60; none for load and "
            "dequantize; 5 for healthcheck)")
        ->check(NumberFrom(0, 1e9));
    app_.add_flag("--json", flags_.json, "Print JSON for programs");
    AddSecurityFlags(&app_, flags_.security);
    AddServerCommands();
    AddModelCommands();
    AddDequantize();
    AddMatmul();
    AddMlp();
    AddQuantizeKv();
    AddCompare();
    AddHealthcheck();
    AddBench();
    AddToolCommands(&app_, flags_);
    AddTokenCommand(&app_, flags_);
    help_ = app_.add_subcommand("help", "Tell about a command: awqctl help COMMAND");
    help_->add_option("command", topic_, "Name of a command; without it they are listed");
    GroupByPurpose(&app_);
    app_.formatter(std::make_shared<HelpFormatter>(HelpDetail::kShort));
  }

  CLI::App& cli() { return app_; }

  // Whether the command is "help", which needs nothing but its topic.
  bool IsHelp() const { return help_->parsed(); }
  // Of the command `topic`, or "awqctl help"'s list; empty where there is no such command.
  std::string HelpOfTopic() {
    if (topic_.empty()) return Help();
    for (const CLI::App* command : Commands(app_)) {
      if (command->get_name() == topic_) return command->help("awqctl");
    }
    return "";
  }
  std::string TopicError() const { return NoCommand(app_, topic_); }
  // The list of commands.
  std::string Help() const {
    return app_.get_formatter()->make_help(&app_, "awqctl", CLI::AppFormatMode::Normal);
  }
  // The list and every command's own.
  std::string WholeHelp() const {
    std::string out = Help();
    const std::string line(command_line::kHelpColumns, '-');
    for (const CLI::App* command : Commands(app_)) {
      absl::StrAppend(&out, "\n", line, "\n", command->help("awqctl"));
    }
    return out;
  }

 private:
  CLI::App* AddCommand(Command* command, const char* name, const std::string& about) {
    CLI::App* sub = app_.add_subcommand(name, about);
    sub->callback([this, command] { flags_.command = command; });
    return sub;
  }

  void AddWeight(CLI::App* sub) {
    sub->add_option("model", flags_.model, "Name of a loaded model")->required();
    sub->add_option("weight", flags_.weight, "Path of a weight, as 'awqctl models MODEL' lists it")
        ->required();
  }

  void AddSharedMemory(CLI::App* sub) {
    sub->add_flag(
        "--shared_memory", flags_.shared_memory,
        "Pass tensors in shared memory instead of messages. The server must be on this "
        "machine, run with --shared_memory_prefix, and be allowed to open this user's files");
  }

  void AddServerCommands() {
    AddCommand(Status, "status", "Version, devices, limits and models of the server");
    CLI::App* kernels = AddCommand(
        Kernels, "kernels", "The support matrix: every kernel, and whether this server can run it");
    kernels->add_flag("--markdown", flags_.markdown, "Print a Markdown table");
    CLI::App* top =
        AddCommand(Top, "top",
                   "Watch the server: throughput, latency, batches, queues and memory, for "
                   "each device and model. Ctrl-C ends it.");
    top->add_option("--interval", flags_.interval_s, "Seconds from one screen to the next")
        ->check(NumberFrom(0.01, 3600))
        ->capture_default_str();
    top->add_option("--screens", flags_.screens, "How many to show; 0: no end")
        ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
        ->capture_default_str();
  }

  void AddModelCommands() {
    CLI::App* models =
        AddCommand(Models, "models", "List models, or one model's weights with their kernels");
    models->add_option("model", flags_.model, "Name of a loaded model");
    CLI::App* load = AddCommand(
        Load, "load", "Load a model, or reload it; requests in flight finish with the old weights");
    load->add_option("model", flags_.model, "A directory of the server's model repository")
        ->required();
    CLI::App* unload = AddCommand(Unload, "unload", "Unload a model");
    unload->add_option("model", flags_.model, "Name of a loaded model")->required();
  }

  void AddDequantize() {
    CLI::App* sub =
        AddCommand(Dequantize, "dequantize",
                   "Write a weight, or a block of it, to a .npy or .safetensors file.\n"
                   "Rows arrive in blocks, so the weight may be larger than memory. The file "
                   "appears when it is complete.\n\n"
                   "Example: awqctl dequantize my-model layers.0.q_proj -o q.npy "
                   "--rows 0:128");
    AddWeight(sub);
    sub->add_option("-o,--output", flags_.output, "File to write: .npy or .safetensors")
        ->required();
    AddDType(sub, "--dtype", flags_.dtype,
             "Type to write: fp16 (default), bf16 (.safetensors only) or fp32");
    AddRange(sub, "--rows", flags_.row_begin, flags_.row_end, "Rows (of K)");
    AddRange(sub, "--columns", flags_.column_begin, flags_.column_end, "Columns (of N)");
    AddSharedMemory(sub);
    sub->add_flag("-q,--quiet", flags_.quiet,
                  "Show no progress bar (without a terminal there is none)");
  }

  void AddRange(CLI::App* sub, const char* name, int64_t& begin, int64_t& end, const char* help) {
    sub->add_option_function<std::string>(
           name,
           [name, &begin, &end](const std::string& text) {
             const std::string error = ParseRange(text, begin, end);
             if (!error.empty()) throw CLI::ValidationError(name, error);
           },
           std::string(help) + " begin:end; end is not included; default all")
        ->type_name("BEGIN:END");
  }

  void AddMatmul() {
    CLI::App* sub =
        AddCommand(Matmul, "matmul",
                   "Multiply activations [..., K] by a weight [K, N] and say which kernel ran.\n"
                   "A path with '*' is a stack of experts: each token goes to its own of them.\n\n"
                   "Examples: awqctl matmul my-model layers.0.q_proj x.npy -o y.npy\n"
                   "          awqctl matmul my-model layers.0.q_proj --random 256 --path "
                   "fused\n"
                   "          awqctl matmul my-model 'layers.0.mlp.experts.*.up_proj' --random 64 "
                   "--top_k 2");
    AddWeight(sub);
    AddProduct(Matmul, sub);
    sub->add_option("--bias", flags_.bias,
                    "Bias to use instead of the weight's own: .npy of N numbers, of experts "
                    "[experts, N]");
    AddQuantization(sub, flags_.quantize_activations);
    CLI::Option* scale = sub->add_option(
        "--activation_scale", flags_.activation_scale,
        "Scale of all tokens, for int8 activations or --quantize_activations static");
    sub->add_option("--activation_scales", flags_.activation_scales,
                    ".npy with the scale of each token, for int8 activations")
        ->excludes(scale);
  }

  void AddMlp() {
    CLI::App* sub = AddCommand(
        Mlp, "mlp",
        "Run a gated MLP in one call: y = down(activation_function(gate(x)) * up(x)).\n\n"
        "Examples: awqctl mlp my-model model.layers.0.mlp --random 16\n"
        "          awqctl mlp my-model 'model.layers.0.mlp.experts.*' x.npy --expert_ids ids.npy "
        "--router_weights weights.npy -o y.npy");
    sub->add_option("model", flags_.model, "Name of a loaded model")->required();
    sub->add_option("mlp", flags_.weight,
                    "Common beginning of the paths of gate_proj, up_proj and down_proj")
        ->required();
    sub->add_option("--gate", flags_.gate,
                    "Path of the gate projection, if it is not MLP.gate_proj");
    sub->add_option("--up", flags_.up, "Path of the up projection, if it is not MLP.up_proj");
    sub->add_option("--down", flags_.down,
                    "Path of the down projection, if it is not MLP.down_proj");
    AddProduct(Mlp, sub);
  }

  // What matmul and mlp have in common.
  void AddProduct(Command* command, CLI::App* sub) {
    CLI::Option* input =
        sub->add_option("input", flags_.input, "Activations: .npy of float16 or float32");
    sub->add_option("--random", flags_.random_tokens,
                    "Instead of a file: send this many rows, drawn uniformly from [-1, 1)")
        ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
        ->excludes(input);
    sub->add_option("--seed", flags_.seed, "Seed of --random")->capture_default_str();
    sub->add_option("-o,--output", flags_.output,
                    "Write the result as .npy (bf16 as float32, which holds it exactly)");
    AddPath(sub, flags_.path);
    AddActivationFunction(sub, flags_.activation_function);
    AddDType(sub, "--dtype", flags_.dtype,
             "Type in which activations are sent: fp16, bf16 or fp32 (default: the file's; fp16 "
             "with --random)");
    AddDType(sub, "--output_dtype", flags_.output_dtype,
             "Type of the result: fp16, bf16 or fp32 (default: --dtype)");
    CLI::Option* ids = sub->add_option("--expert_ids", flags_.expert_ids,
                                       "Experts of each token: .npy of int32 [..., top_k]");
    sub->add_option("--router_weights", flags_.router_weights,
                    "Weights of each token's experts, shaped like --expert_ids. Without them the "
                    "result has a row for each expert of each token")
        ->needs(ids);
    sub->add_option("--top_k", flags_.top_k,
                    "With --random: so many experts for each token, drawn with weights (default 2)")
        ->check(CLI::Range(int64_t{1}, int64_t{64}))
        ->excludes(ids);
    AddSharedMemory(sub);
    sub->callback([this, command, sub] {
      flags_.command = command;
      if (!flags_.input.empty() || flags_.random_tokens) return;
      throw CLI::ValidationError(sub->get_name(), "expected an input file or --random");
    });
  }

  void AddQuantizeKv() {
    CLI::App* sub = AddCommand(
        QuantizeKv, "quantize-kv",
        "Quantize a block of keys or values [tokens, heads, head_dim] to 4-bit codes with a "
        "scale and a zero for each head of each token, and say what that loses.\n\n"
        "Example: awqctl quantize-kv keys.npy -o keys");
    sub->add_option("input", flags_.input, "The block: .npy of float16 or float32")->required();
    sub->add_option("-o,--output", flags_.output,
                    "Write PREFIX.codes.npy, PREFIX.scales.npy and PREFIX.zeros.npy")
        ->type_name("PREFIX");
    AddDType(sub, "--dtype", flags_.dtype,
             "Type in which the block is sent: fp16, bf16 or fp32 (default: the file's)");
    AddDType(sub, "--scale_dtype", flags_.scale_dtype,
             "Type of scales and zeros: fp16 (default) or fp32");
  }

  void AddCompare() {
    CLI::App* sub = app_.add_subcommand(
        "compare",
        "Compare two .npy files; exit 1 when they differ. Needs no server.\n"
        "The relative error is |A - B| / |B| over all elements (Frobenius norm).");
    sub->add_option("actual", flags_.actual, "A.npy")->required();
    sub->add_option("expected", flags_.expected, "B.npy")->required();
    CLI::Option_group* how = sub->add_option_group("Criterion");
    how->add_option("--max_relative_error", flags_.max_relative_error,
                    "Pass when the relative error is at most this")
        ->check(NumberFrom(0, 1e300));
    how->add_flag("--bit_exact", flags_.bit_exact,
                  "Pass when type, shape and every bit are the same");
    how->require_option(1);
    sub->callback([this] { flags_.local_command = Compare; });
  }

  void AddHealthcheck() {
    CLI::App* sub =
        AddCommand(Healthcheck, "healthcheck",
                   "Ask grpc.health.v1. Exit codes are those of grpc_health_probe: 0 serving, "
                   "1 bad arguments, 2 no connection, 3 the call failed, 4 not serving");
    sub->add_option(
        "--service", flags_.service,
        "Service to ask about, such as awqd.v1.QuantizedInference; default: the whole server");
    sub->add_option_function<double>(
           "--wait", [this](const double& seconds) { flags_.wait = absl::Seconds(seconds); },
           "Keep asking for this many seconds until it serves")
        ->check(NumberFrom(0, 1e9));
  }

  void AddBench() {
    CLI::App* sub = AddCommand(
        Bench, "bench",
        "Load the server with products, of experts too, and gated MLPs, and measure latency and "
        "throughput.\n\n"
        "Examples:\n"
        "  awqctl bench --weight my-model/layers.0.q_proj --concurrency 1..256 --svg plot.svg\n"
        "  awqctl bench --weight my-model/layers.0.q_proj --rate 1000,2000 --deadline_ms 20\n"
        "  awqctl bench --weight m/a:3 --weight m/b --tokens 1:8,16:2,256 --concurrency 32 "
        "--health");
    AddBenchFlags(sub, flags_.bench);
  }

  Flags& flags_;
  CLI::App app_;
  CLI::App* help_ = nullptr;
  std::string topic_;
};

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
  App app(flags);
  exit_code = kOk;
  if (command_line::HelpAsked(args) == HelpDetail::kAll) {
    out << app.WholeHelp();
    return std::nullopt;
  }
  std::vector<std::string> reversed(args.rbegin(), args.rend());  // as CLI11 wants it
  try {
    app.cli().parse(reversed);
    if (!app.IsHelp()) {
      // The server reads the same AWQD_ADDRESS, which may name several.
      flags.address.resize(std::min(flags.address.find(','), flags.address.size()));
      return flags;
    }
    const std::string help = app.HelpOfTopic();
    out << help;
    if (help.empty()) err << "awqctl: " << OneLine(app.TopicError()) << "\n";
    exit_code = help.empty() ? kBadArguments : kOk;
  } catch (const CLI::CallForHelp&) {
    out << app.cli().help();
  } catch (const CLI::CallForVersion& version) {
    out << version.what() << "\n";
  } catch (const CLI::ParseError& error) {
    err << ParseFailure(app.cli(), args, error);
    exit_code = kBadArguments;
  }
  return std::nullopt;
}

}  // namespace awqd::awqctl
