// Help: texts in at most 80 columns, short or whole, and suggestions for misspelled words.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "client/command_line/wrap.h"

namespace awqd::command_line {

inline constexpr size_t kHelpColumns = 80;

// kShort: of each flag the first sentence and the default. kAll: its whole text, default and bounds.
enum class HelpDetail { kShort, kAll };

// --help and -h ask for kShort, --help=all for kAll. Nothing where none of `args` asks for help.
std::optional<HelpDetail> HelpAsked(const std::vector<std::string>& args);

// Flags in one column, what they do in the other.
class HelpFormatter : public CLI::Formatter {
 public:
  explicit HelpFormatter(HelpDetail detail);

  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
  std::string make_description(const CLI::App* app) const override;
  std::string make_footer(const CLI::App* app) const override;

 private:
  const HelpDetail detail_;
};

// "a, b or c"
std::string OneOf(const std::vector<std::string>& words);

// The one of `words` that `word` misspells; else up to four that begin with it or contain it, as
// OneOf prints them; empty when none is near. Upper and lower case are the same.
std::string Nearest(const std::string& word, const std::vector<std::string>& words);

// Every name of a flag that `app` takes, with its dashes; those of the application above it too.
std::vector<std::string> FlagNames(const CLI::App& app);

// A flag that is none of an application's, and what it was meant to be: see Nearest.
struct UnknownFlag {
  std::string flag, meant;

  // "--weigth: did you mean --weight?", "--bogus: no such flag"
  std::string Message() const;
};

// The first of `args` that looks like a long flag and is none of FlagNames(app). Words behind "--"
// are no flags.
std::optional<UnknownFlag> FindUnknownFlag(const CLI::App& app,
                                           const std::vector<std::string>& args);

}  // namespace awqd::command_line
