// JSON, tables, the progress line, the whole screen, and a signal handler that notes its signal and
// restores the old handler.
#include "client/awqctl/console.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/command_line/wrap.h"
#include "kernels/base/text.h"

namespace awqd::awqctl {
namespace {

constexpr size_t kLeastPath = 36;  // columns that a table leaves of its first cells

constexpr int kSignals[] = {SIGHUP, SIGINT, SIGTERM};

std::atomic<int> noted{0};
static_assert(std::atomic<int>::is_always_lock_free);
// The handlers from before ours; written while none of ours is set.
struct sigaction before[std::size(kSignals)];

constexpr absl::string_view kEnterScreen = "\x1b[?1049h\x1b[?25l";
constexpr absl::string_view kLeaveScreen = "\x1b[?1049l\x1b[?25h";
// The keyboard from before a FullScreen; written while `keyboard_changed` is false.
termios keyboard_before;
std::atomic<bool> keyboard_changed{false};
std::atomic<bool> screen_entered{false};
static_assert(std::atomic<bool>::is_always_lock_free);

// A signal handler may call this too.
void RestoreKeyboard() {
  if (keyboard_changed.exchange(false)) tcsetattr(STDIN_FILENO, TCSANOW, &keyboard_before);
}

void PutBack() {
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &before[i], nullptr);
}

void Note(int signal_number) {
  noted = signal_number;
  RestoreKeyboard();
  if (screen_entered.exchange(false)) {
    // After a failure there is nothing else to do.
    [[maybe_unused]] const auto count =
        write(STDOUT_FILENO, kLeaveScreen.data(), kLeaveScreen.size());
  }
  PutBack();
}

// The columns that UTF-8 takes in a terminal, but for characters of two columns.
size_t Width(absl::string_view text) {
  return absl::c_count_if(text, [](char c) { return (c & 0xc0) != 0x80; });
}

std::string Padded(absl::string_view text, size_t width) {
  return absl::StrCat(text, std::string(width - std::min(width, Width(text)), ' '));
}

// Without spaces at its end, in its colour.
void AppendLine(std::string line, absl::string_view colour, std::string* text) {
  line.erase(line.find_last_not_of(' ') + 1);
  absl::StrAppend(text, colour, line, colour.empty() ? "" : kNoColour, "\n");
}

// The first component of a path that is a number: its place among the components, and itself.
bool FindNumber(const std::vector<std::string>& components, size_t* place, int64_t* number) {
  for (*place = 0; *place < components.size(); ++*place) {
    const std::string& component = components[*place];
    if (absl::SimpleAtoi(component, number) && absl::StrCat(*number) == component) return true;
  }
  return false;
}

}  // namespace

std::string ListRuns(std::vector<int64_t> numbers) {
  absl::c_sort(numbers);
  std::string out;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    absl::StrAppend(&out, out.empty() ? "" : ",", numbers[i]);
    if (last > i) absl::StrAppend(&out, "-", numbers[last]);
    i = last + 1;
  }
  return out;
}

ScreenSize SizeOfScreen(const Console& console) {
  ScreenSize size;
  winsize told = {};
  if (!console.out_terminal || ioctl(STDOUT_FILENO, TIOCGWINSZ, &told) != 0) return size;
  constexpr size_t kLeastColumns = 20;
  if (told.ws_col > 0) size.columns = std::max<size_t>(kLeastColumns, told.ws_col);
  if (told.ws_row > 0) size.rows = told.ws_row;
  return size;
}

bool ShowsColours(const Console& console) {
  const char* const no_color = std::getenv("NO_COLOR");
  return console.out_terminal && (no_color == nullptr || *no_color == '\0');
}

std::string Wrapped(absl::string_view text, const Console& console) {
  return command_line::Wrapped(text, SizeOfScreen(console).columns, 2);
}

std::string Shortened(absl::string_view text, size_t columns) {
  constexpr absl::string_view kCut = "...";
  if (Width(text) <= columns) return std::string(text);
  if (columns <= kCut.size()) return std::string(kCut.substr(0, columns));
  const size_t head = (columns - kCut.size()) / 2;
  // Where each character begins.
  std::vector<size_t> starts;
  for (size_t i = 0; i < text.size(); ++i) {
    if ((text[i] & 0xc0) != 0x80) starts.push_back(i);
  }
  const size_t tail = starts[starts.size() - (columns - kCut.size() - head)];
  return absl::StrCat(text.substr(0, starts[head]), kCut, text.substr(tail));
}

