// Only regular files inside the repository can be opened. Both ways of resolving paths are tested.
#include "kernels/checkpoint/repository_root.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>

#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/readdir_hook.h"

namespace awqd::model {
namespace {

using ::awqd::testing::TempDirectory;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

class Root : public ::testing::TestWithParam<RepositoryRoot::Resolve> {
 protected:
  void SetUp() override {
    directory_.Write("outside.txt", "secret");
    directory_.Write("root/m/config.json", "{}");
    directory_.Write("root2/evil.txt", "neighbour with the same prefix");
    auto root = RepositoryRoot::Open(directory_.At("root"), GetParam());
    ASSERT_TRUE(root.ok()) << root.status();
    root_ = *std::move(root);
  }
  void Link(const std::string& target, const std::string& at) {
    fs::create_symlink(target, directory_.At("root/" + at));
  }
  void ExpectRefused(const std::string& path, const std::string& says = "") {
    const auto file = root_.OpenFile(path);
    EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument) << path;
    EXPECT_THAT(std::string(file.status().message()), HasSubstr(says)) << path;
  }
  TempDirectory directory_;
  RepositoryRoot root_;
};

TEST_P(Root, OpensRegularFiles) {
  const auto file = root_.OpenFile("m/config.json");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->size(), 2);
  EXPECT_EQ(file->name(), "m/config.json");
}

