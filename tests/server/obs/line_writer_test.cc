// Lines to a pipe, with and without a reader.
#include "server/obs/line_writer.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace awqd::obs {
namespace {

constexpr size_t kPipeBytes = 4096;
constexpr size_t kRoom = 1000;

// Writers are never destroyed, and neither are their pipes here: each test has one of both.
class LineWriterTest : public ::testing::Test {
 protected:
  LineWriterTest() {
    EXPECT_EQ(pipe(ends_), 0);
    EXPECT_EQ(fcntl(ends_[1], F_SETPIPE_SZ, static_cast<int>(kPipeBytes)),
              static_cast<int>(kPipeBytes));
    writer_ = new LineWriter(ends_[1], kRoom);
    writer_->set_lost_line([](int64_t lost) { return absl::StrCat("lost ", lost, "\n"); });
  }

  // Reads until there are this many bytes.
  std::string Read(size_t bytes) {
    std::string out;
    while (out.size() < bytes) {
      char block[512];
      const ssize_t n = read(ends_[0], block, std::min(sizeof(block), bytes - out.size()));
      if (n <= 0) break;
      out.append(block, static_cast<size_t>(n));
    }
    return out;
  }

  int ends_[2] = {-1, -1};
  LineWriter* writer_;
};

TEST_F(LineWriterTest, WritesEverythingInOrder) {
  std::string expected;
  for (int i = 0; i < 10; ++i) {
    const std::string line = absl::StrCat("line ", i, "\n");
    writer_->Write(line);
    expected += line;
  }
  EXPECT_TRUE(writer_->Flush(absl::Seconds(20)));
  EXPECT_EQ(Read(expected.size()), expected);
}

TEST_F(LineWriterTest, LosesWhatNobodyReadsAndSaysSoInItsPlace) {
  const std::string line = std::string(99, 'x') + "\n";
  // Fills the pipe first, so that later lines are certainly stuck.
  for (size_t i = 0; i < kPipeBytes / line.size(); ++i) {
    writer_->Write(line);
    ASSERT_TRUE(writer_->Flush(absl::Seconds(20)));
  }
  const absl::Time start = absl::Now();
  int taken = 0;
  while (writer_->Offer(line)) ++taken;
  for (int i = 0; i < 7; ++i) writer_->Write(line);
  EXPECT_FALSE(writer_->Flush(absl::Milliseconds(50)));
  EXPECT_LT(absl::Now() - start, absl::Seconds(10)) << "nobody waited for the reader";
  EXPECT_GE(taken, static_cast<int>(kRoom / line.size()) - 1);
  std::string kept;
  for (size_t i = 0; i < kPipeBytes / line.size() + taken; ++i) kept += line;
  EXPECT_EQ(Read(kept.size()), kept);
  // The writer's thread may take waiting lines while the seven arrive, and then reports the loss in
  // two lines.
  int lost = 0;
  while (lost < 7) {
    int more = 0;
    ASSERT_TRUE(
        absl::SimpleAtoi(absl::StripSuffix(absl::StripPrefix(Read(7), "lost "), "\n"), &more));
    ASSERT_GT(more, 0);
    lost += more;
  }
  EXPECT_EQ(lost, 7);
  EXPECT_TRUE(writer_->Flush(absl::Seconds(20)));
  writer_->Write("again\n");
  EXPECT_EQ(Read(6), "again\n");
}

TEST_F(LineWriterTest, AReaderThatIsGoneHoldsNobodyUp) {
  signal(SIGPIPE, SIG_IGN);
  close(ends_[0]);
  for (int i = 0; i < 100; ++i) writer_->Write("nobody reads this\n");
  EXPECT_TRUE(writer_->Flush(absl::Seconds(20)));
}

}  // namespace
}  // namespace awqd::obs
