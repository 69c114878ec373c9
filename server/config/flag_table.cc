// Parses sizes, thresholds, folders and permissions as people type them.
#include "server/config/flag_table.h"

#include <cstdint>
#include <limits>
#include <map>

#include "server/engine/threshold_table.h"
#include "server/repository/model_folders.h"

namespace awqd {

std::string ParseBytes(std::string& text) {
  static const std::map<std::string, int64_t> units = {
      {"", 1}, {"k", 1 << 10}, {"m", 1 << 20}, {"g", 1 << 30}};
  const size_t end = text.find_first_not_of("0123456789");
  std::string unit = absl::AsciiStrToLower(end == std::string::npos ? "" : text.substr(end));
  if (unit == "b") unit = "";
  if (unit.size() > 1 && (unit.substr(1) == "ib" || unit.substr(1) == "b")) unit.resize(1);
  int64_t number = 0;
  const auto factor = units.find(unit);
  if (factor == units.end() || !absl::SimpleAtoi(text.substr(0, end), &number) ||
      number > std::numeric_limits<int64_t>::max() / factor->second) {
    return absl::StrCat("got \"", text, "\", expected bytes such as 1048576 or 64MiB");
  }
  text = absl::StrCat(number * factor->second);
  return "";
}

std::string ParseThreshold(std::string& text) {
  int64_t tokens = 0;
  if (text == "auto") {
    text = absl::StrCat(engine::ThresholdTable::kAuto);
    return "";
  }
  if (text == "default") {
    text = absl::StrCat(engine::ThresholdTable::kByKernel);
    return "";
  }
  if (absl::SimpleAtoi(text, &tokens) && tokens >= 0) return "";
  return absl::StrCat("got \"", text, "\", expected a number of tokens from 0 on, default or auto");
}

std::string ParseNamedFolder(const std::string& text, repository::NamedFolder* out) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals + 1 == text.size()) {
    return absl::StrCat("got \"", text, "\", expected NAME=DIR");
  }
  *out = {text.substr(0, equals), text.substr(equals + 1)};
  return std::string(repository::CheckModelName(out->name).message());
}

std::string ParseMode(std::string& text) {
  int mode = 0;
  const bool octal =
      !text.empty() && text.size() <= 5 && text.find_first_not_of("01234567") == std::string::npos;
  for (const char digit : text) mode = octal ? mode * 8 + (digit - '0') : 0;
  if (!octal || mode > 0777) {
    return absl::StrCat("got \"", text, "\", expected permissions such as 0660");
  }
  text = absl::StrCat(mode);
  return "";
}

}  // namespace awqd
