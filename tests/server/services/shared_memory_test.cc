// Every rule about shared memory: the names and objects that are allowed, clients that change an
// object in use, and the error texts.
#include "server/services/memory/shared_memory.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/services/shared_object.h"

namespace awqd::services {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Access = SharedMemory::Access;

constexpr absl::string_view kUnusable = "x: got a range that cannot be used: ";
constexpr absl::string_view kNotThere =
    "the object does not exist, or the server's user ";  // may not open it
constexpr absl::string_view kNotRegular = "it is not a regular file";

class SharedMemoryTest : public ::testing::Test {
 protected:
  SharedMemoryTest() : memory_(*SharedMemory::Create({.prefixes = {prefix_}, .max_open = 3})) {}

  absl::Status Open(const v1::SharedMemory& range, Access access = Access::kRead) {
    return memory_->Open(range, access, "x").status();
  }
  // Both ways of opening refuse the range, with this reason.
  void ExpectUnusable(const v1::SharedMemory& range, absl::string_view reason) {
    for (Access access : {Access::kRead, Access::kWrite}) {
      const absl::Status status = Open(range, access);
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(StartsWith(absl::StrCat(kUnusable, reason)),
                        HasSubstr("expected one within a regular shared-memory object")));
    }
    EXPECT_EQ(memory_->open_ranges(), 0);
  }

  const std::string prefix_ = absl::StrCat("awqd-test-", getpid(), "-");
  std::unique_ptr<SharedMemory> memory_;
  SharedObject object_{prefix_ + "object", std::string(100, 'a')};
};

TEST_F(SharedMemoryTest, ReadsAndWritesARange) {
  object_.Set(10, "0123456789");
  absl::StatusOr<SharedRange> range = memory_->Open(object_.Range(10, 5), Access::kRead, "x");
  ASSERT_TRUE(range.ok()) << range.status();
  std::string bytes(5, '\0');
  ASSERT_TRUE(range->Read(bytes.data()).ok());
  EXPECT_EQ(bytes, "01234");
  range = memory_->Open(object_.Range(95, 5), Access::kWrite, "x");
  ASSERT_TRUE(range.ok()) << range.status();
  EXPECT_TRUE(range->Write("end").ok());
  EXPECT_EQ(object_.Get(94, 6), "aendaa");
  EXPECT_FALSE(range->Write("longer").ok());
  EXPECT_EQ(object_.size(), 100);
}

TEST_F(SharedMemoryTest, OffByDefaultAndSaysWhichFlag) {
  const auto off = *SharedMemory::Create({});
  const absl::Status status = off->Open(object_.Range(0, 1), Access::kRead, "x").status();
  EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("x: "));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--shared_memory_prefix"));
}

TEST_F(SharedMemoryTest, PrefixesArePlain) {
  for (const char* good : {"awqd-", "a", "A.b_c-0"}) {
    EXPECT_TRUE(CheckSharedMemoryPrefix(good).ok()) << good;
  }
  for (const std::string& bad :
       {std::string(), std::string("/"), std::string("../x"), std::string(".x"), std::string("a/b"),
        std::string("a b"), std::string("a\0b", 3), std::string(65, 'a')}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CheckSharedMemoryPrefix(bad))) << bad;
  }
}

TEST_F(SharedMemoryTest, NamesThatDoNotBeginWithThePrefixOrLeaveTheDirectory) {
  const std::string name = object_.name();
  for (const std::string& bad :
       {std::string(), std::string("x"), "/" + name, "./" + name, "../shm/" + name, "x" + name,
        prefix_ + "/../" + name, prefix_ + "..", prefix_ + "a/b", prefix_ + "a b",
        name + std::string(1, '\0'), name + "\n", prefix_ + "\xc3\xa4",
        prefix_ + std::string(129, 'a'), prefix_.substr(0, prefix_.size() - 1)}) {
    v1::SharedMemory range = object_.Range(0, 1);
    range.set_name(bad);
    const absl::Status status = Open(range);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << bad << ": " << status;
    // Dots alone are harmless within one component, and there is no such object.
    if (bad == prefix_ + "..") continue;
    EXPECT_THAT(std::string(status.message()), HasSubstr("x.name: got a name that is not allowed"))
        << bad;
  }
}

TEST_F(SharedMemoryTest, RangesThatOverflowOrAreNegative) {
  for (const auto& [offset, size] : {std::pair<int64_t, int64_t>{-1, 1},
                                     {0, -1},
                                     {LLONG_MAX, 1},
                                     {1, LLONG_MAX},
                                     {LLONG_MAX, LLONG_MAX},
                                     {LLONG_MIN, LLONG_MIN},
                                     {LLONG_MIN, 0},
                                     {100, LLONG_MIN}}) {
    const absl::Status status = Open(object_.Range(offset, size));
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("a sum below 2^63"));
  }
}

