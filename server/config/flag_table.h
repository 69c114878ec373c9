// The server's flags, and FlagTable, which registers each with CLI11 under its group and its
// environment variable.
#pragma once

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/config/options.h"

namespace awqd {

// Registers every flag with its group, help and environment variable. Parsing writes values, which
// are then in range, to `options`, which must outlive `app`.
void AddFlags(CLI::App* app, Options* options);

// Parsers of what people type. Each rewrites `text` to a number that CLI11 reads, and returns the
// error, or "" if there is none, as CLI11's transformations do.

// "64MiB" -> "67108864". Units k, m, g, with or without b or ib, in either case.
std::string ParseBytes(std::string& text);

// "auto" and "default" -> ThresholdTable's numbers for them; a number of tokens stays as it is.
std::string ParseThreshold(std::string& text);

// "0660" -> "432": permissions in octal, up to 0777.
std::string ParseMode(std::string& text);

// "NAME=DIR" -> `out`, which is unspecified on an error; NAME must be a legal name of a model.
// Returns the error, or "".
std::string ParseNamedFolder(const std::string& text, repository::NamedFolder* out);

class FlagTable {
 public:
  explicit FlagTable(CLI::App* app) : app_(app) {}

  // The group of the flags that follow.
  void Group(std::string name) { group_ = std::move(name); }

  template <typename T>
  CLI::Option* Value(const std::string& name, T& value, const std::string& help) {
    return Register(name, app_->add_option("--" + name, value, help));
  }

  // A flag that may be repeated, or have several values separated by commas.
  void List(const std::string& name, std::vector<std::string>& value, const std::string& help) {
    Value(name, value, help)->delimiter(',')->expected(1)->take_all();
  }

  template <typename T>
  CLI::Option* Number(const std::string& name, T& value, std::type_identity_t<T> min,
                      std::type_identity_t<T> max, const std::string& help) {
    CLI::Option* const option = Value(name, value, help);
    if constexpr (std::is_floating_point_v<T>) return option->check(NumberFrom(min, max));
    return option->check(CLI::Range(min, max));
  }

  void Bytes(const std::string& name, int64_t& value, int64_t min, int64_t max,
             const std::string& help) {
    const bool whole = value != 0 && value % (1 << 20) == 0;
    // transform() puts its validator before the check of Number.
    Number(name, value, min, max, help)
        ->default_str(whole ? absl::StrCat(value >> 20, "MiB") : absl::StrCat(value))
        ->transform(CLI::Validator(ParseBytes, "", "bytes"))
        ->type_name("BYTES");
  }

  // A number of `unit`s, within `range`.
  void Duration(const std::string& name, absl::Duration& value, absl::Duration unit,
                std::pair<double, double> range, const std::string& help) {
    const auto set = [&value, unit](double number) { value = number * unit; };
    Register(name, app_->add_option_function<double>("--" + name, set, help))
        ->default_str(absl::StrCat(absl::FDivDuration(value, unit)))
        ->check(NumberFrom(range.first, range.second));
  }

  // A number of seconds; 0 means an infinite duration.
  void Limit(const std::string& name, absl::Duration& value, const std::string& help) {
    const auto set = [&value](double seconds) {
      value = seconds == 0 ? absl::InfiniteDuration() : absl::Seconds(seconds);
    };
    const double preset = value == absl::InfiniteDuration() ? 0 : absl::ToDoubleSeconds(value);
    Register(name, app_->add_option_function<double>("--" + name, set, help))
        ->default_str(absl::StrCat(preset))
        ->check(NumberFrom(0, 1e9));
  }

  // NAME=DIR; the flag may be repeated.
  void Folders(const std::string& name, std::vector<repository::NamedFolder>& value,
               const std::string& help) {
    const auto set = [&value](const std::vector<std::string>& texts) {
      value.clear();
      for (const std::string& text : texts) ParseNamedFolder(text, &value.emplace_back());
    };
    const auto check = [](const std::string& text) {
      repository::NamedFolder folder;
      return ParseNamedFolder(text, &folder);
    };
    Register(name, app_->add_option_function<std::vector<std::string>>("--" + name, set, help))
        ->delimiter(',')
        ->expected(1)
        ->take_all()
        ->check(CLI::Validator(check, "NAME=DIR"));
  }

  // One of several words.
  template <typename T>
  void Choice(const std::string& name, T& value,
              const std::vector<std::pair<std::string, T>>& choices, const std::string& help) {
    std::vector<std::string> words;
    std::string preset;
    for (const auto& [word, meaning] : choices) {
      words.push_back(word);
      if (meaning == value) preset = word;
    }
    const auto set = [&value, choices](const std::string& text) {
      for (const auto& [word, meaning] : choices) {
        if (word == text) value = meaning;
      }
    };
    Register(name, app_->add_option_function<std::string>("--" + name, set, help))
        ->default_str(preset)
        ->check(CLI::IsMember(words));
  }

  void Flag(const std::string& name, bool& value, const std::string& help) {
    Register(name, app_->add_flag("--" + name + ",!--no_" + name, value, help))
        ->default_str(value ? "true" : "false");
  }

 private:
  // Like CLI::Range, which accepts NaN, because NaN is neither below `min` nor above `max`.
  static CLI::Validator NumberFrom(double min, double max) {
    const auto check = [min, max](const std::string& text) -> std::string {
      double value = 0;
      if (absl::SimpleAtod(text, &value) && value >= min && value <= max) return "";
      return absl::StrCat("got \"", text, "\", expected a number from ", min, " to ", max);
    };
    return CLI::Validator(check, absl::StrCat("FLOAT in [", min, " - ", max, "]"));
  }

  CLI::Option* Register(const std::string& name, CLI::Option* option) {
    option->envname("AWQD_" + absl::AsciiStrToUpper(name));
    option->group(group_);
    return option;
  }

  CLI::App* const app_;
  std::string group_;
};

}  // namespace awqd
