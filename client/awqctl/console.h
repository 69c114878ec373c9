// Where awqctl writes: JSON, tables, a line of progress, a whole screen; and the signal that ends it
// early.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace awqd::awqctl {

struct Console {
  std::ostream& out;
  std::ostream& err;
  bool terminal = false;      // whether `err` is one
  bool out_terminal = false;  // whether `out` is one
};

// In characters. Tables have the same width where there is no terminal.
struct ScreenSize {
  size_t columns = 80;
  size_t rows = 24;
};
// The size of the terminal that `out` is; else, or where a terminal does not tell, the default.
ScreenSize SizeOfScreen(const Console& console);

// Empties the line of a terminal that the cursor is in.
inline constexpr char kClearLine[] = "\r\x1b[K";

// One document. Names of files need not be UTF-8, which JSON has to be.
void PrintJson(const nlohmann::ordered_json& json, Console& console);

// `text` with its lines broken at spaces to the width of the screen; two more spaces before what
// follows.
std::string Wrapped(absl::string_view text, const Console& console);

// At most `columns` characters of `text`: "..." stands in place of its middle.
std::string Shortened(absl::string_view text, size_t columns);

// "0-3,5": numbers in ascending order, those that follow one another as one.
std::string ListRuns(std::vector<int64_t> numbers);

// Whether `out` shows colours: on a terminal, unless NO_COLOR is set (no-color.org).
bool ShowsColours(const Console& console);

// Colours of a row.
inline constexpr char kRed[] = "\x1b[31m", kYellow[] = "\x1b[33m", kNoColour[] = "\x1b[0m";

// Rows of cells under a header, every row as long as the header.
class Table {
 public:
  explicit Table(std::vector<std::string> header);
  void AddRow(std::vector<std::string> row, absl::string_view colour = "");
  // Makes one row of rows that differ only in the first number between dots of their first cells:
  // "layers.0.up" and "layers.1.up" become "layers.[0-1].up".
  void Fold();
  // Columns aligned, two spaces between; one where lines would pass `columns`. Where that is not
  // enough, the first cell of each row stands on a line of its own, and the others below it, in as
  // many lines as they need. On a terminal the first cells are shortened to fit. Elsewhere no cell
  // loses a letter. With `colours` rows have theirs.
  std::string Text(size_t columns, bool terminal, bool colours = false) const;
  std::string Text(const Console& console) const {
    return Text(SizeOfScreen(console).columns, console.out_terminal, ShowsColours(console));
  }
  std::string Markdown() const;
  // Whether all columns go side by side into so many characters.
  bool Fits(size_t columns) const;

 private:
  struct Row {
    std::vector<std::string> cells;
    absl::string_view colour;
  };
  std::vector<size_t> Widths() const;  // of the columns
  // All columns side by side, `gap` spaces between; cells are cut to `widths`.
  std::string SideBySide(const std::vector<size_t>& widths, size_t gap, bool colours) const;
  std::string Stacked(const std::vector<size_t>& widths, size_t columns, bool terminal,
                      bool colours) const;

  std::vector<Row> rows_;  // the header first
};

// One line on a terminal that shows how much of a command is done. Redrawn at most ten times a
// second.
class Progress {
 public:
  // Draws nothing unless the console is a terminal and `wanted`.
  Progress(Console& console, bool wanted);
  ~Progress() { Clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void operator()(int64_t done_bytes, int64_t total_bytes);
  // Empties the line. Nothing is drawn afterwards.
  void Clear();

 private:
  Console& console_;
  bool shown_;
  const absl::Time start_;
  absl::Time next_ = absl::InfinitePast();
};

// From construction to destruction the first SIGHUP, SIGINT or SIGTERM is noted; the next one does
// what it did before. One at a time in a process.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // The signal that came; 0: none.
  int signal_number() const;
};

// A terminal that a command fills: the alternate screen without a cursor, and keys that arrive at
// once and are not shown. The destructor, or a signal that an Interrupt notes, puts back what was
// before. One at a time in a process.
class FullScreen {
 public:
  // Does so where `out` is a terminal and `wanted`. Elsewhere texts follow each other.
  FullScreen(Console& console, bool wanted);
  ~FullScreen();
  FullScreen(const FullScreen&) = delete;
  FullScreen& operator=(const FullScreen&) = delete;

  // Shows `text` in place of what was there, as many lines of it as the terminal has.
  void Draw(absl::string_view text);
  // Waits for `key`; false where it did not come within `time`, or a signal came before.
  bool WaitForKey(char key, absl::Duration time);

 private:
  Console& console_;
  const bool full_;
  bool keyboard_ = false;  // whether keys are read
};

}  // namespace awqd::awqctl
