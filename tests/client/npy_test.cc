// .npy: files of NumPy are read, hostile ones are refused.
#include "client/files/npy.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace awqd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string File(absl::string_view dict, int major = 1) {
  std::string file("\x93NUMPY", 6);
  file.push_back(static_cast<char>(major));
  file.push_back(0);
  file.push_back(static_cast<char>(dict.size() & 0xff));
  file.push_back(static_cast<char>(dict.size() >> 8));
  if (major == 2) file.append(2, '\0');
  file.append(dict.data(), dict.size());
  if (file.size() < 12) file.append(12 - file.size(), ' ');
  return file;
}

std::string Path(const std::string& name) {
  return testing::TempDir() + "/npy_test_" + std::to_string(getpid()) + "_" + name;
}

TEST(NpyHeaderTest, ReadsWhatNumPyWrites) {
  const auto header = ParseNpyHeader(
      File("{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }          \n"));
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->type, NpyType::kF2);
  EXPECT_THAT(header->shape, ElementsAre(2, 3));
  EXPECT_EQ(header->data_bytes, 12);
}

TEST(NpyHeaderTest, ReadsVersion2AndEveryRank) {
  EXPECT_EQ(ParseNpyHeader(File("{'descr':'|u1','fortran_order':False,'shape':()}", 2))->data_bytes,
            1);
  EXPECT_THAT(
      ParseNpyHeader(File("{'descr': '<i4', 'fortran_order': False, 'shape': (7,)}"))->shape,
      ElementsAre(7));
  EXPECT_EQ(
      ParseNpyHeader(File("{'descr': '<f8', 'fortran_order': False, 'shape': (0, 9)}"))->data_bytes,
      0);
}

TEST(NpyHeaderTest, WritesWhatItReads) {
  for (const NpyType type :
       {NpyType::kF2, NpyType::kF4, NpyType::kF8, NpyType::kI4, NpyType::kI1, NpyType::kU1}) {
    for (const std::vector<int64_t>& shape :
         {std::vector<int64_t>{}, {5}, {2, 3}, {0}, {1, 2, 3, 4, 5, 6, 7, 8}}) {
      const std::string bytes = MakeNpyHeader(type, shape);
      EXPECT_EQ(bytes.size() % 64, 0u);
      EXPECT_EQ(bytes.back(), '\n');
      const auto header = ParseNpyHeader(bytes);
      ASSERT_TRUE(header.ok()) << header.status();
      EXPECT_EQ(header->type, type);
      EXPECT_EQ(header->shape, shape);
      EXPECT_EQ(header->data_offset, static_cast<int64_t>(bytes.size()));
    }
  }
}

TEST(NpyHeaderTest, RefusesHostileHeaders) {
  const std::string good = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}";
  ASSERT_TRUE(ParseNpyHeader(File(good)).ok());
  const std::vector<std::string> bad = {
      "",
      "NUMPY",
      std::string("\x93NUMPY", 6),
      std::string("\x93NUMPY\x01\x00", 8),
      File(good, 3),             // unknown version
      File(good).substr(0, 30),  // shorter than its header says
      File(good + "x"),
      File(""),
      File("{"),
      File("{}"),
      File("[]"),
      File("{'descr': '>f4', 'fortran_order': False, 'shape': (1,)}"),
      File("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"),
      File("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}"),
      File("{'descr': '<f4', 'fortran_order': True, 'shape': (1,)}"),
      File("{'descr': '<f4', 'fortran_order': Falsey, 'shape': (1,)}"),
      File("{'descr': '<f4', 'fortran_order': False, 'shape': (1)}"),
      File("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"),
      File("{'descr': '<f4', 'fortran_order': False, 'shape': (1 2)}"),
      File("{'descr': '<f4', 'fortran_order': False, 'shape': (,)}"),
      File("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}"),
      File("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}"),
      File("{'descr': '<f8', 'fortran_order': False, 'shape': (2305843009213693952,)}"),
      File("{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1)}"),
      File("{'descr': '<f4', 'fortran_order': False}"),
      File("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}"),
      File("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'extra': 1}"),
      File("{'descr': '<f4, 'fortran_order': False, 'shape': (1,)}"),
      File("{'descr': '<f4' 'fortran_order': False, 'shape': (1,)}"),
      File("{'descr': __import__('os'), 'fortran_order': False, 'shape': (1,)}")};
  for (const std::string& file : bad) {
    EXPECT_EQ(ParseNpyHeader(file).status().code(), absl::StatusCode::kInvalidArgument) << file;
  }
  std::string huge("\x93NUMPY\x02\x00\xff\xff\xff\xff", 12);
  EXPECT_THAT(ParseNpyHeader(huge).status().message(), HasSubstr("4294967295"));
}