void PrintJson(const nlohmann::ordered_json& json, Console& console) {
  console.out << json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

Table::Table(std::vector<std::string> header) { AddRow(std::move(header)); }

void Table::AddRow(std::vector<std::string> row, absl::string_view colour) {
  for (std::string& cell : row) cell = OneLine(cell);
  if (!rows_.empty()) row.resize(rows_[0].cells.size());
  rows_.push_back({std::move(row), colour});
}

void Table::Fold() {
  struct Alike {
    std::vector<std::string> components;  // of the first cell
    size_t place = 0;                     // of the number among them
    std::vector<int64_t> numbers;
    size_t row = 0;  // the first of the rows
  };
  std::map<std::vector<std::string>, Alike> alike;  // by the cells without the number
  std::vector<Row> folded = {rows_[0]};
  for (size_t i = 1; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    Alike one = {.components = absl::StrSplit(row.cells[0], '.')};
    int64_t number = 0;
    if (!FindNumber(one.components, &one.place, &number)) {
      folded.push_back(row);
      continue;
    }
    std::vector<std::string> key = row.cells;
    one.components[one.place] = "";
    key[0] = absl::StrCat(one.place, " ", absl::StrJoin(one.components, "."));
    one.row = folded.size();
    const auto [at, is_new] = alike.emplace(std::move(key), std::move(one));
    at->second.numbers.push_back(number);
    if (is_new) folded.push_back(row);
  }
  for (auto& [key, rows] : alike) {
    const std::string runs = ListRuns(rows.numbers);
    rows.components[rows.place] = rows.numbers.size() == 1 ? runs : absl::StrCat("[", runs, "]");
    folded[rows.row].cells[0] = absl::StrJoin(rows.components, ".");
  }
  rows_ = std::move(folded);
}

std::vector<size_t> Table::Widths() const {
  std::vector<size_t> widths(rows_[0].cells.size(), 0);
  for (const Row& row : rows_) {
    for (size_t i = 0; i < widths.size(); ++i) {
      widths[i] = std::max(widths[i], Width(row.cells[i]));
    }
  }
  return widths;
}

std::string Table::SideBySide(const std::vector<size_t>& widths, size_t gap, bool colours) const {
  std::string text;
  for (const Row& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.cells.size(); ++i) {
      absl::StrAppend(&line, Padded(Shortened(row.cells[i], widths[i]), widths[i] + gap));
    }
    AppendLine(std::move(line), colours ? row.colour : "", &text);
  }
  return text;
}

std::string Table::Stacked(const std::vector<size_t>& widths, size_t columns, bool terminal,
                           bool colours) const {
  constexpr size_t kIndent = 2, kGap = 2;
  const size_t room = columns - kIndent;
  // The columns of each line below the first cell. One that needs a line of its own is wrapped.
  std::vector<std::vector<size_t>> lines;
  size_t used = 0;
  for (size_t i = 1; i < widths.size(); ++i) {
    if (lines.empty() || used + widths[i] > room) {
      lines.emplace_back();
      used = 0;
    }
    lines.back().push_back(i);
    used += widths[i] + kGap;
  }
  std::string text;
  for (const Row& row : rows_) {
    const absl::string_view colour = colours ? row.colour : "";
    AppendLine(terminal ? Shortened(row.cells[0], columns) : row.cells[0], colour, &text);
    for (const std::vector<size_t>& line : lines) {
      std::string cells(kIndent, ' ');
      for (const size_t i : line) absl::StrAppend(&cells, Padded(row.cells[i], widths[i] + kGap));
      cells.erase(cells.find_last_not_of(' ') + 1);
      if (cells.empty()) continue;
      AppendLine(command_line::Wrapped(cells, columns, kIndent), colour, &text);
    }
  }
  return text;
}

bool Table::Fits(size_t columns) const {
  const std::vector<size_t> widths = Widths();
  return std::accumulate(widths.begin(), widths.end(), widths.size() - 1) <= columns;
}

std::string Table::Text(size_t columns, bool terminal, bool colours) const {
  std::vector<size_t> widths = Widths();
  const size_t cells = std::accumulate(widths.begin(), widths.end(), size_t{0});
  for (const size_t gap : {2, 1}) {
    if (cells + gap * (widths.size() - 1) <= columns) return SideBySide(widths, gap, colours);
  }
  const size_t others = cells - widths[0] + widths.size() - 1;
  if (!terminal || kLeastPath + others > columns)
    return Stacked(widths, columns, terminal, colours);
  widths[0] = columns - others;
  return SideBySide(widths, 1, colours);
}

