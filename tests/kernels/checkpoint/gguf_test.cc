// Every rule of the GGUF container.
#include "kernels/checkpoint/containers/gguf.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/checkpoint/containers/gguf_input.h"
#include "tests/kernels/checkpoint/gguf_bytes.h"
#include "tests/kernels/checkpoint/test_files.h"

namespace awqd::model {
namespace {

using ::awqd::testing::GgufArray;
using ::awqd::testing::GgufBytes;
using ::awqd::testing::GgufKey;
using ::awqd::testing::GgufTensor;
using ::awqd::testing::GgufText;
using ::awqd::testing::LittleEndian;
using ::awqd::testing::TempDirectory;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();

class GgufTest : public ::testing::Test {
 protected:
  absl::StatusOr<GgufFile> Open(absl::string_view bytes, const GgufLimits& limits = {}) {
    directory_.Write("x.gguf", bytes);
    const std::string path = directory_.At("x.gguf");
    absl::StatusOr<File> file =
        File::Adopt(UniqueFd(open(path.c_str(), O_RDONLY | O_CLOEXEC)), "m/x.gguf");
    if (!file.ok()) return file.status();
    return OpenGguf(*std::move(file), limits);
  }
  void ExpectRefused(absl::string_view bytes, const std::string& says,
                     const GgufLimits& limits = {}) {
    const auto file = Open(bytes, limits);
    EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument) << says;
    EXPECT_THAT(std::string(file.status().message()),
                AllOf(HasSubstr("m/x.gguf: "), HasSubstr(says)));
  }
  TempDirectory directory_;
};

TEST_F(GgufTest, ReadsTensorsAndSkipsMetadata) {
  GgufBytes bytes;
  const std::string strings = GgufArray(8, 2, GgufText("a") + GgufText(""));
  for (const std::string& key : {
           GgufKey("u8", 0, "x"),
           GgufKey("f64", 12, "12345678"),
           GgufKey("flag", 7, "\x01"),
           GgufKey("tokens", 9, strings),
           GgufKey("scores", 9, GgufArray(6, 3, std::string(12, 'x'))),
           GgufKey("nested", 9, GgufArray(9, 2, strings + GgufArray(0, 0, ""))),
           GgufKey("split.count", 2, LittleEndian(1, 2)),
           GgufKey(std::string(70'000 - 8000, 'k'), 8, GgufText(std::string(100'000, 'v'))),
           GgufKey("general.alignment", 4, LittleEndian(64, 4)),
       }) {
    bytes.keys.push_back(key);
  }
  bytes.alignment = 64;
  bytes.tensors.push_back({"a.bias", {2}, 0, 64});
  bytes.tensors.push_back({"scalar", {}, 1, 128});
  bytes.data = absl::StrCat(std::string(64, 'a'), std::string(64, 'b'), "cd");
  for (const uint32_t version : {2, 3}) {
    bytes.version = version;
    const auto file = Open(bytes.File());
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->architecture, "llama");
    const TensorMap& tensors = file->tensors.tensors();
    ASSERT_EQ(tensors.size(), 3u);
    EXPECT_EQ(tensors.at("a.weight").dtype, "Q4_0");
    EXPECT_THAT(tensors.at("a.weight").shape, ElementsAre(2, 32));
    EXPECT_EQ(tensors.at("a.weight").bytes(), 36);
    EXPECT_EQ(tensors.at("a.bias").dtype, "F32");
    EXPECT_TRUE(tensors.at("scalar").shape.empty());
    std::vector<uint8_t> read(2);
    ASSERT_TRUE(file->tensors.Read(tensors.at("scalar"), absl::MakeSpan(read)).ok());
    EXPECT_THAT(read, ElementsAre('c', 'd'));
  }
}

TEST_F(GgufTest, TypesThatAreNotKnownHaveNoBytes) {
  GgufBytes bytes;
  bytes.tensors.push_back({"b", {7, 7, 7, 7}, 99, 64});
  bytes.data.resize(64);
  const auto file = Open(bytes.File());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors.tensors().at("b").dtype, "type 99");
  EXPECT_EQ(file->tensors.tensors().at("b").bytes(), 0);
}