TEST_P(Root, MissingIsNotFound) {
  EXPECT_EQ(root_.OpenFile("m/nothing").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(root_.OpenFile("nothing/config.json").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(root_.OpenFile("m/config.json/x").status().code(), absl::StatusCode::kNotFound);
}

TEST_P(Root, PathsThatAreNotPlain) {
  for (const std::string path : {"", "..", "../outside.txt", "m/../../outside.txt", "/etc/passwd",
                                 "m//config.json", "m/", "m/./config.json"}) {
    ExpectRefused(path);
  }
  ExpectRefused(std::string("m/config.json\0x", 15));
  ExpectRefused(std::string(4096, 'a'));
}

TEST_P(Root, LinksInsideAreFollowed) {
  Link("config.json", "m/link.json");
  Link("m", "alias");
  directory_.Write("root/hub/blobs/abc", "blob");
  fs::create_directories(directory_.At("root/hub/snapshots/1"));
  Link("../../blobs/abc", "hub/snapshots/1/model.safetensors");
  Link("hub/snapshots/1", "mine");
  EXPECT_TRUE(root_.OpenFile("m/link.json").ok());
  EXPECT_TRUE(root_.OpenFile("alias/config.json").ok());
  const auto blob = root_.OpenFile("mine/model.safetensors");
  ASSERT_TRUE(blob.ok()) << blob.status();
  EXPECT_EQ(blob->size(), 4);
}

TEST_P(Root, LinksOutsideAreRefused) {
  Link("../../outside.txt", "m/up");
  Link("/etc/passwd", "m/absolute");
  Link("../root2", "neighbour");
  Link("../..", "m/parent");
  Link("loop", "loop");
  ExpectRefused("m/up", "leads out of the model repository");
  ExpectRefused("m/absolute", "leads out of the model repository");
  ExpectRefused("neighbour/evil.txt", "leads out of the model repository");
  ExpectRefused("m/parent/outside.txt", "leads out of the model repository");
  ExpectRefused("loop", "too many symbolic links");
}

TEST_P(Root, OnlyRegularFiles) {
  ASSERT_EQ(mkfifo(directory_.At("root/fifo").c_str(), 0600), 0);
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {.sun_family = AF_UNIX};
  const std::string path = directory_.At("root/socket");
  ASSERT_LT(path.size(), sizeof(address.sun_path));
  path.copy(address.sun_path, path.size());
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  UniqueFd closes(fd);
  ExpectRefused("fifo", "got a FIFO, expected a regular file");
  ExpectRefused("m", "got a directory, expected a regular file");
  ExpectRefused("socket", "socket");
  // A link can reach a device only outside, which is refused before it is opened.
  Link("/dev/zero", "zero");
  ExpectRefused("zero", "leads out of the model repository");
}

TEST_P(Root, DeviceInsideTheRootIsRefused) {
  const auto dev = RepositoryRoot::Open("/dev", GetParam());
  ASSERT_TRUE(dev.ok()) << dev.status();
  const auto zero = dev->OpenFile("zero");
  EXPECT_THAT(std::string(zero.status().message()), HasSubstr("got a character device"));
}

TEST_P(Root, ListsSorted) {
  directory_.Write("root/m/b", "");
  directory_.Write("root/m/a", "");
  const auto names = root_.ListDirectory("m");
  ASSERT_TRUE(names.ok()) << names.status();
  EXPECT_THAT(*names, ElementsAre("a", "b", "config.json"));
  const auto top = root_.ListDirectory(".");
  ASSERT_TRUE(top.ok()) << top.status();
  EXPECT_THAT(*top, ElementsAre("m"));
}

// A lease makes others wait for its holder, for as long as the kernel allows.
TEST_P(Root, AFileThatMayNotBeReadIsToldWithItsOwner) {
  directory_.Write("root/m/a", "abc");
  ASSERT_EQ(chmod(directory_.path().c_str(), 0755), 0);
  ASSERT_EQ(chmod(directory_.At("root/m/a").c_str(), 0200), 0);
  const uid_t before = geteuid();
  // Root reads everything.
  const uid_t other = before == 0 ? 65534 : before;
  ASSERT_EQ(seteuid(other), 0);
  const auto file = root_.OpenFile("m/a");
  ASSERT_EQ(seteuid(before), 0);
  EXPECT_TRUE(absl::IsPermissionDenied(file.status())) << file.status();
  EXPECT_THAT(std::string(file.status().message()),
              HasSubstr(absl::StrCat("m/a\": open: permission denied: it has mode 0200 and belongs "
                                     "to uid ",
                                     before)));
  EXPECT_THAT(std::string(file.status().message()),
              HasSubstr(absl::StrCat("this process has uid ", other)));
}

TEST_P(Root, AFileUnderALeaseIsUnavailable) {
  const UniqueFd holder(open(directory_.At("root/m/config.json").c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(holder.ok());
  // The signal that asks the holder to release the lease.
  const auto before = signal(SIGIO, SIG_IGN);
  if (fcntl(holder.get(), F_SETLEASE, F_WRLCK) != 0) {
    GTEST_SKIP() << "the temporary directory's file system has no leases";
  }
  const auto file = root_.OpenFile("m/config.json");
  EXPECT_EQ(fcntl(holder.get(), F_SETLEASE, F_UNLCK), 0);
  signal(SIGIO, before);
  EXPECT_EQ(file.status().code(), absl::StatusCode::kUnavailable) << file.status();
  EXPECT_THAT(std::string(file.status().message()), HasSubstr("m/config.json"));
}

TEST_P(Root, AListingThatBreaksOffIsAnError) {
  directory_.Write("root/m/b", "");
  int left = 1;
  ReaddirHook() = [&](DIR* directory, ReadDirectory real) -> dirent* {
    if (left-- > 0) return real(directory);
    errno = EIO;
    return nullptr;
  };
  const auto names = root_.ListDirectory("m");
  ReaddirHook() = nullptr;
  ASSERT_FALSE(names.ok());
  EXPECT_THAT(std::string(names.status().message()), HasSubstr("\"m\": listing it"));
}

// The directory stays the same wherever the path leads later, and so do links to files.
TEST_P(Root, ADirectoryIsHeld) {
  directory_.Write("root/blobs/1", "first");
  directory_.Write("root/blobs/2", "second");
  directory_.Write("root/old/file", "first");
  directory_.Write("root/new/file", "second");
  Link("../blobs/1", "old/link");
  Link("../blobs/2", "new/link");
  Link("../../outside.txt", "old/out");
  Link("old", "held");
  const auto held = root_.Hold("held");
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_EQ(held->path, "old");
  fs::remove(directory_.At("root/held"));
  Link("new", "held");
  EXPECT_EQ(root_.OpenFile("held/link")->size(), 6);
  for (const std::string name : {"file", "link"}) {
    const auto file = root_.OpenFileIn(*held, name, "held/" + name);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->size(), 5);
    EXPECT_EQ(file->name(), "held/" + name);
  }
  EXPECT_TRUE(absl::IsNotFound(root_.OpenFileIn(*held, "none", "held/none").status()));
  for (const std::string name : {"out", "../new/file", "..", "."}) {
    EXPECT_TRUE(absl::IsInvalidArgument(root_.OpenFileIn(*held, name, "held/" + name).status()))
        << name;
  }
  EXPECT_THAT(*root_.ListIn(*held, "held"), ElementsAre("file", "link", "out"));
  EXPECT_TRUE(absl::IsNotFound(root_.Hold("none").status()));
}

TEST_P(Root, RootItself) {
  EXPECT_EQ(RepositoryRoot::Open(directory_.At("none"), GetParam()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(RepositoryRoot::Open(directory_.At("outside.txt"), GetParam()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Both, Root,
                         ::testing::Values(RepositoryRoot::Resolve::kKernel,
                                           RepositoryRoot::Resolve::kCanonicalise),
                         [](const auto& info) {
                           return info.param == RepositoryRoot::Resolve::kKernel ? "Kernel"
                                                                                 : "Canonicalise";
                         });

TEST(FileTest, WrittenToWhileOpen) {
  TempDirectory directory;
  directory.Write("m/x", "12345678");
  const auto root = RepositoryRoot::Open(directory.path());
  const auto file = root->OpenFile("m/x");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->CheckUnchanged().ok());
  directory.Write("m/x", "abcdefgh");
  fs::last_write_time(directory.At("m/x"),
                      fs::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_THAT(std::string(file->CheckUnchanged().message()), HasSubstr("written to"));
}

TEST(FileTest, WrittenToByWhoSetsItsTimeBack) {
  TempDirectory directory;
  directory.Write("m/x", "12345678");
  const std::string path = directory.At("m/x");
  const auto root = RepositoryRoot::Open(directory.path());
  const auto file = root->OpenFile("m/x");
  ASSERT_TRUE(file.ok()) << file.status();
  struct stat before = {}, now = {};
  ASSERT_EQ(stat(path.c_str(), &before), 0);
  do {  // until the clock of the file system, which has ticks of milliseconds, has moved
    directory.Write("m/x", "abcdefgh");
    const timespec times[] = {before.st_atim, before.st_mtim};
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
    ASSERT_EQ(stat(path.c_str(), &now), 0);
  } while (now.st_ctim.tv_sec == before.st_ctim.tv_sec &&
           now.st_ctim.tv_nsec == before.st_ctim.tv_nsec);
  EXPECT_EQ(now.st_mtim.tv_nsec, before.st_mtim.tv_nsec);
  EXPECT_THAT(std::string(file->CheckUnchanged().message()), HasSubstr("written to"));
}

TEST(FileTest, QuotedIsOneShortLine) {
  EXPECT_EQ(Quoted("a\n\x1b[31m"), "\"a\\n\\x1b[31m\"");
  EXPECT_EQ(Quoted(std::string(1000, 'x'), 4), "\"xxxx...\"");
}

}  // namespace
}  // namespace awqd::model
