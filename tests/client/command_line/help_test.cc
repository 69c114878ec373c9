// Help texts: their width and their short form; suggestions for misspelled flags.
#include "client/command_line/help.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace awqd::command_line {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Wrapped, BreaksAtSpaces) {
  EXPECT_EQ(Wrapped("one two three", 8, 0), "one two\nthree");
  EXPECT_EQ(Wrapped("one two", 7, 0), "one two");
  EXPECT_EQ(Wrapped("  one two three", 9, 2), "  one two\n    three");
  EXPECT_EQ(Wrapped("a\n\nb", 8, 0), "a\n\nb");
  EXPECT_EQ(Wrapped("", 8, 0), "");
  EXPECT_EQ(Wrapped("unbreakable word", 4, 0), "unbreakable\nword");
}

TEST(HelpAsked, ShortOrAll) {
  EXPECT_EQ(HelpAsked({"--x", "--help"}), HelpDetail::kShort);
  EXPECT_EQ(HelpAsked({"-h"}), HelpDetail::kShort);
  EXPECT_EQ(HelpAsked({"--help", "--help=all"}), HelpDetail::kAll);
  EXPECT_EQ(HelpAsked({"--", "--help"}), std::nullopt);
  EXPECT_EQ(HelpAsked({"--helpless"}), std::nullopt);
}

std::string HelpOf(HelpDetail detail) {
  CLI::App app("An app " + std::string(30, 'x') +
                   " with a description that does not fit one line "
                   "of a terminal of eighty columns.",
               "app");
  app.formatter(std::make_shared<HelpFormatter>(detail));
  int number = 7;
  app.add_option("--number", number,
                 "How many there are, in a text that is longer than what fits beside the flag's "
                 "name. More of them take more memory.")
      ->capture_default_str()
      ->check(CLI::Range(1, 9))
      ->group("Numbers");
  std::string name, mix;
  bool kept = true;
  app.add_flag("--keep,!--no_keep", kept, "Keeps it.")->default_str("true")->group("Numbers");
  app.add_option("--mix", mix, "Some of each.")->type_name("M[:SHARE],...")->group("Numbers");
  CLI::Option_group* const what = app.add_option_group("What");
  what->add_option("--this", mix, "This one.");
  what->require_option(1, 0);
  app.add_option("--a_name_that_leaves_no_room_for_a_text_beside_it", name, "Its text.");
  app.add_subcommand("run", "Runs it. Needs legs.");
  app.footer("The end, " + std::string(50, 'y') +
             " which is also longer than a single line can be.");
  return app.help();
}

TEST(HelpFormatter, FitsEightyColumns) {
  for (const HelpDetail detail : {HelpDetail::kShort, HelpDetail::kAll}) {
    const std::string help = HelpOf(detail);
    for (const absl::string_view line : absl::StrSplit(help, '\n')) {
      EXPECT_LE(line.size(), kHelpColumns) << line;
    }
    EXPECT_THAT(help, AllOf(HasSubstr("Numbers:\n  --number INT"), HasSubstr("Runs it."),
                            HasSubstr("beside_it TEXT\n"), Not(HasSubstr("Needs legs"))));
  }
}

// `text` without line breaks and margins.
std::string Flowing(const std::string& text) {
  return absl::StrJoin(absl::StrSplit(text, absl::ByAnyChar(" \n"), absl::SkipEmpty()), " ");
}

TEST(HelpFormatter, TheShortFormHasFirstSentences) {
  EXPECT_THAT(Flowing(HelpOf(HelpDetail::kShort)), Not(HasSubstr("More of them")));
  EXPECT_THAT(Flowing(HelpOf(HelpDetail::kShort)), Not(HasSubstr("INT in [1")));
  EXPECT_THAT(Flowing(HelpOf(HelpDetail::kAll)), HasSubstr("More of them"));
  EXPECT_THAT(Flowing(HelpOf(HelpDetail::kAll)), HasSubstr("(default 7; INT in [1 - 9])"));
}

