// awqctl compare, which needs files and no server.
#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "client/files/npy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/client/awqctl_command.h"

namespace awqd::awqctl {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class AwqctlCompareTest : public AwqctlFixture {
 protected:
  // The exit code of a comparison by relative error.
  int Within(const std::string& actual, const std::string& expected, const std::string& limit) {
    return RunAlone({"compare", actual, expected, "--max_relative_error", limit});
  }
};

TEST_F(AwqctlCompareTest, ByBits) {
  const std::string a = Floats("a.npy", {1.0f, 0.0f, std::nanf("")});
  const std::string b = Floats("b.npy", {1.0f, -0.0f, std::nanf("")});
  EXPECT_EQ(RunAlone({"compare", a, a, "--bit_exact"}), kOk);
  EXPECT_EQ(RunAlone({"compare", a, b, "--bit_exact"}), kDiffers);
  EXPECT_THAT(out_, HasSubstr("1 of 3 elements differ"));
  EXPECT_EQ(Within(a, b, "0"), kOk);
  EXPECT_EQ(RunAlone({"compare", a, Doubles("w.npy", {0, 0, 0}), "--bit_exact"}), kDiffers);
}

TEST_F(AwqctlCompareTest, ByRelativeError) {
  const std::string a = Floats("a.npy", {3.0f, 4.004f});
  const std::string b = Floats("b.npy", {3.0f, 4.0f});
  EXPECT_EQ(Within(a, b, "1e-3"), kOk) << out_;
  EXPECT_THAT(out_, HasSubstr("same: relative error 0.0008"));
  EXPECT_EQ(Within(a, b, "7e-4"), kDiffers);
  const std::string nan = Floats("n.npy", {3.0f, std::nanf("")});
  const std::string inf = Floats("i.npy", {3.0f, INFINITY});
  const std::string zero = Floats("z.npy", {0.0f, 0.0f});
  for (const auto& [left, right] : std::vector<std::pair<std::string, std::string>>{
           {nan, b}, {b, nan}, {inf, b}, {b, inf}, {b, zero}, {inf, nan}}) {
    EXPECT_EQ(Within(left, right, "1e6"), kDiffers) << out_;
    EXPECT_EQ(RunAlone({"--json", "compare", left, right, "--max_relative_error", "1"}), kDiffers);
    EXPECT_FALSE(nlohmann::json::parse(out_, nullptr, false).is_discarded()) << out_;
  }
  EXPECT_EQ(Within(inf, inf, "0"), kOk);
  const std::string longer = Floats("l.npy", {3.0f, 4.0f, 0.0f});
  EXPECT_EQ(Within(a, longer, "1"), kDiffers);
  EXPECT_THAT(err_, HasSubstr("[3]"));
  EXPECT_EQ(RunAlone({"compare", a, Path("absent.npy"), "--bit_exact"}), kFileFailed);
}

// Squares of these overflow or underflow a double; the error of each is 1.
TEST_F(AwqctlCompareTest, ByRelativeErrorWhateverTheMagnitude) {
  const double largest = std::numeric_limits<double>::max();
  const double smallest = std::numeric_limits<double>::denorm_min();
  for (const double unit : {smallest, 1e-200, 1.0, 1e200, largest / 8}) {
    const std::string a = Doubles("a.npy", {8 * unit, 4 * unit});
    const std::string b = Doubles("b.npy", {4 * unit, 8 * unit});
    const std::string half = Doubles("h.npy", {0.5 * (8 * unit), 0.5 * (4 * unit)});
    EXPECT_EQ(Within(half, a, "0.4999"), kDiffers) << unit;
    EXPECT_THAT(out_, HasSubstr("different: relative error 0.5,")) << unit;
    EXPECT_EQ(Within(half, a, "0.5001"), kOk) << unit;
    EXPECT_EQ(Within(a, b, "0"), kDiffers) << unit;
    EXPECT_EQ(Within(a, a, "0"), kOk) << unit;
  }
  // An error below the smallest double still counts.
  EXPECT_EQ(Within(Doubles("s.npy", {largest, smallest}), Doubles("t.npy", {largest, 0}), "0"),
            kDiffers);
  // The difference itself exceeds the largest double.
  EXPECT_EQ(Within(Doubles("p.npy", {largest}), Doubles("q.npy", {-largest}), "2"), kOk);
  EXPECT_THAT(out_, HasSubstr("relative error 2,"));
}

TEST_F(AwqctlCompareTest, WhateverAddressTheEnvironmentNames) {
  const std::string a = Floats("a.npy", {1.0f});
  ASSERT_EQ(setenv("AWQD_ADDRESS", "0.0.0.0:0", 1), 0);
  EXPECT_EQ(RunAlone({"compare", a, a, "--bit_exact"}), kOk) << err_;
  EXPECT_EQ(RunAlone({"status"}), kBadArguments);
  ASSERT_EQ(unsetenv("AWQD_ADDRESS"), 0);
}

TEST_F(AwqctlCompareTest, AFileLargerThanMemoryIsAFileThatCannotBeRead) {
  const int64_t bytes = 2 * sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  const std::string header = client::MakeNpyHeader(client::NpyType::kF2, {bytes / 2});
  std::ofstream(Path("huge.npy"), std::ios::binary) << header;
  fs::resize_file(Path("huge.npy"), header.size() + static_cast<uint64_t>(bytes));  // a hole
  EXPECT_EQ(RunAlone({"compare", Path("huge.npy"), Path("huge.npy"), "--bit_exact"}), kFileFailed);
  EXPECT_THAT(err_, HasSubstr("huge.npy: got " + std::to_string(bytes) + " bytes of data"));
  EXPECT_EQ(std::count(err_.begin(), err_.end(), '\n'), 1) << err_;
  EXPECT_EQ(RunAlone({"matmul", "m", "w", Path("huge.npy")}), kFileFailed);
  EXPECT_THAT(err_, HasSubstr("huge.npy"));
}

TEST_F(AwqctlCompareTest, SaysHowItTakesNaNsAndZeros) {
  const auto bits = [](uint32_t value) { return std::bit_cast<float>(value); };
  const std::string a = Floats("a.npy", {1.0f, 0.0f, bits(0x7fc00000)});
  const std::string b = Floats("b.npy", {1.0f, -0.0f, bits(0x7fc00001)});
  EXPECT_EQ(Within(a, b, "0"), kOk);
  EXPECT_THAT(out_, HasSubstr("2 of 3 elements differ"));
  EXPECT_THAT(out_, HasSubstr("2 of them differ in a NaN's bits or a zero's sign alone: the "
                              "relative error takes such elements for equal"));
  EXPECT_EQ(RunAlone({"compare", a, b, "--bit_exact"}), kDiffers);
  EXPECT_THAT(out_, HasSubstr("--bit_exact counts them"));
  EXPECT_EQ(RunAlone({"--json", "compare", a, b, "--bit_exact"}), kDiffers);
  EXPECT_EQ(nlohmann::json::parse(out_).at("different_in_bits_alone"), 2);
  EXPECT_EQ(Within(a, a, "0"), kOk);
  EXPECT_EQ(out_.find("alone"), std::string::npos);
}

}  // namespace
}  // namespace awqd::awqctl