TEST_F(SharedMemoryTest, RangesEndWithinTheObject) {
  EXPECT_TRUE(Open(object_.Range(0, 100)).ok());
  EXPECT_TRUE(Open(object_.Range(100, 0)).ok());
  EXPECT_TRUE(Open(object_.Range(99, 1)).ok());
  ExpectUnusable(object_.Range(0, 101), "the object has 100 bytes and ends before byte 101");
  ExpectUnusable(object_.Range(100, 1), "the object has 100 bytes");
  ExpectUnusable(object_.Range(101, 0), "the object has 100 bytes");
  ExpectUnusable(object_.Range(LLONG_MAX - 1, 1), "the object has 100 bytes");
}

// The owner of an object learns what is wrong with it. Nobody learns whether an object exists that
// the server may not open.
TEST_F(SharedMemoryTest, TellsTheReason) {
  v1::SharedMemory range = object_.Range(0, 1);
  range.set_name(prefix_ + "absent");
  ExpectUnusable(range, kNotThere);
  const std::string path = "/dev/shm/" + prefix_ + "other";
  range.set_name(prefix_ + "other");
  ASSERT_EQ(symlink(object_.path().c_str(), path.c_str()), 0);
  ExpectUnusable(range, kNotRegular);
  std::filesystem::remove(path);
  ASSERT_EQ(mkdir(path.c_str(), 0700), 0);
  ExpectUnusable(range, kNotRegular);
  std::filesystem::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  ExpectUnusable(range, kNotRegular);  // and opening does not wait for a writer
  std::filesystem::remove(path);
  ASSERT_EQ(link(object_.path().c_str(), path.c_str()), 0);
  ExpectUnusable(range, "the object has several names");
  ExpectUnusable(object_.Range(0, 1), "the object has several names");
  std::filesystem::remove(path);
  EXPECT_TRUE(Open(object_.Range(0, 1)).ok());
  if (geteuid() != 0) {
    ASSERT_EQ(chmod(object_.path().c_str(), 0), 0);
    ExpectUnusable(object_.Range(0, 1), kNotThere);
  }
}

TEST_F(SharedMemoryTest, AllowsSeveralPrefixesAndNamesOfTensors) {
  const auto memory = *SharedMemory::Create({.prefixes = {"a-", "b-"}});
  EXPECT_EQ(memory->prefix(), "a-");
  const auto open = [&](const std::string& name) {
    v1::SharedMemory range;
    range.set_name(name);
    return std::string(memory->Open(range, Access::kRead, "x").status().message());
  };
  // perf_analyzer makes the last ones.
  for (const char* name : {"a-1", "b-1", "y", "x_0_0", "bias_12_3", "router_weights_0_0"}) {
    EXPECT_THAT(open(name), HasSubstr(kNotThere)) << name;
  }
  for (const char* name :
       {"c-1", "a", "z", "x", "x_", "x_0", "x_0_", "x_a_0", "x_0_0_0", "_0_0", "y_0_0", "ids"}) {
    EXPECT_THAT(open(name), HasSubstr("x.name: got a name that is not allowed")) << name;
  }
  EXPECT_THAT(open("c-1"), HasSubstr("\"a-\" or \"b-\""));
}

TEST_F(SharedMemoryTest, IdentifiesAnObject) {
  const auto before = memory_->Identify(object_.name());
  EXPECT_TRUE(before.has_value());
  object_.Unlink();
  EXPECT_EQ(memory_->Identify(object_.name()), std::nullopt);
  const SharedObject other(object_.name(), "b");
  EXPECT_NE(memory_->Identify(object_.name()), before);
}

// On a thread of its own, which sees a /dev/shm of one page.
TEST_F(SharedMemoryTest, AFullFileSystemIsResourceExhausted) {
  absl::Status status;
  bool mounted = false;
  std::thread([&] {
    mounted = unshare(CLONE_NEWNS) == 0 &&
              mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
              mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=4096") == 0;
    if (!mounted) return;
    SharedObject object(prefix_ + "small", "a");
    object.Truncate(3 * 4096);
    const auto memory = *SharedMemory::Create({.prefixes = {prefix_}});
    const auto range = memory->Open(object.Range(0, 3 * 4096), Access::kWrite, "x");
    status = range.ok() ? range->Write(std::string(3 * 4096, 'b')) : range.status();
  }).join();
  if (!mounted) GTEST_SKIP() << "mounting needs privileges";
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), StartsWith("x: /dev/shm has no room for an answer"));
}

TEST_F(SharedMemoryTest, DoesNotWaitForALease) {
  v1::SharedMemory range = object_.Range(0, 0);
  range.set_name(prefix_ + "leased");
  const std::string path = "/dev/shm/" + range.name();
  const int held = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_GE(held, 0);
  const auto ignored = signal(SIGIO, SIG_IGN);  // the signal by which the kernel asks for the lease
  ASSERT_EQ(fcntl(held, F_SETLEASE, F_WRLCK), 0) << strerror(errno);
  ExpectUnusable(range, "another process has a lease on it");
  EXPECT_EQ(fcntl(held, F_SETLEASE, F_UNLCK), 0);
  EXPECT_TRUE(Open(range).ok());
  close(held);
  signal(SIGIO, ignored);
  std::filesystem::remove(path);
}

