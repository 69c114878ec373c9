// awqctl top: a screen shows the changes since the previous poll.
#include <sstream>

#include "client/awqctl/commands.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/client/fake_server.h"

namespace awqd::awqctl {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class TopTest : public ::testing::Test {
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
    std::ostringstream out, err;
    Console console{out, err, terminal_};
    const int exit_code = RunAwqctl(args, console);
    out_ = out.str();
    err_ = err.str();
    return exit_code;
  }

  FakeServer server_;
  bool terminal_ = false;
  std::string out_, err_;
};

TEST_F(TopTest, ShowsRatesOfTheTimeBetween) {
  ASSERT_EQ(Run({"--screens", "2"}), kOk) << err_;
  // 100 calls in 0.05 s and a little: never 1,000,000.
  EXPECT_THAT(out_, ContainsRegex("calls [0-9]{3,4}[.][0-9]/s, failed 0[.]0/s"));
  EXPECT_THAT(out_, HasSubstr("median 5.50 ms")) << "the 500 fast ones were before";
  EXPECT_THAT(out_, HasSubstr("12.50")) << "tokens a batch";
  EXPECT_THAT(out_, HasSubstr("3.0 MiB"));
  EXPECT_THAT(out_, HasSubstr("mini\\x1b[2J")) << "names must not steer the terminal";
  EXPECT_THAT(out_, Not(HasSubstr("\x1b[2J"))) << "no terminal, nothing to clear";
}

TEST_F(TopTest, ClearsATerminal) {
  terminal_ = true;
  ASSERT_EQ(Run({"--screens", "1"}), kOk) << err_;
  EXPECT_EQ(out_.rfind("\x1b[H\x1b[2J", 0), 0u);
}

TEST_F(TopTest, PrintsJson) {
  terminal_ = true;
  server_.info.counters.mutable_models(0)->set_name("mini");
  ASSERT_EQ(Run({"--screens", "1", "--json"}), kOk) << err_;
  EXPECT_EQ(nlohmann::json::parse(out_)["models"][0]["name"], "mini");
}

TEST_F(TopTest, ChecksItsFlags) {
  EXPECT_EQ(Run({"--interval", "0"}), kBadArguments);
  EXPECT_EQ(Run({"--screens", "-1"}), kBadArguments);
}

}  // namespace
}  // namespace awqd::awqctl
