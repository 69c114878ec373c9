// PseudoTerminal: reads the output of a program to its terminal.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "gtest/gtest.h"

namespace awqd::testing {

class PseudoTerminal {
 public:
  explicit PseudoTerminal(unsigned short columns)
      : master_(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC)) {
    EXPECT_GE(master_, 0);
    EXPECT_EQ(grantpt(master_), 0);
    EXPECT_EQ(unlockpt(master_), 0);
    path_ = ptsname(master_);
    slave_ = open(path_.c_str(), O_RDWR | O_NOCTTY);
    EXPECT_GE(slave_, 0);
    const winsize size = {.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
    EXPECT_EQ(ioctl(slave_, TIOCSWINSZ, &size), 0);
  }
  PseudoTerminal(const PseudoTerminal&) = delete;
  PseudoTerminal& operator=(const PseudoTerminal&) = delete;
  ~PseudoTerminal() {
    close(slave_);
    close(master_);
  }

  // The end for the program.
  int slave() const { return slave_; }

  // The output that was not read yet. Line feeds are "\r\n", as the terminal makes them.
  std::string Read() const {
    std::string out;
    pollfd fd = {.fd = master_, .events = POLLIN, .revents = 0};
    while (poll(&fd, 1, 0) > 0 && (fd.revents & POLLIN) != 0) {
      char buffer[4096];
      const ssize_t bytes = read(master_, buffer, sizeof(buffer));
      if (bytes <= 0) break;
      out.append(buffer, static_cast<size_t>(bytes));
    }
    return out;
  }

 private:
  int master_ = -1;
  int slave_ = -1;
  std::string path_;
};

}  // namespace awqd::testing
