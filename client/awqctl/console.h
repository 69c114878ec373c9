// Where awqctl writes, and how its tables look.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace awqd::awqctl {

struct Console {
  std::ostream& out;
  std::ostream& err;
  bool terminal = false;  // whether `err` is one
};

// Empties the line of a terminal that the cursor is in.
inline constexpr char kClearLine[] = "\r\x1b[K";

// One document. Names of files need not be UTF-8, which JSON has to be.
void PrintJson(const nlohmann::ordered_json& json, Console& console);

// Rows of cells under a header, every row as long as the header.
class Table {
 public:
  explicit Table(std::vector<std::string> header);
  void AddRow(std::vector<std::string> row);
  // Columns aligned, two spaces between; one where lines would pass 100 columns; and where that is
  // not enough, the first cell of each row on a line of its own.
  std::string Text() const;
  std::string Markdown() const;

 private:
  // Rows from column `first` on, each line behind `start`.
  std::vector<std::string> Lines(size_t first, size_t gap, absl::string_view start) const;

  std::vector<std::vector<std::string>> rows_;  // the header first
};

}  // namespace awqd::awqctl
