// Files in memory that are replaced while others read them.
#include <sys/stat.h>

#include <atomic>
#include <fstream>
#include <sstream>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/transport/tls_credentials.h"

namespace awqd::transport {
namespace {

std::string Read(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

time_t Modified(const std::string& path) {
  struct stat found = {};
  EXPECT_EQ(stat(path.c_str(), &found), 0);
  return found.st_mtime;
}

TEST(MemoryFile, HoldsWhatItWasGiven) {
  const auto file = MemoryFile::Create("test", "one");
  ASSERT_TRUE(file.ok()) << file.status();
  const std::string path = (*file)->path();
  EXPECT_EQ(Read(path), "one");
  std::ofstream(path) << "two";
  EXPECT_EQ(Read(path), "one") << "nobody can write to it";
}

TEST(MemoryFile, NewContentsHaveANewTime) {
  const auto file = *MemoryFile::Create("test", "one");
  const std::string path = file->path();
  const time_t before = Modified(path);
  EXPECT_GT(before, 0);
  ASSERT_TRUE(file->Replace("two").ok());
  EXPECT_EQ(file->path(), path);
  EXPECT_EQ(Read(path), "two");
  EXPECT_EQ(Modified(path), before + 1);
}

TEST(MemoryFile, AReaderSeesTheOneOrTheOther) {
  const std::string one(100000, '1'), two(50000, '2');
  const auto file = *MemoryFile::Create("test", one);
  const std::string path = file->path();
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      const std::string text = Read(path);
      EXPECT_TRUE(text == one || text == two) << text.size();
    }
  });
  for (int i = 0; i < 500; ++i) EXPECT_TRUE(file->Replace(i % 2 == 0 ? two : one).ok());
  stop = true;
  reader.join();
}

}  // namespace
}  // namespace awqd::transport