TEST_F(SharedMemoryTest, AnObjectCutShortWhileItIsReadIsAnErrorAndNoSignal) {
  const auto range = memory_->Open(object_.Range(0, 100), Access::kRead, "x");
  ASSERT_TRUE(range.ok());
  object_.Truncate(50);
  std::string bytes(100, '\0');
  const std::string shorter = absl::StrCat(kUnusable, "the object became shorter");
  EXPECT_THAT(std::string(range->Read(bytes.data()).message()), StartsWith(shorter));
  object_.Truncate(0);
  EXPECT_THAT(std::string(range->Read(bytes.data()).message()), StartsWith(shorter));
  object_.Truncate(100);
  EXPECT_TRUE(range->Read(bytes.data()).ok());
  EXPECT_EQ(bytes, std::string(100, '\0'));
}

TEST_F(SharedMemoryTest, AnObjectCutShortBeforeItIsWrittenGrowsNoFurtherThanItWas) {
  const auto range = memory_->Open(object_.Range(90, 10), Access::kWrite, "x");
  ASSERT_TRUE(range.ok());
  object_.Truncate(0);
  EXPECT_TRUE(range->Write("0123456789").ok());
  EXPECT_EQ(object_.size(), 100);
}

// The open descriptor is the reference, so changes of the name have no effect.
TEST_F(SharedMemoryTest, AnObjectThatIsUnlinkedOrReplacedInUseStays) {
  const auto in = memory_->Open(object_.Range(0, 100), Access::kRead, "x");
  const auto out = memory_->Open(object_.Range(0, 100), Access::kWrite, "x");
  ASSERT_TRUE(in.ok() && out.ok());
  object_.Unlink();
  SharedObject other(object_.name(), std::string(100, 'b'));
  std::string bytes(100, '\0');
  EXPECT_TRUE(in->Read(bytes.data()).ok());
  EXPECT_EQ(bytes, std::string(100, 'a'));
  EXPECT_TRUE(out->Write("written").ok());
  EXPECT_EQ(object_.Get(0, 8), "writtena");
  EXPECT_EQ(other.Get(0, 8), "bbbbbbbb");
}

TEST_F(SharedMemoryTest, BoundsWhatIsOpenAndGivesItBack) {
  const int files = OpenFiles();
  {
    std::vector<SharedRange> ranges;
    for (int i = 0; i < 3; ++i) {
      absl::StatusOr<SharedRange> range = memory_->Open(object_.Range(0, 1), Access::kRead, "x");
      ASSERT_TRUE(range.ok());
      ranges.push_back(*std::move(range));
    }
    EXPECT_EQ(memory_->open_ranges(), 3);
    EXPECT_EQ(OpenFiles(), files + 3);
    const absl::Status status = Open(object_.Range(0, 1));
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("max_shared_memory_ranges"));
    ranges.pop_back();
    EXPECT_TRUE(Open(object_.Range(0, 1)).ok());
  }
  EXPECT_EQ(memory_->open_ranges(), 0);
  EXPECT_EQ(OpenFiles(), files);
}

class WriteTest : public SharedMemoryTest, public ::testing::WithParamInterface<int64_t> {};

TEST_P(WriteTest, WritesWhateverTheSizeAndClosesFirst) {
  const std::string bytes(static_cast<size_t>(GetParam()), 'r');
  object_.Truncate(GetParam());
  const auto owner = std::make_shared<std::string>(bytes);
  absl::StatusOr<SharedRange> range =
      memory_->Open(object_.Range(0, GetParam()), Access::kWrite, "x");
  ASSERT_TRUE(range.ok());
  absl::Status got = absl::UnknownError("not called");
  int64_t open = -1;
  memory_->Write(*std::move(range), engine::Payload(owner, owner->data(), GetParam()),
                 [&](const absl::Status& status) {
                   got = status;
                   open = memory_->open_ranges();
                 });
  memory_->Stop();
  EXPECT_TRUE(got.ok()) << got;
  EXPECT_EQ(open, 0);
  EXPECT_EQ(object_.Get(0, GetParam()), bytes);
  // Also after Stop.
  object_.Set(0, "x");
  range = memory_->Open(object_.Range(0, GetParam()), Access::kWrite, "x");
  got = absl::UnknownError("not called");
  memory_->Write(*std::move(range), engine::Payload(owner, owner->data(), GetParam()),
                 [&](const absl::Status& status) { got = status; });
  EXPECT_TRUE(got.ok()) << got;
  EXPECT_EQ(object_.Get(0, 1), "r");
}

INSTANTIATE_TEST_SUITE_P(Sizes, WriteTest, ::testing::Values(1, 4096, (1 << 20) - 1, 5 << 20));

}  // namespace
}  // namespace awqd::services