// No prefix and no single changed byte of a good header may crash or be read out of bounds.
TEST(NpyHeaderTest, SurvivesEveryTruncationAndFlip) {
  const std::string good = MakeNpyHeader(NpyType::kF4, {12, 34});
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_FALSE(ParseNpyHeader(good.substr(0, length)).ok()) << length;
  }
  int refused = 0;
  for (size_t i = 0; i < good.size(); ++i) {
    for (const char c : {'\0', '\xff', '(', '\'', '9'}) {
      std::string changed = good;
      changed[i] = c;
      refused += ParseNpyHeader(changed).ok() ? 0 : 1;
    }
  }
  EXPECT_GT(refused, 200);
}

TEST(ReadNpyTest, WantsExactlyTheData) {
  const std::string path = Path("size.npy");
  for (const int extra : {-1, 0, 1}) {
    std::ofstream(path, std::ios::binary)
        << MakeNpyHeader(NpyType::kF2, {3}) << std::string(6 + extra, 'x');
    const auto array = ReadNpy(path);
    EXPECT_EQ(array.ok(), extra == 0) << array.status();
  }
  std::filesystem::remove(path);
}

// A header that claims terabytes must be refused before memory is allocated.
TEST(ReadNpyTest, DoesNotAllocateOnAClaim) {
  const std::string path = Path("claim.npy");
  std::ofstream(path, std::ios::binary) << MakeNpyHeader(NpyType::kF8, {int64_t{1} << 50}) << "x";
  EXPECT_THAT(ReadNpy(path).status().message(), HasSubstr("got 1 bytes of data"));
  std::filesystem::remove(path);
}

TEST(ReadNpyTest, RefusesWhatIsNoFile) {
  EXPECT_EQ(ReadNpy(Path("absent")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadNpy("/tmp").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadNpy("/dev/zero").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(NpyArrayTest, DecodesEveryType) {
  const auto first = [](NpyType type, std::string bytes) {
    return NpyArray{type, {1}, std::move(bytes)}.ToDoubles()[0];
  };
  EXPECT_EQ(first(NpyType::kF2, std::string("\x00\xc0", 2)), -2);
  EXPECT_EQ(first(NpyType::kF4, std::string("\x00\x00\xc0\x3f", 4)), 1.5);
  EXPECT_EQ(first(NpyType::kF8, std::string("\x00\x00\x00\x00\x00\x00\xf8\x3f", 8)), 1.5);
  EXPECT_EQ(first(NpyType::kI4, "\xfe\xff\xff\xff"), -2);
  EXPECT_EQ(first(NpyType::kI1, "\xfe"), -2);
  EXPECT_EQ(first(NpyType::kU1, "\xfe"), 254);
}

TEST(NpyArrayTest, MapsTypesToTensors) {
  EXPECT_EQ(ToTensor({NpyType::kF2, {1}, "ab"})->dtype, v1::FP16);
  EXPECT_THAT(ToTensor({NpyType::kF8, {1}, "abcdefgh"}).status().message(), HasSubstr("float32"));
  EXPECT_THAT(NpyTypeOf(v1::BF16).status().message(), HasSubstr(".safetensors"));
  EXPECT_EQ(*NpyTypeOf(v1::FP32), NpyType::kF4);
}

}  // namespace
}  // namespace awqd::client
