// Collects lines in a string, which the thread swaps out and writes.
#include "server/obs/line_writer.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"

namespace awqd::obs {
namespace {

// Room for thousands of lines, which is seconds of a busy log.
constexpr size_t kStderrBytes = 1 << 20;

// Drops text that cannot be written because the disk is full or the reader is gone.
void WriteAll(int fd, absl::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written > 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (written < 0 && errno == EAGAIN) {  // another process made it non-blocking
      pollfd ready = {.fd = fd, .events = POLLOUT, .revents = 0};
      poll(&ready, 1, -1);
    } else if (written == 0 || errno != EINTR) {
      return;
    }
  }
}

}  // namespace

LineWriter::LineWriter(int fd, size_t max_bytes) : fd_(fd), max_bytes_(max_bytes) {
  lost_line_ = [](int64_t lost) { return absl::StrCat(lost, " lines lost\n"); };
  std::thread([this] { Run(); }).detach();
}

bool LineWriter::Append(absl::string_view text) {
  if (lost_ > 0 || waiting_.size() + writing_ + text.size() > max_bytes_) return false;
  absl::StrAppend(&waiting_, text);
  changed_.NotifyAll();
  return true;
}

bool LineWriter::Flush(absl::Duration limit) {
  const auto end = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(limit);
  MutexLock lock(&mu_);
  while (!waiting_.empty() || writing_ > 0 || lost_ > 0) {
    if (std::chrono::steady_clock::now() >= end) return false;
    changed_.WaitUntil(&mu_, end);
  }
  return true;
}

void LineWriter::Run() {
  for (;;) {
    std::string text;
    int64_t lost = 0;
    LostLine lost_line;
    {
      MutexLock lock(&mu_);
      while (waiting_.empty() && lost_ == 0) changed_.Wait(&mu_);
      text.swap(waiting_);
      lost = std::exchange(lost_, 0);
      writing_ = text.size() + 1;  // not 0, also when only the loss is written
      if (lost > 0) lost_line = lost_line_;
    }
    WriteAll(fd_, text);
    if (lost > 0) WriteAll(fd_, lost_line(lost));
    MutexLock lock(&mu_);
    writing_ = 0;
    changed_.NotifyAll();
  }
}

LineWriter& Stderr() {
  static auto* const writer = new LineWriter(STDERR_FILENO, kStderrBytes);
  return *writer;
}

}  // namespace awqd::obs