// Blocks of 64 in 18 bytes, or of 128 in 34.
TEST_F(GgufTest, WhichBlocksOfQ2IsWhatTheFileHasRoomFor) {
  GgufBytes bytes;
  bytes.tensors = {{"a", {128, 1}, 42, 0}};
  for (const auto& [size, dtype] : {std::pair(36, "Q2_0"), std::pair(34, "Q2_0_G128")}) {
    bytes.data.resize(size);
    const auto file = Open(bytes.File());
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->tensors.tensors().at("a").dtype, dtype);
    EXPECT_EQ(file->tensors.tensors().at("a").bytes(), size);
  }
  bytes.data.resize(33);
  ExpectRefused(bytes.File(), "got bytes 0 to 36 of the data, expected at most 33 (truncated?)");
  bytes.tensors = {{"a", {192, 1}, 42, 0}};
  bytes.data.resize(53);
  ExpectRefused(bytes.File(), "got bytes 0 to 54 of the data, expected at most 53 (truncated?)");
}

TEST_F(GgufTest, NoArchitectureAndNoTensors) {
  const auto file = Open(GgufBytes{.keys = {}, .tensors = {}, .data = ""}.Header());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->architecture, "");
  EXPECT_TRUE(file->tensors.tensors().empty());
}

struct Bad {
  std::string name;
  std::function<void(GgufBytes*)> spoil;
  std::string says;
};

// Sets another value of a key of the metadata.
std::function<void(GgufBytes*)> Key(const std::string& key, uint32_t type, std::string value) {
  return [=](GgufBytes* b) { b->keys.push_back(GgufKey(key, type, value)); };
}
std::function<void(GgufBytes*)> Tensor(GgufTensor tensor) {
  return [=](GgufBytes* b) { b->tensors = {tensor}; };
}
std::function<void(GgufBytes*)> SecondTensor(GgufTensor tensor) {
  return [=](GgufBytes* b) { b->tensors.push_back(tensor); };
}

TEST_F(GgufTest, Refusals) {
  std::string deep = GgufArray(0, 0, "");
  for (int i = 0; i < 4; ++i) deep = GgufArray(9, 1, deep);
  const std::vector<Bad> all = {
      {"magic", [](GgufBytes* b) { b->magic = "GGML"; }, "got no \"GGUF\" at its beginning"},
      {"version 1", [](GgufBytes* b) { b->version = 1; }, "version: got 1, expected 2 or 3"},
      {"version 4", [](GgufBytes* b) { b->version = 4; }, "version: got 4, expected 2 or 3"},
      {"big endian", [](GgufBytes* b) { b->version = 3 << 24; }, "big-endian files are not read"},
      {"tensors", [](GgufBytes* b) { b->tensor_count = kHuge; },
       "count of tensors: got 18446744073709551615, expected at most"},
      {"keys", [](GgufBytes* b) { b->key_count = kHuge; },
       "count of metadata: got 18446744073709551615, expected at most"},
      {"one key more", [](GgufBytes* b) { b->key_count = 2; }, "name of tensor 0: got"},
      {"type of a value", Key("k", 13, ""), "metadata \"k\": got type 13, expected 0 to 12"},
      {"long key", [](GgufBytes* b) { b->keys[0] = LittleEndian(kHuge, 8); },
       "key 0: got 18446744073709551615 bytes"},
      {"string", Key("k", 8, LittleEndian(kHuge, 8)), "string: got 18446744073709551615 bytes"},
      {"array", Key("k", 9, GgufArray(10, kHuge / 8, "")),
       "array: got 2305843009213693951 values, expected at most"},
      {"array of arrays", Key("k", 9, GgufArray(9, kHuge, "")), "values, expected at most"},
      {"array of strings", Key("k", 9, GgufArray(8, kHuge, "")), "values, expected at most"},
      {"array's type", Key("k", 9, GgufArray(13, 1, "")), "got an array of type 13"},
      {"deep", Key("k", 9, deep), "got arrays nested deeper than 4, the limit"},
      {"alignment 0", Key("general.alignment", 4, LittleEndian(0, 4)),
       "metadata \"general.alignment\": got 0, expected a power of two from 8 to 1048576"},
      {"alignment 48", Key("general.alignment", 4, LittleEndian(48, 4)), "got 48, expected"},
      {"alignment 4", Key("general.alignment", 4, LittleEndian(4, 4)), "got 4, expected"},
      {"alignment 2^31", Key("general.alignment", 4, LittleEndian(1u << 31, 4)), "got 2147483648"},
      {"alignment's type", Key("general.alignment", 10, LittleEndian(32, 8)),
       "got type 10, expected 4 (UINT32)"},
      {"alignment twice",
       [](GgufBytes* b) {
         b->keys.assign(2, GgufKey("general.alignment", 4, LittleEndian(32, 4)));
       },
       "occurs twice"},
      {"architecture twice", Key("general.architecture", 8, GgufText("x")), "occurs twice"},
      {"architecture's type",
       [](GgufBytes* b) { b->keys = {GgufKey("general.architecture", 4, "1234")}; },
       "got type 4, expected 8 (STRING)"},
      {"long architecture",
       [](GgufBytes* b) {
         b->keys = {GgufKey("general.architecture", 8, GgufText(std::string(65, 'x')))};
       },
       "got 65 bytes, expected at most 64"},
      {"no UTF-8",
       [](GgufBytes* b) { b->keys = {GgufKey("general.architecture", 8, GgufText("\xff"))}; },
       "\"general.architecture\": expected UTF-8"},
      {"long name", Tensor({std::string(1025, 'n')}), "name of tensor 0: got 1025 bytes"},
      {"name's UTF-8", Tensor({"a\xc0\xaf"}), "tensor \"a\\xc0\\xaf\": name: expected UTF-8"},
      {"rank", Tensor({.dims = {32, 1, 1, 1, 1}}), "got 5 dimensions, expected at most 4"},
      {"dimension 0", Tensor({.dims = {32, 0}}), "dimension 1: got 0, expected 1 to 2^63 - 1"},
      {"dimension", Tensor({.dims = {kHuge}}), "dimension 0: got 18446744073709551615"},
      {"overflow", Tensor({.dims = {1u << 31, 1u << 31, 1u << 31}}), "which overflows"},
      {"bytes overflow", Tensor({.dims = {kHuge / 2 - 31}, .type = 28}), "which overflows"},
      {"blocks", Tensor({.dims = {48, 2}}),
       "tensor \"a.weight\": shape: got [2, 48], expected the last a multiple of 32 (Q4_0)"},
      {"super-blocks", Tensor({.dims = {128, 2}, .type = 12}), "a multiple of 256 (Q4_K)"},
      {"unaligned", Tensor({.offset = 16}), "offset: got 16, expected a multiple of 32"},
      {"offset", Tensor({.offset = kHuge - 31}), "offset: got 18446744073709551584"},
      {"offset and bytes", Tensor({.offset = kHuge / 2 - 31}), "and 36 bytes, which overflow"},
      {"beyond", Tensor({.offset = 32}),
       "got bytes 32 to 68 of the data, expected at most 36 (truncated?)"},
      {"beyond, not known", Tensor({.type = 99, .offset = 64}), "got bytes 64 to 64"},
      {"overlap", SecondTensor({"b", {1}, 0, 32}),
       "tensor \"b\": offset: got 32, expected at least 36 (overlaps another tensor)"},
      {"twice", SecondTensor({}), "tensor \"a.weight\": occurs twice"},
      {"no data", [](GgufBytes* b) { b->data.clear(); }, "expected at most 0 (truncated?)"},
  };
  for (const Bad& bad : all) {
    SCOPED_TRACE(bad.name);
    GgufBytes bytes;
    ASSERT_TRUE(Open(bytes.File()).ok());
    bad.spoil(&bytes);
    ExpectRefused(bytes.File(), bad.says);
  }
}

