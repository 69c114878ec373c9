// Help texts in at most 100 columns, short or whole.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/string_view.h"

namespace awqd::command_line {

inline constexpr size_t kHelpColumns = 100;

// kShort: of each flag the first sentence. kAll: its whole text, default and bounds.
enum class HelpDetail { kShort, kAll };

// Of --help or -h kShort, of --help=all kAll; nothing where none of `args` asks for help.
std::optional<HelpDetail> HelpAsked(const std::vector<std::string>& args);

// Every line of `text` broken at spaces into lines of at most `columns`. What is broken off starts
// as far to the right as its line did, and `hang` more. A word that is longer stays whole.
std::string Wrapped(absl::string_view text, size_t columns, size_t hang);

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

}  // namespace awqd::command_line
