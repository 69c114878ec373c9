// Help in two columns, wrapped; near misses by their edit distance.
#include "client/command_line/help.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace awqd::command_line {
namespace {

constexpr size_t kTextColumn = 30;
// CLI11 moves the flags of an option group two columns to the right.
constexpr size_t kColumns = kHelpColumns - 2;

// Shorter parts of words are in too many of them, and more suggestions are no help.
constexpr size_t kLeastPart = 3;
constexpr size_t kMostSuggestions = 4;

std::string Sentence(absl::string_view text) {
  text = text.substr(0, text.find('\n'));
  const size_t end = text.find(". ");
  return std::string(end == text.npos ? text : text.substr(0, end + 1));
}

// `name` and `text` side by side, `text` below where `name` is long.
std::string Entry(const std::string& name, const std::string& text) {
  const std::string margin(kTextColumn, ' ');
  std::string out = absl::StrCat("  ", name);
  if (text.empty()) return out + "\n";
  if (out.size() + 2 > kTextColumn) {
    out = absl::StrCat(Wrapped(out, kColumns, 4), "\n", margin);
  } else {
    out.resize(kTextColumn, ' ');
  }
  const std::vector<std::string> lines =
      absl::StrSplit(Wrapped(text, kColumns - kTextColumn, 0), '\n');
  return absl::StrCat(out, absl::StrJoin(lines, absl::StrCat("\n", margin)), "\n");
}

// CLI11 puts bounds behind the name of the type: "INT:INT in [1 - 9]".
std::pair<std::string, std::string> TypeAndBounds(const CLI::Option& option) {
  const std::string both = option.get_type_name();
  size_t colon = 0;
  for (int open = 0; colon < both.size(); ++colon) {
    if (both[colon] == '[') ++open;
    if (both[colon] == ']') --open;
    if (both[colon] == ':' && open == 0) break;  // not that of "M[:SHARE]"
  }
  return {both.substr(0, colon), colon < both.size() ? both.substr(colon + 1) : ""};
}

// Adds the names of `others`, by name: CLI11 keeps them in the order of their addresses, which
// differs from run to run.
void AddNames(const std::set<CLI::Option*>& others, absl::string_view relation,
              std::vector<std::string>* facts) {
  std::set<std::string> names;
  for (const CLI::Option* other : others) names.insert(other->get_name());
  for (const std::string& name : names) facts->push_back(absl::StrCat(relation, " ", name));
}

// The default as people type it: CLI11 has lists in brackets.
std::string Preset(const CLI::Option& option) {
  const std::string preset = option.get_default_str();
  return std::string(absl::StripSuffix(absl::StripPrefix(preset, "["), "]"));
}

// The default, the bounds, and the flags that go with or against this one.
std::string Facts(const CLI::Option& option, const std::string& bounds) {
  std::vector<std::string> facts;
  const std::string preset = Preset(option);
  if (!preset.empty()) facts.push_back(absl::StrCat("default ", preset));
  if (!bounds.empty()) facts.push_back(bounds);
  if (option.get_required()) facts.push_back("required");
  AddNames(option.get_needs(), "with", &facts);
  AddNames(option.get_excludes(), "not with", &facts);
  return facts.empty() ? "" : absl::StrCat(" (", absl::StrJoin(facts, "; "), ")");
}

// The default, with its meaning where the text has a short one behind its first sentence: "0: as
// many as there are cores." Empty for switches that are off.
std::string Default(const CLI::Option& option, absl::string_view sentence) {
  constexpr size_t kMaxMeaning = 60;
  const std::string preset = Preset(option);
  if (preset.empty() || preset == "false") return "";
  absl::string_view meaning = option.get_description();
  const size_t begin = meaning.find(absl::StrCat(" ", preset, ": "), sentence.size() - 1);
  meaning.remove_prefix(std::min(begin, meaning.size()));
  meaning = meaning.substr(0, meaning.find_first_of(".;\n"));
  const bool known = !meaning.empty() && meaning.size() <= kMaxMeaning;
  return absl::StrCat(" (default", known ? std::string(meaning) : " " + preset, ")");
}

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

std::optional<HelpDetail> HelpAsked(const std::vector<std::string>& args) {
  std::optional<HelpDetail> out;
  for (const std::string& arg : args) {
    if (arg == "--") break;
    if (arg == "--help=all") return HelpDetail::kAll;
    if (arg == "--help" || arg == "-h") out = HelpDetail::kShort;
  }
  return out;
}

std::string Wrapped(absl::string_view text, size_t columns, size_t hang) {
  std::vector<std::string> out;
  for (const absl::string_view whole : absl::StrSplit(text, '\n')) {
    absl::string_view line = whole;
    const size_t margin = std::min(line.find_first_not_of(' '), line.size());
    std::string start(margin, ' ');
    line.remove_prefix(margin);
    while (start.size() + line.size() > columns) {
      const size_t room = columns - std::min(columns, start.size());
      size_t end = line.rfind(' ', room);
      if (end == line.npos || end == 0) end = line.find(' ');
      if (end == line.npos) break;
      out.push_back(absl::StrCat(start, line.substr(0, end)));
      line.remove_prefix(end + 1);
      start.assign(margin + hang, ' ');
    }
    out.push_back(absl::StrCat(start, line));
  }
  return absl::StrJoin(out, "\n");
}

HelpFormatter::HelpFormatter(HelpDetail detail) : detail_(detail) { column_width(kTextColumn); }

std::string HelpFormatter::make_option(const CLI::Option* option, bool is_positional) const {
  const auto [type, bounds] = TypeAndBounds(*option);
  // CLI11 puts behind a name what it stands for: "--no_x{false}".
  std::string name =
      absl::StrReplaceAll(make_option_name(option, is_positional), {{"{false}", ""}});
  if (!is_positional && !type.empty()) absl::StrAppend(&name, " ", type);
  const std::string& text = option->get_description();
  if (detail_ == HelpDetail::kShort) {
    const std::string sentence = Sentence(text);
    return Entry(name, absl::StrCat(sentence, Default(*option, sentence)));
  }
  return Entry(name, absl::StrCat(text, Facts(*option, bounds)));
}

std::string HelpFormatter::make_subcommand(const CLI::App* command) const {
  return Entry(command->get_display_name(), Sentence(command->get_description()));
}

std::string HelpFormatter::make_description(const CLI::App* app) const {
  std::string text = app->get_description();
  if (app->get_require_option_min() == 1) {
    absl::StrAppend(&text, text.empty() ? "" : "\n",
                    app->get_require_option_max() == 1 ? "Exactly" : "At least", " one of these:");
  }
  return text.empty() ? "" : absl::StrCat(Wrapped(text, kHelpColumns, 2), "\n\n");
}

std::string HelpFormatter::make_footer(const CLI::App* app) const {
  const std::string text = app->get_footer();
  return text.empty() ? "" : absl::StrCat(Wrapped(text, kHelpColumns, 2), "\n");
}

std::string OneOf(const std::vector<std::string>& words) {
  if (words.size() < 2) return absl::StrJoin(words, "");
  return absl::StrCat(absl::StrJoin(words.begin(), words.end() - 1, ", "), " or ", words.back());
}

std::string Nearest(const std::string& word, const std::vector<std::string>& words) {
  std::string nearest;
  size_t least = 3;  // beyond two mistakes it is a guess
  std::vector<std::string> beginning, containing;
  const std::string meant = absl::AsciiStrToLower(word);
  const absl::string_view core = absl::StripPrefix(meant, "--");
  for (const std::string& candidate : words) {
    const std::string lower = absl::AsciiStrToLower(candidate);
    if (absl::StartsWith(lower, meant)) beginning.push_back(candidate);
    const bool negation = absl::StartsWith(lower, "--no_");
    if (absl::StrContains(lower, core) && !negation) containing.push_back(candidate);
    const size_t distance = EditDistance(meant, lower);
    if (distance >= least || 2 * distance >= candidate.size()) continue;
    least = distance;
    nearest = candidate;
  }
  if (!nearest.empty() || core.size() < kLeastPart) return nearest;
  for (const std::vector<std::string>& some : {beginning, containing}) {
    if (!some.empty() && some.size() <= kMostSuggestions) return OneOf(some);
  }
  return "";
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