TEST_F(GgufTest, EndsAnywhere) {
  GgufBytes bytes;
  bytes.keys.push_back(GgufKey("k", 9, GgufArray(8, 1, GgufText("t"))));
  const std::string whole = bytes.File();
  ASSERT_TRUE(Open(whole).ok());
  for (size_t size = 0; size < whole.size(); ++size) ExpectRefused(whole.substr(0, size), ": ");
}

TEST_F(GgufTest, Limits) {
  const GgufBytes bytes;
  const auto header = static_cast<int64_t>(bytes.Header().size());
  ASSERT_TRUE(Open(bytes.File(), {.max_header_bytes = header}).ok());
  ExpectRefused(bytes.File(), "(too much before the data)", {.max_header_bytes = header - 1});
  ExpectRefused(bytes.File(), "count of tensors: got 1, expected at most 0", {.max_tensors = 0});
  ExpectRefused(bytes.File(), "key 0: got 20 bytes, expected at most 19", {.max_key_bytes = 19});
  EXPECT_EQ(GgufLimits().max_header_bytes, 100'000'000);
}

TEST(IsUtf8, OverlongFormsSurrogatesAndNulAreNot) {
  for (const char* text :
       {"", "a.b", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_TRUE(IsUtf8(text)) << text;
  }
  for (const absl::string_view text :
       {"\x80", "\xc3", "\xc3(", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80", "\xf0\x80\x80\xaf",
        "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80", "\xff", "\xe2\x82"}) {
    EXPECT_FALSE(IsUtf8(text)) << absl::CHexEscape(text);
  }
  EXPECT_FALSE(IsUtf8(absl::string_view("a\0b", 3)));
}

}  // namespace
}  // namespace awqd::model
