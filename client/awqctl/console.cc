// JSON and tables for awqctl.
#include "client/awqctl/console.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "kernels/base/text.h"

namespace awqd::awqctl {
namespace {

constexpr size_t kColumns = 100;  // of a table's lines

}  // namespace

void PrintJson(const nlohmann::ordered_json& json, Console& console) {
  console.out << json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

Table::Table(std::vector<std::string> header) { AddRow(std::move(header)); }

void Table::AddRow(std::vector<std::string> row) {
  for (std::string& cell : row) cell = OneLine(cell);
  if (!rows_.empty()) row.resize(rows_[0].size());
  rows_.push_back(std::move(row));
}

std::vector<std::string> Table::Lines(size_t first, size_t gap, absl::string_view start) const {
  std::vector<size_t> widths(rows_[0].size(), 0);
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::vector<std::string> lines;
  for (const auto& row : rows_) {
    std::string line(start);
    for (size_t i = first; i < row.size(); ++i) {
      absl::StrAppend(&line, row[i], std::string(widths[i] - row[i].size() + gap, ' '));
    }
    line.erase(line.find_last_not_of(' ') + 1);
    lines.push_back(std::move(line));
  }
  return lines;
}

std::string Table::Text() const {
  const auto fits = [](const std::vector<std::string>& lines) {
    return absl::c_all_of(lines, [](const std::string& line) { return line.size() <= kColumns; });
  };
  for (const size_t gap : {2, 1}) {
    const std::vector<std::string> lines = Lines(0, gap, "");
    if (fits(lines)) return absl::StrJoin(lines, "\n") + "\n";
  }
  const std::vector<std::string> lines = Lines(1, 2, "  ");
  std::string text;
  for (size_t i = 0; i < rows_.size(); ++i) {
    absl::StrAppend(&text, rows_[i][0], "\n", lines[i], "\n");
  }
  return text;
}

std::string Table::Markdown() const {
  std::string text;
  for (size_t i = 0; i < rows_.size(); ++i) {
    text += "|";
    for (const std::string& cell : rows_[i]) {
      absl::StrAppend(&text, " ", absl::StrReplaceAll(cell, {{"|", "\\|"}}), " |");
    }
    text += "\n";
    if (i > 0) continue;
    text += "|";
    for (size_t column = 0; column < rows_[0].size(); ++column) text += "---|";
    text += "\n";
  }
  return text;
}

}  // namespace awqd::awqctl
