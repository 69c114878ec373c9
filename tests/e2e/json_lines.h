// The log of a server with --log_format=json.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"

namespace awqd {

// The lines that are objects.
inline std::vector<nlohmann::json> JsonLines(const std::string& log) {
  std::vector<nlohmann::json> out;
  for (const absl::string_view line : absl::StrSplit(log, '\n')) {
    nlohmann::json event = nlohmann::json::parse(line, nullptr, false);
    if (event.is_object()) out.push_back(std::move(event));
  }
  return out;
}

// Whether a line has this message.
inline std::function<bool(const nlohmann::json&)> IsMessage(const std::string& message) {
  return [message](const nlohmann::json& event) { return event.value("message", "") == message; };
}

}  // namespace awqd
