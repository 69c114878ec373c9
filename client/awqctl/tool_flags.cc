// Flags of inspect, diff, quantize and convert.
#include "client/awqctl/commands.h"
#include "client/awqctl/flag_values.h"

namespace awqd::awqctl {
namespace {

CLI::App* AddTool(CLI::App* app, Flags& flags, LocalCommand* command, const char* name,
                  const char* about) {
  CLI::App* sub = app->add_subcommand(name, about);
  sub->callback([&flags, command] { flags.local_command = command; });
  sub->add_flag("-q,--quiet", flags.quiet,
                "Show no progress bar (without a terminal there is none)");
  return sub;
}

void AddInspect(CLI::App* app, Flags& flags) {
  CLI::App* sub =
      AddTool(app, flags, Inspect, "inspect",
              "Say what is in a model's folder: the format, every quantised linear, what "
              "is not quantised and why, what would not load and why. Needs no server; "
              "exit 1 when not all of it loads.\n\n"
              "Example: awqctl inspect models/my-model");
  sub->add_option("folder", flags.tool.folder, "The model's directory")->required();
}

void AddDiff(CLI::App* app, Flags& flags) {
  CLI::App* sub =
      AddTool(app, flags, Diff, "diff",
              "Compare the weights of two model folders, quantised or dense, linear by "
              "linear: the relative error |A - B| / |B| (Frobenius norm), the largest one, "
              "the worst elements, codes, zeros and scales that differ. Needs no server; "
              "exit 1 when anything differs.\n\n"
              "Example: awqctl diff models/my-model-awq models/my-model");
  sub->add_option("a", flags.tool.folder, "A, a model's directory")->required();
  sub->add_option("b", flags.tool.other, "B, what it is compared with")->required();
  sub->add_option("--worst", flags.tool.worst, "Elements to show of each linear")
      ->check(CLI::Range(int64_t{0}, int64_t{1000}))
      ->capture_default_str();
}

void AddQuantize(CLI::App* app, Flags& flags) {
  CLI::App* sub = AddTool(
      app, flags, Quantize, "quantize",
      "Quantise a dense model (safetensors of FP16, BF16 or FP32) by rounding to nearest, and "
      "say what each linear loses. Embeddings, heads and routers stay as they are. Needs no "
      "server. OUT appears when it is complete.\n\n"
      "Example: awqctl quantize models/my-model -o models/my-model-w4 --search");
  sub->add_option("folder", flags.tool.folder, "The dense model's directory")->required();
  sub->add_option("-o,--output", flags.tool.output, "The directory to make")->required();
  sub->add_option("--bits", flags.tool.bits, "Bits of a code")
      ->check(CLI::Range(2, 8))
      ->capture_default_str();
  sub->add_option("--group_size", flags.tool.group_size,
                  "Rows of K that share a scale; -1: all of K")
      ->check(CLI::Range(int64_t{-1}, int64_t{1} << 31))
      ->capture_default_str();
  sub->add_flag("--symmetric", flags.tool.symmetric,
                "No zero points: one in the middle for all (default with --to ft)");
  sub->add_flag("--search", flags.tool.search,
                "For each group, search for the range that gives the least squared error");
  flags.tool.to = "gptq";
  AddWord<std::string>(sub, "--to", flags.tool.to,
                       {{"awq", "awq"},
                        {"gptq", "gptq"},
                        {"compressed-tensors", "compressed-tensors"},
                        {"gemlite", "gemlite"},
                        {"ft", "ft"}},
                       "Format to write: awq, gptq (default), compressed-tensors, gemlite or ft");
  sub->add_option("--leave_out", flags.tool.leave_out,
                  "Leave linears dense whose path contains this; may be repeated");
}

void AddConvert(CLI::App* app, Flags& flags) {
  CLI::App* sub = AddTool(
      app, flags, Convert, "convert",
      "Write a quantised model, or a GGUF file, in another format, without changing a bit "
      "of any element. Refuses a linear that the format cannot hold. Needs no server. OUT appears "
      "when it is complete.\n\n"
      "Example: awqctl convert models/my-model -o models/my-model-awq --to awq --verify");
  sub->add_option("folder", flags.tool.folder, "The quantised model's directory, or a .gguf file")
      ->required();
  sub->add_option("-o,--output", flags.tool.output, "The directory to make")->required();
  AddWord<std::string>(sub, "--to", flags.tool.to,
                       {{"awq", "awq"},
                        {"gptq", "gptq"},
                        {"compressed-tensors", "compressed-tensors"},
                        {"gemlite", "gemlite"},
                        {"ft", "ft"},
                        {"dense", "dense"}},
                       "Format to write: awq, gptq, compressed-tensors, gemlite, ft or dense")
      ->required();
  AddWord<std::string>(sub, "--dtype", flags.tool.dtype,
                       {{"fp16", "F16"}, {"bf16", "BF16"}, {"fp32", "F32"}},
                       "Type of dense weights: fp16, bf16 or fp32, which keeps every bit (default: "
                       "what config.json says, else fp16)");
  sub->add_flag("--verify", flags.tool.verify,
                "Read OUT back, compare every element, tensor and file, and write what was "
                "compared to OUT/verified.json");
}

}  // namespace

void AddToolCommands(CLI::App* app, Flags& flags) {
  AddInspect(app, flags);
  AddDiff(app, flags);
  AddQuantize(app, flags);
  AddConvert(app, flags);
}

}  // namespace awqd::awqctl