std::string Table::Markdown() const {
  std::string text;
  for (size_t i = 0; i < rows_.size(); ++i) {
    text += "|";
    for (const std::string& cell : rows_[i].cells) {
      absl::StrAppend(&text, " ", absl::StrReplaceAll(cell, {{"|", "\\|"}}), " |");
    }
    text += "\n";
    if (i > 0) continue;
    text += "|";
    for (size_t column = 0; column < rows_[0].cells.size(); ++column) text += "---|";
    text += "\n";
  }
  return text;
}

Progress::Progress(Console& console, bool wanted)
    : console_(console), shown_(wanted && console.terminal), start_(absl::Now()) {}

void Progress::Clear() {
  if (std::exchange(shown_, false)) console_.err << kClearLine << std::flush;
}

void Progress::operator()(int64_t done_bytes, int64_t total_bytes) {
  constexpr int kWidth = 30;
  const absl::Time now = absl::Now();
  if (!shown_ || total_bytes <= 0 || now < next_) return;
  next_ = now + absl::Milliseconds(100);
  const double fraction = static_cast<double>(done_bytes) / static_cast<double>(total_bytes);
  const int filled = static_cast<int>(fraction * kWidth);
  const double seconds = absl::ToDoubleSeconds(now - start_);
  const double rate = seconds > 0 ? static_cast<double>(done_bytes) / seconds : 0;
  console_.err << kClearLine
               << absl::StrFormat("[%s%s] %3.0f %%  %s of %s  %s/s", std::string(filled, '='),
                                  std::string(kWidth - filled, ' '), fraction * 100,
                                  FormatBytes(done_bytes), FormatBytes(total_bytes),
                                  FormatBytes(static_cast<int64_t>(rate)))
               << std::flush;
}

Interrupt::Interrupt() {
  noted = 0;
  struct sigaction action = {};
  action.sa_handler = Note;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], nullptr, &before[i]);
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    if (before[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

Interrupt::~Interrupt() { PutBack(); }

int Interrupt::signal_number() const { return noted; }

FullScreen::FullScreen(Console& console, bool wanted)
    : console_(console), full_(console.out_terminal && wanted) {
  if (!full_) return;
  termios keys;
  keyboard_ = tcgetattr(STDIN_FILENO, &keys) == 0;
  if (keyboard_) {
    keyboard_before = keys;
    keyboard_changed = true;
    keys.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
    // A process that stopped here would leave the terminal as it is.
    keys.c_cc[VSUSP] = keys.c_cc[VQUIT] = _POSIX_VDISABLE;
    keys.c_cc[VMIN] = 1;
    keys.c_cc[VTIME] = 0;
    tcsetattr(STDIN_FILENO, TCSANOW, &keys);
  }
  console.out << kEnterScreen << std::flush;
  screen_entered = true;
}

FullScreen::~FullScreen() {
  RestoreKeyboard();
  if (screen_entered.exchange(false)) console_.out << kLeaveScreen << std::flush;
}

void FullScreen::Draw(absl::string_view text) {
  if (!full_) {
    console_.out << text << std::flush;
    return;
  }
  std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  lines.resize(std::min(lines.size(), SizeOfScreen(console_).rows));
  // Each line replaces the one that was there, so that nothing flickers.
  console_.out << "\x1b[H" << absl::StrJoin(lines, "\x1b[K\n") << "\x1b[K\x1b[J" << std::flush;
}

bool FullScreen::WaitForKey(char key, absl::Duration time) {
  const absl::Time until = absl::Now() + time;
  for (absl::Duration left = time; left > absl::ZeroDuration(); left = until - absl::Now()) {
    pollfd keyboard = {STDIN_FILENO, POLLIN, 0};
    const auto ms =
        static_cast<int>(absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1))));
    const int ready = poll(&keyboard, keyboard_ ? 1 : 0, ms);
    if (ready < 0) return false;
    char got = 0;
    if (ready == 0) continue;
    if (read(STDIN_FILENO, &got, 1) != 1) {
      keyboard_ = false;  // the terminal is gone; the signal that says so may come later
    } else if (got == key) {
      return true;
    }
  }
  return false;
}

}  // namespace awqd::awqctl
