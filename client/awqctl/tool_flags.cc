// Flags of inspect, diff, quantize and convert.
#include "client/awqctl/tool_flags.h"

#include "client/awqctl/commands.h"

namespace awqd::awqctl {
namespace {

CLI::App* Add(CLI::App* app, Flags& flags, LocalCommand* command, const char* name,
              const char* about) {
  CLI::App* sub = app->add_subcommand(name, about);
  sub->callback([&flags, command] { flags.local_command = command; });
  sub->add_flag("-q,--quiet", flags.quiet,
                "Show no progress bar (without a terminal there is none)");
  return sub;
}

void AddInspect(CLI::App* app, Flags& flags) {
  CLI::App* sub = Add(app, flags, Inspect, "inspect",
                      "Say what is in a model's folder: the format, every quantised linear, what "
                      "is not quantised and why, what would not load and why. Needs no server; "
                      "exit 1 when not all of it loads.\n\n"
                      "Example: awqctl inspect models/my-model");
  sub->add_option("folder", flags.tool.folder, "The model's directory")->required();
}

void AddDiff(CLI::App* app, Flags& flags) {
  CLI::App* sub = Add(app, flags, Diff, "diff",
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

}  // namespace

void AddToolCommands(CLI::App* app, Flags& flags) {
  AddInspect(app, flags);
  AddDiff(app, flags);
}

}  // namespace awqd::awqctl
