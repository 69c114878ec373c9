// awqctl top: a screen shows the changes since the previous poll; keys and signals end it.
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <termios.h>
#include <unistd.h>

#include <thread>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/client/awqctl_command.h"
#include "tests/client/fake_server.h"

namespace awqd::awqctl {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class TopTest : public AwqctlFixture {
 protected:
  void SetUp() override {
    v1::Counters& counters = server_.info.counters;
    counters.set_calls(1'000'000);
    for (const double bound : {0.001, 0.01}) counters.mutable_request_calls()->add_bounds(bound);
    for (const int64_t count : {500, 0, 0}) counters.mutable_request_calls()->add_counts(count);
    v1::DeviceCounters* device = counters.add_devices();
    device->set_id("cpu");
    device->set_batches(7);
    device->set_tokens(700);
    v1::ModelCounters* model = counters.add_models();
    model->set_name("mini\x1b[2J");
    model->set_weights_bytes(3 << 20);
    model->set_loaded_share(1);
    model->set_unserved_weights(12345);
    server_.info.between = [](v1::Counters* counters) {
      v1::Histogram& calls = *counters->mutable_request_calls();
      calls.set_counts(1, calls.counts(1) + 100);
      counters->set_calls(counters->calls() + 100);
      v1::DeviceCounters& device = *counters->mutable_devices(0);
      device.set_batches(device.batches() + 10);
      device.set_tokens(device.tokens() + 125);
      device.set_queued_requests(3);
    };
  }
  int Run(std::vector<std::string> args) {
    args.insert(args.begin(), {"--address", server_.address, "top", "--interval", "0.05"});
    return RunAlone(args);
  }
  // Until a key or a signal.
  int RunOnTerminal() {
    terminal_ = true;
    return RunAlone({"--address", server_.address, "top", "--interval", "60"});
  }

  FakeServer server_;
};

TEST_F(TopTest, ShowsRatesOfTheTimeBetween) {
  ASSERT_EQ(Run({"--screens", "2"}), kOk) << err_;
  // 100 calls in 0.05 s and a little: never 1,000,000.
  EXPECT_THAT(out_, ContainsRegex("calls [0-9]{3,4}[.][0-9]/s, failed 0[.]0/s"));
  EXPECT_THAT(out_, HasSubstr("median 5.50 ms")) << "the 500 fast ones were before";
  EXPECT_THAT(out_, HasSubstr("12.50")) << "tokens a batch";
  EXPECT_THAT(out_, HasSubstr("3.0 MiB"));
  EXPECT_THAT(out_, HasSubstr("NOT SERVED"));
  EXPECT_THAT(out_, HasSubstr("12345"));
  EXPECT_THAT(out_, HasSubstr("mini\\x1b[2J")) << "names must not steer the terminal";
  EXPECT_THAT(out_, Not(HasSubstr("\x1b[2J"))) << "no terminal, nothing to clear";
}

TEST_F(TopTest, FillsATerminalAndLeavesIt) {
  terminal_ = true;
  ASSERT_EQ(Run({"--screens", "2"}), kOk) << err_;
  EXPECT_TRUE(absl::StartsWith(out_, "\x1b[?1049h"));
  EXPECT_TRUE(absl::EndsWith(out_, "\x1b[?1049l\x1b[?25h"));
  EXPECT_THAT(out_, HasSubstr("q quits"));
  EXPECT_THAT(out_, ContainsRegex("calls/s, at most [0-9.]+  \u2587?[\u2581-\u2588]+"));
  EXPECT_THAT(out_, HasSubstr("cpu  busy [                    ]   0 %"));
  EXPECT_THAT(out_, HasSubstr("\x1b[33mmini")) << "a weight that is not served";
}

TEST_F(TopTest, ColoursWhatFails) {
  terminal_ = true;
  server_.info.between = [](v1::Counters* counters) {
    counters->set_failed_calls(counters->failed_calls() + 1);
    v1::ModelCounters& model = *counters->mutable_models(0);
    model.set_not_computed(model.not_computed() + 1);
  };
  ASSERT_EQ(Run({"--screens", "1"}), kOk) << err_;
  EXPECT_THAT(out_, ContainsRegex("\x1b\\[31mfailed [0-9.]+/s\x1b\\[0m"));
  EXPECT_THAT(out_, HasSubstr("\x1b[31mmini"));
  // no-color.org
  setenv("NO_COLOR", "1", 1);
  EXPECT_EQ(Run({"--screens", "1"}), kOk) << err_;
  EXPECT_THAT(out_, HasSubstr("failed "));
  EXPECT_THAT(out_, Not(ContainsRegex("\x1b\\[[0-9]*m")));
  setenv("NO_COLOR", "", 1);
  EXPECT_EQ(Run({"--screens", "1"}), kOk) << err_;
  unsetenv("NO_COLOR");
  EXPECT_THAT(out_, HasSubstr("\x1b[31mmini"));
  terminal_ = false;
  EXPECT_EQ(Run({"--screens", "1"}), kOk) << err_;
  EXPECT_THAT(out_, Not(HasSubstr("\x1b")));
}

// A terminal in place of the standard input.
class Keyboard {
 public:
  Keyboard() : before_(dup(STDIN_FILENO)), keys_(posix_openpt(O_RDWR | O_NOCTTY)) {
    grantpt(keys_);
    unlockpt(keys_);
    const int terminal = open(ptsname(keys_), O_RDWR | O_NOCTTY);
    dup2(terminal, STDIN_FILENO);
    close(terminal);
  }
  ~Keyboard() {
    dup2(before_, STDIN_FILENO);
    close(before_);
    close(keys_);
  }
  void Press(char key) const { EXPECT_EQ(write(keys_, &key, 1), 1); }
  // Whether keys arrive at once.
  static bool Raw() {
    termios state = {};
    EXPECT_EQ(tcgetattr(STDIN_FILENO, &state), 0);
    return (state.c_lflag & ICANON) == 0;
  }
  static void WaitUntilRaw() {
    for (int i = 0; i < 2000 && !Raw(); ++i) absl::SleepFor(absl::Milliseconds(5));
  }

