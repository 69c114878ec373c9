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

}  // namespace

void AddToolCommands(CLI::App* app, Flags& flags) { AddInspect(app, flags); }

}  // namespace awqd::awqctl
