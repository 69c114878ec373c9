// One mutex, the sink's own, orders lines and the last line.
#include "server/obs/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <string>

#include "kernels/base/text.h"
#include "server/obs/line_writer.h"
#include "spdlog/sinks/base_sink.h"

namespace awqd::obs {
namespace {

constexpr char kEraseLine[] = "\r\x1b[K";
constexpr size_t kUsualColumns = 80;

size_t Columns() {
  winsize size = {};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : kUsualColumns;
}

class TerminalSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  void Show(absl::string_view text) {
    const std::string status = OneLine(text);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status.empty() && status_.empty()) return;
    status_ = status;
    Stderr().Offer(kEraseLine + Clipped());
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& msg) override {
    spdlog::memory_buf_t line;
    formatter_->format(msg, line);
    const std::string text(line.data(), line.size());
    Stderr().Write(status_.empty() ? text : kEraseLine + text + Clipped());
  }
  void flush_() override {}

 private:
  // The last column stays free: a cursor behind it is on the next line of some terminals.
  std::string Clipped() const { return status_.substr(0, Columns() - 1); }

  std::string status_;
};

std::shared_ptr<TerminalSink> g_sink;

}  // namespace

bool StderrIsTerminal() {
  const char* const term = std::getenv("TERM");
  return isatty(STDERR_FILENO) == 1 && term != nullptr && *term != '\0' &&
         absl::string_view(term) != "dumb";
}

std::shared_ptr<spdlog::sinks::sink> MakeTerminalSink() {
  g_sink = std::make_shared<TerminalSink>();
  return g_sink;
}

void ForgetTerminalSink() { g_sink = nullptr; }

bool ShowsStatusLine() { return g_sink != nullptr; }

void ShowStatusLine(absl::string_view text) {
  if (g_sink != nullptr) g_sink->Show(text);
}

}  // namespace awqd::obs