 private:
  const int before_, keys_;
};

TEST_F(TopTest, QuitsByQ) {
  const Keyboard keyboard;
  std::thread user([&] {
    Keyboard::WaitUntilRaw();
    keyboard.Press('x');
    keyboard.Press('q');
  });
  EXPECT_EQ(RunOnTerminal(), kOk) << err_;
  user.join();
  EXPECT_FALSE(Keyboard::Raw());
}

TEST_F(TopTest, ASignalRestoresTheTerminal) {
  const Keyboard keyboard;
  for (const int signal : {SIGHUP, SIGINT, SIGTERM}) {
    std::thread user([&] {
      Keyboard::WaitUntilRaw();
      kill(getpid(), signal);
    });
    EXPECT_EQ(RunOnTerminal(), 128 + signal) << err_;
    user.join();
    EXPECT_FALSE(Keyboard::Raw());
  }
}

TEST_F(TopTest, EndsWhereNobodyReads) {
  std::ostringstream out, err;
  out.setstate(std::ios::badbit);  // as after a write to a full disk
  Console console{.out = out, .err = err};
  EXPECT_EQ(RunAwqctl({"--address", server_.address, "top", "--interval", "0.01"}, console),
            kFileFailed);
  EXPECT_EQ(err.str(), "awqctl: cannot write to standard output\n");
}

TEST_F(TopTest, PrintsJson) {
  terminal_ = true;
  server_.info.counters.mutable_models(0)->set_name("mini");
  ASSERT_EQ(Run({"--screens", "1", "--json"}), kOk) << err_;
  EXPECT_EQ(nlohmann::json::parse(out_)["models"][0]["name"], "mini");
}

TEST_F(TopTest, ChecksItsFlags) {
  EXPECT_EQ(RunAlone({"top", "--interval", "0"}), kBadArguments);
  EXPECT_EQ(Run({"--screens", "-1"}), kBadArguments);
}

}  // namespace
}  // namespace awqd::awqctl
