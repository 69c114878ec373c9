// Suggestions for misspelled flags.
#include "client/command_line/spelling.h"

#include <gtest/gtest.h>

namespace awqd::command_line {
namespace {

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
}

TEST(OneOf, ReadsAsASentence) {
  EXPECT_EQ(OneOf({"a", "b", "c"}), "a, b or c");
  EXPECT_EQ(OneOf({"a"}), "a");
}

}  // namespace
}  // namespace awqd::command_line
