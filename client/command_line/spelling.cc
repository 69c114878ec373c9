// Near misses.
#include "client/command_line/spelling.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace awqd::command_line {
namespace {

// Letters to add, drop or replace to get from one word to the other.
size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);  // from what of `a` was read to each start of `b`
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, diagonal + 1, row[j] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string OneOf(const std::vector<std::string>& words) {
  if (words.size() < 2) return absl::StrJoin(words, "");
  return absl::StrCat(absl::StrJoin(words.begin(), words.end() - 1, ", "), " or ", words.back());
}

std::string Nearest(const std::string& word, const std::vector<std::string>& words) {
  std::string nearest;
  size_t least = 3;  // beyond two mistakes it is a guess
  for (const std::string& candidate : words) {
    const size_t distance = EditDistance(absl::AsciiStrToLower(word), candidate);
    if (distance >= least || 2 * distance >= candidate.size()) continue;
    least = distance;
    nearest = candidate;
  }
  return nearest;
}

std::vector<std::string> FlagNames(const CLI::App& app) {
  std::vector<std::string> out;
  const auto add = [&out](const CLI::App& level) {
    for (const CLI::Option* option : level.get_options([](const CLI::Option*) { return true; })) {
      for (const std::string& name : option->get_lnames()) out.push_back("--" + name);
    }
  };
  for (const CLI::App* level = &app; level != nullptr; level = level->get_parent()) {
    add(*level);
    for (const CLI::App* group : level->get_subcommands([](const CLI::App*) { return true; })) {
      if (group->get_name().empty()) add(*group);  // an option group, no command
    }
  }
  return out;
}

std::string UnknownFlag::Message() const {
  return meant.empty() ? absl::StrCat(flag, ": no such flag")
                       : absl::StrCat(flag, ": did you mean ", meant, "?");
}

std::optional<UnknownFlag> FindUnknownFlag(const CLI::App& app,
                                           const std::vector<std::string>& args) {
  const std::vector<std::string> names = FlagNames(app);
  for (const std::string& arg : args) {
    if (arg == "--") break;
    const std::string name = arg.substr(0, arg.find('='));
    if (!absl::StartsWith(name, "--") || absl::c_linear_search(names, name)) continue;
    return UnknownFlag{name, Nearest(name, names)};
  }
  return std::nullopt;
}

}  // namespace awqd::command_line
