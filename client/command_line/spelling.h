// What a misspelled word was meant to be.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"

namespace awqd::command_line {

// "a, b or c"
std::string OneOf(const std::vector<std::string>& words);

// The one of `words` that `word` misspells, empty when none is near.
std::string Nearest(const std::string& word, const std::vector<std::string>& words);

// Every name of a flag that `app` takes, with its dashes; those of the application above it too.
std::vector<std::string> FlagNames(const CLI::App& app);

// A flag that is none of an application's, and the one that it was meant to be, if one is near.
struct UnknownFlag {
  std::string flag, meant;

  // "--weigth: did you mean --weight?", "--bogus: no such flag"
  std::string Message() const;
};

// The first of `args` that looks like a long flag and is none of FlagNames(app). What stands behind
// "--" is no flag.
std::optional<UnknownFlag> FindUnknownFlag(const CLI::App& app,
                                           const std::vector<std::string>& args);

}  // namespace awqd::command_line
