// The client's shared-memory objects: their names, their permissions, and their removal.
#include "client/shared_memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/remove_on_signal.h"
#include "gtest/gtest.h"

namespace awqd::client {
namespace {

const std::string& Prefix() {
  static const std::string prefix = absl::StrCat("awqd-client-", getpid(), "-");
  return prefix;
}
std::string PathOf(const SharedMemory& memory) { return "/dev/shm/" + memory.name(); }

TEST(SharedMemory, IsAZeroedObjectOfItsOwnForTheUserAlone) {
  const auto one = SharedMemory::Create(Prefix(), 10000);
  const auto two = SharedMemory::Create(Prefix(), 10000);
  ASSERT_TRUE(one.ok() && two.ok()) << one.status() << two.status();
  EXPECT_TRUE(absl::StartsWith(one->name(), Prefix()));
  EXPECT_EQ(one->name().size(), Prefix().size() + 32);
  EXPECT_NE(one->name(), two->name());
  EXPECT_EQ(std::string(one->data(), 10000), std::string(10000, '\0'));
  struct stat found = {};
  ASSERT_EQ(stat(PathOf(*one).c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600u);
  EXPECT_EQ(found.st_size, 10000);
  EXPECT_GE(found.st_blocks * 512, 10000) << "it is really there";
}

TEST(SharedMemory, TheModeHoldsWhateverTheUmask) {
  const mode_t before = umask(0777);
  const auto memory = SharedMemory::Create(Prefix(), 1, 0660);
  umask(before);
  ASSERT_TRUE(memory.ok()) << memory.status();
  struct stat found = {};
  ASSERT_EQ(stat(PathOf(*memory).c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0660u);
}

TEST(SharedMemory, GoesAwayWithItsLastOwner) {
  std::string path;
  {
    auto memory = SharedMemory::Create(Prefix(), 5);
    ASSERT_TRUE(memory.ok());
    path = PathOf(*memory);
    SharedMemory moved = *std::move(memory);
    std::memcpy(moved.data(), "hello", 5);
    moved = SharedMemory(std::move(moved));
    EXPECT_EQ(std::string(moved.data(), 5), "hello");
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(SharedMemory, NamesItsRanges) {
  const auto memory = SharedMemory::Create(Prefix(), 0);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->size(), 0);
  const v1::SharedMemory range = memory->Range(7, 9);
  EXPECT_EQ(range.name(), memory->name());
  EXPECT_EQ(range.offset(), 7);
  EXPECT_EQ(range.size(), 9);
}

TEST(SharedMemory, MoreThanThereIsFailsAndLeavesNothing) {
  const auto memory = SharedMemory::Create(Prefix(), int64_t{1} << 50);
  EXPECT_FALSE(memory.ok());
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    EXPECT_FALSE(absl::StartsWith(entry.path().filename().string(), Prefix())) << entry.path();
  }
}

// The number of objects with this prefix.
size_t Objects() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    count += absl::StartsWith(entry.path().filename().string(), Prefix()) ? 1 : 0;
  }
  return count;
}

// Expects that a child process leaves no objects when it holds three, has dropped two, and gets a
// signal.
void ExpectSignalLeavesNothing(int signal_number) {
  Prefix();  // the parent's process id
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    RemoveFilesOnSignals();
    std::vector<SharedMemory> kept;
    for (int i = 0; i < 5; ++i) {
      auto memory = SharedMemory::Create(Prefix(), 10);
      if (!memory.ok()) _exit(1);
      if (i % 2 == 0) kept.push_back(*std::move(memory));
    }
    if (Objects() != kept.size()) _exit(2);
    raise(signal_number);
    _exit(3);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal_number) << status;
  EXPECT_EQ(Objects(), 0u) << signal_number;
}

TEST(SharedMemory, SignalsLeaveNothingBehind) {
  for (const int signal_number : {SIGHUP, SIGINT, SIGTERM}) {
    ExpectSignalLeavesNothing(signal_number);
  }
}

TEST(SharedMemory, AnIgnoredSignalStaysIgnored) {
  const auto memory = SharedMemory::Create(Prefix(), 10);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    signal(SIGHUP, SIG_IGN);  // as nohup does
    RemoveFilesOnSignals();
    raise(SIGHUP);
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(Objects(), 1u);
}

TEST(SharedMemory, RefusesANameThatIsNoName) { EXPECT_FALSE(SharedMemory::Create("a/b", 1).ok()); }

}  // namespace
}  // namespace awqd::client