TEST(HelpFormatter, TheShortFormHasDefaultsAndWhatTheyMean) {
  const std::string short_form = Flowing(HelpOf(HelpDetail::kShort));
  EXPECT_THAT(short_form, HasSubstr("beside the flag's name. (default 7) "));
  EXPECT_THAT(short_form, HasSubstr("Keeps it. (default true) "));
  CLI::App app("An app", "app");
  app.formatter(std::make_shared<HelpFormatter>(HelpDetail::kShort));
  int threads = 0;
  bool off = false;
  std::vector<std::string> none;
  app.add_option("--threads", threads, "Its threads. 0: one a core. Fewer leave room; 1: none.")
      ->capture_default_str();
  app.add_flag("--off", off, "Off.")->default_str("false");
  app.add_option("--none", none, "None.")->capture_default_str();
  std::vector<std::string> some = {"a:1"};
  app.add_option("--some", some, "Some.")->capture_default_str();
  app.add_option("--limit", threads, "A limit; 0: none.")->capture_default_str();
  const std::string help = Flowing(app.help());
  EXPECT_THAT(help, HasSubstr("Its threads. (default 0: one a core)"));
  EXPECT_THAT(help, AllOf(HasSubstr("Off. "), Not(HasSubstr("false"))));
  EXPECT_THAT(help, Not(HasSubstr("None. (default")));
  EXPECT_THAT(help, HasSubstr("Some. (default a:1)"));
  EXPECT_THAT(help, HasSubstr("0: none. (default 0)")) << "said once";
}

// CLI11 orders them by their addresses, which these flags have in both orders.
TEST(HelpFormatter, NamesOtherFlagsByName) {
  CLI::App app("An app", "app");
  app.formatter(std::make_shared<HelpFormatter>(HelpDetail::kAll));
  std::string text;
  CLI::Option* const first = app.add_option("--first", text, "One.");
  std::vector<CLI::Option*> others;
  for (const char* const name : {"--d", "--b", "--c", "--a"}) {
    others.push_back(app.add_option(name, text, "Another."));
    first->excludes(others.back());
  }
  CLI::Option* const last = app.add_option("--last", text, "The last.");
  last->needs(others[1]);
  last->needs(others[0]);
  const std::string help = Flowing(app.help());
  EXPECT_THAT(help, HasSubstr("One. (not with --a; not with --b; not with --c; not with --d)"));
  EXPECT_THAT(help, HasSubstr("The last. (with --b; with --d)"));
}

TEST(HelpFormatter, SaysWhatFlagsTake) {
  const std::string help = Flowing(HelpOf(HelpDetail::kAll));
  EXPECT_THAT(help, HasSubstr("--keep,--no_keep Keeps it. (default true)"));
  EXPECT_THAT(help, HasSubstr("--mix M[:SHARE],... Some of each. "));
  EXPECT_THAT(help, HasSubstr("At least one of these:"));
}

TEST(UnknownFlag, NamesTheNearest) {
  CLI::App app;
  std::string value;
  app.add_option("--address", value);
  CLI::App* const bench = app.add_subcommand("bench");
  bench->add_option("--weight", value);
  bench->add_option_group("Criterion")->add_option("--bit_exact", value);
  const auto message = [](const CLI::App& of, const std::vector<std::string>& args) {
    const auto unknown = FindUnknownFlag(of, args);
    return unknown ? unknown->Message() : "";
  };
  EXPECT_EQ(message(*bench, {"bench", "--weigth=a"}), "--weigth: did you mean --weight?");
  EXPECT_EQ(message(*bench, {"--adress", "a"}), "--adress: did you mean --address?");
  EXPECT_EQ(message(*bench, {"--bit_exakt"}), "--bit_exakt: did you mean --bit_exact?");
  EXPECT_EQ(message(*bench, {"--bogus"}), "--bogus: no such flag");
  EXPECT_EQ(message(*bench, {"--weight", "-x", "--address=b", "--", "--bogus"}), "");
  EXPECT_EQ(message(app, {"--weight"}), "--weight: no such flag");
  // Parts of flags: those that begin so come before those that contain it.
  for (const char* name :
       {"--tls_ca", "--tls_cert", "--no_tls", "--x1", "--x2", "--x3", "--x4", "--x5"}) {
    app.add_option(name, value);
  }
  EXPECT_EQ(message(app, {"--addr=a"}), "--addr: did you mean --address?");
  EXPECT_EQ(message(app, {"--TLS"}), "--TLS: did you mean --tls_ca or --tls_cert?");
  EXPECT_EQ(message(app, {"--cert"}), "--cert: did you mean --tls_cert?");
  EXPECT_EQ(message(app, {"--s_"}), "--s_: no such flag");
}

TEST(OneOf, ReadsAsASentence) {
  EXPECT_EQ(OneOf({"a", "b", "c"}), "a, b or c");
  EXPECT_EQ(OneOf({"a"}), "a");
}

}  // namespace
}  // namespace awqd::command_line
