// GPU statistics: with the library, without it, with one that fails, and with a driver that does
// not answer.
#include "server/obs/gpu_statistics.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/obs/metrics_server.h"
#include "tests/server/obs/http_get.h"
#include "tests/server/obs/snapshots.h"

namespace awqd::obs {
namespace {

using ::testing::HasSubstr;
using testing::HttpGet;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kGpu[] = "0000:1b:00.0";
constexpr char kFake[] = AWQD_FAKE_NVML;

class GpuStatisticsTest : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const char* name : {"FAILS", "HANGS", "LOG"}) {
      unsetenv(absl::StrCat("FAKE_NVML_", name).c_str());
    }
    std::remove(path_.c_str());
  }
  static GpuStatisticsOptions With(const std::string& library) {
    return {.pci_bus_ids = {"", kGpu, "0000:ff:00.0"}, .limit = absl::Seconds(30), .nvml = library};
  }

  const std::string path_ = absl::StrCat(::testing::TempDir(), "/awqd_nvml_", ::getpid());
};

TEST_F(GpuStatisticsTest, TellsOfTheGpusThatTheDriverKnows) {
  GpuStatisticsReader reader(With(kFake));
  for (int i = 0; i < 3; ++i) {
    const auto uses = reader.Read();
    ASSERT_EQ(uses.size(), 1u) << "one has no id, and one is unknown";
    EXPECT_DOUBLE_EQ(uses.at(kGpu).utilization, 0.37);
    EXPECT_EQ(uses.at(kGpu).memory_used_bytes, int64_t{30} << 30);
  }
}

TEST_F(GpuStatisticsTest, TellsNothingWithoutTheLibraryOrAFunctionOfIt) {
  EXPECT_THAT(GpuStatisticsReader(With("libnot-there.so.1")).Read(), IsEmpty());
  EXPECT_THAT(GpuStatisticsReader(With(AWQD_FAKE_OLD_NVML)).Read(), IsEmpty());
}

TEST_F(GpuStatisticsTest, TellsNothingOfAGpuWithAnError) {
  for (const char* function : {"init", "handle", "utilization", "memory"}) {
    setenv("FAKE_NVML_FAILS", function, 1);
    EXPECT_THAT(GpuStatisticsReader(With(kFake)).Read(), IsEmpty()) << function;
  }
}

TEST_F(GpuStatisticsTest, OpensTheLibraryWhenItIsFirstAskedAndOnce) {
  setenv("FAKE_NVML_LOG", path_.c_str(), 1);
  {
    GpuStatisticsReader reader(With(kFake));
    EXPECT_FALSE(std::ifstream(path_).good()) << "nobody asked";
    reader.Read();
    reader.Read();
  }
  std::ifstream log(path_);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(log), {}), "i");
}

TEST_F(GpuStatisticsTest, WaitsNoLongerThanItsLimit) {
  std::ofstream(path_) << "hang";
  setenv("FAKE_NVML_HANGS", path_.c_str(), 1);
  GpuStatisticsOptions options = With(kFake);
  options.limit = absl::Milliseconds(50);
  GpuStatisticsReader reader(options);
  const absl::Time begin = absl::Now();
  EXPECT_THAT(reader.Read(), IsEmpty());
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(50));
  for (int i = 0; i < 1000; ++i) EXPECT_THAT(reader.Read(), IsEmpty());
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20)) << "later ones do not wait at all";
  std::remove(path_.c_str());  // the driver answers again
  while (reader.Read().empty()) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(reader.Read().size(), 1u);
}

TEST_F(GpuStatisticsTest, EndsWhileTheDriverHangs) {
  std::ofstream(path_) << "hang";
  setenv("FAKE_NVML_HANGS", path_.c_str(), 1);
  GpuStatisticsOptions options = With(kFake);
  options.limit = absl::Milliseconds(20);
  const absl::Time begin = absl::Now();
  GpuStatisticsReader(options).Read();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
}

TEST_F(GpuStatisticsTest, OnlyAScrapeOfMetricsAsks) {
  setenv("FAKE_NVML_LOG", path_.c_str(), 1);
  const auto snapshots = [](bool) {
    Snapshot out = Everything();
    out.devices.push_back(out.devices[0]);
    out.devices[1].id = "cuda:0";
    out.devices[1].pci_bus_id = kGpu;
    return out;
  };
  auto server = MetricsServer::Start(testing::ListenOnLoopback(), snapshots, nullptr, With(kFake));
  ASSERT_TRUE(server.ok()) << server.status();
  for (const char* path : {"/", "/readyz", "/livez", "/api/status"}) {
    EXPECT_EQ(HttpGet((*server)->port(), path).code, 200) << path;
  }
  EXPECT_FALSE(std::ifstream(path_).good());
  const std::string text = HttpGet((*server)->port(), "/metrics").body;
  EXPECT_TRUE(std::ifstream(path_).good());
  EXPECT_THAT(text, HasSubstr("\nawqd_device_utilization_ratio{device=\"cuda:0\"} 0.37\n"));
  EXPECT_THAT(text, HasSubstr("\nawqd_device_memory_used_bytes{device=\"cuda:0\"} 32212254720\n"));
  EXPECT_THAT(text, Not(HasSubstr("awqd_device_utilization_ratio{device=\"cpu:0\"}")));
}

TEST_F(GpuStatisticsTest, NoSeriesWithoutTheLibrary) {
  auto server = MetricsServer::Start(
      testing::ListenOnLoopback(), [](bool) { return Everything(); }, nullptr,
      With("libnot-there.so.1"));
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_THAT(HttpGet((*server)->port(), "/metrics").body, Not(HasSubstr("utilization")));
}

}  // namespace
}  // namespace awqd::obs
