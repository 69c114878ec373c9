// Every rule of the safetensors container.
#include "kernels/checkpoint/containers/safetensors.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <limits>

#include "tests/kernels/checkpoint/test_files.h"

namespace awqd::model {
namespace {

using ::awqd::testing::LittleEndian64;
using ::awqd::testing::Safetensors;
using ::awqd::testing::TempDirectory;
using ::testing::HasSubstr;

// A header with one tensor "a".
std::string One(absl::string_view dtype, absl::string_view shape, absl::string_view offsets) {
  return absl::StrCat("{\"a\":{\"dtype\":\"", dtype, "\",\"shape\":", shape,
                      ",\"data_offsets\":", offsets, "}}");
}

TEST(SafetensorsHeader, Legal) {
  struct Legal {
    std::string header;
    int64_t data;
    size_t tensors;
  };
  const std::string meta = "{\"__metadata__\":{\"format\":\"pt\"},";
  for (const Legal& c : {
           Legal{"{}", 0, 0},
           Legal{"{}   ", 0, 0},
           Legal{One("F16", "[2,3]", "[0,12]"), 12, 1},
           Legal{One("F32", "[]", "[0,4]"), 4, 1},     // rank 0
           Legal{One("F32", "[0,5]", "[0,0]"), 0, 1},  // no elements
           Legal{One("F4", "[2]", "[0,1]"), 1, 1},     // sub-byte, whole bytes
           Legal{One("I64", "[1,1,1,1,1,1,1,1]", "[0,8]"), 8, 1},
           Legal{meta + One("U8", "[1]", "[0,1]").substr(1), 1, 1},
           // Not in the order of offsets, unaligned, an empty tensor between two others.
           Legal{"{\"b\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[1,5]},"
                 "\"e\":{\"dtype\":\"I32\",\"shape\":[0],\"data_offsets\":[1,1]},"
                 "\"a\":{\"data_offsets\":[0,1],\"shape\":[1],\"dtype\":\"U8\"}}",
                 5, 3},
       }) {
    const auto tensors = ParseSafetensorsHeader(c.header, c.data);
    ASSERT_TRUE(tensors.ok()) << tensors.status() << " for " << c.header;
    EXPECT_EQ(tensors->size(), c.tensors) << c.header;
  }
}

struct Bad {
  std::string name;
  std::string header;
  int64_t data;
  std::string says;
};
void PrintTo(const Bad& bad, std::ostream* out) { *out << bad.name; }

class BadHeader : public ::testing::TestWithParam<Bad> {};

TEST_P(BadHeader, IsRefusedWithTheRule) {
  const auto tensors = ParseSafetensorsHeader(GetParam().header, GetParam().data);
  EXPECT_EQ(tensors.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(tensors.status().message()), HasSubstr(GetParam().says));
}

std::vector<Bad> BadHeaders() {
  const std::string a = "\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}";
  const auto two = [&](const std::string& b) { return absl::StrCat("{", a, ",", b, "}"); };
  const auto b_at = [&](int begin, int end) {
    return two(absl::StrCat("\"b\":{\"dtype\":\"U8\",\"shape\":[", end - begin,
                            "],\"data_offsets\":[", begin, ",", end, "]}"));
  };
  std::string deep = "{\"a\":";
  for (int i = 0; i < 10000; ++i) deep += "[";
  return {
      {"Empty", "", 0, "begin with '{'"},
      {"LeadingSpace", " {}", 0, "begin with '{'"},
      {"Array", "[]", 0, "begin with '{'"},
      {"TrailingNewline", "{}\n", 0, "end with '}'"},
      {"TrailingText", "{}x", 0, "end with '}'"},
      {"SecondDocument", "{}{}", 0, "not valid JSON"},
      {"HiddenBehindNul", std::string("{}\0}", 4), 0, "NUL byte"},
      {"NotUtf8", "{\"\xff\":{}}", 0, "UTF-8"},
      {"Unfinished", "{\"a\":}", 0, "not valid JSON"},
      {"TooDeep", deep + "}", 0, "array"},
      {"DuplicateTensor", two(a), 2, "duplicate key \"a\""},
      {"DuplicateField",
       "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1,
       "duplicate key \"dtype\""},
      {"DuplicateEscaped",
       "{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]},\"\\u0061\":{}}", 1,
       "duplicate key \"a\""},
      {"MetadataNumber", "{\"__metadata__\":{\"v\":1}}", 0, "__metadata__: key \"v\""},
      {"MetadataNested", "{\"__metadata__\":{\"v\":{}}}", 0, "__metadata__: key \"v\""},
      {"MetadataArray", "{\"__metadata__\":[]}", 0, "expected an object"},
      {"MetadataText", "{\"__metadata__\":\"x\"}", 0, "expected an object"},
      {"TensorNotObject", "{\"a\":3}", 0, "tensor \"a\": got a plain value, expected an object"},
      {"UnknownKey", "{\"a\":{\"offsets\":[0,1]}}", 1, "tensor \"a\": got key \"offsets\""},
      {"NoDtype", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "got no dtype"},
      {"NoShape", "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "got no shape"},
      {"NoOffsets", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "got no data_offsets"},
      {"UnknownDtype", One("Q4", "[1]", "[0,1]"), 1, "dtype: got \"Q4\""},
      {"DtypeNumber", "{\"a\":{\"dtype\":8}}", 0, "tensor \"a\": dtype: got"},
      {"ShapeText", One("U8", "\"1\"", "[0,1]"), 1, "shape: got a plain value, expected an array"},
      {"ShapeNegative", One("U8", "[-1]", "[0,1]"), 1, "shape: expected whole numbers"},
      {"ShapeFloat", One("U8", "[1.0]", "[0,1]"), 1, "shape: expected whole numbers"},
      {"ShapeExponent", One("U8", "[1e0]", "[0,1]"), 1, "shape: expected whole numbers"},
      {"ShapeTwoTo63", One("U8", "[9223372036854775808]", "[0,1]"), 1, "shape: expected whole"},
      {"ShapeTwoTo64", One("U8", "[18446744073709551616]", "[0,1]"), 1, "shape: expected whole"},
      {"ShapeNested", One("U8", "[[1]]", "[0,1]"), 1, "expected an array of whole numbers"},
      {"RankNine", One("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, "more than 8"},
      {"ProductOverflows", One("U8", "[4294967296,4294967296]", "[0,1]"), 1, "overflows"},
      {"BitsOverflow", One("F64", "[1152921504606846976]", "[0,1]"), 1, "overflows"},
      {"HalfAByte", One("F4", "[3]", "[0,1]"), 1, "whole number of bytes"},
      {"OneByteShort", One("F16", "[2,3]", "[0,11]"), 11, "expected 12 bytes for F16 [2, 3]"},
      {"OneByteLong", One("F16", "[2,3]", "[0,13]"), 13, "expected 12 bytes"},
      {"EndBeforeBegin", One("U8", "[0]", "[1,0]"), 1, "data_offsets: got [1, 0]"},
      {"OneOffset", One("U8", "[1]", "[1]"), 1, "got 1 numbers, expected 2"},
      {"ThreeOffsets", One("U8", "[1]", "[0,1,2]"), 1, "got 3 numbers, expected 2"},
      {"NotFromZero", One("U8", "[1]", "[1,2]"), 2, "got begin 1, expected 0 (leaves a hole"},
      {"Hole", b_at(3, 4), 4, "tensor \"b\": data_offsets: got begin 3, expected 2 (leaves a hole"},
      {"Overlap", b_at(1, 3), 3, "tensor \"b\": data_offsets: got begin 1, expected 2 (overlaps"},
      {"SameBytesTwice", b_at(0, 2), 2, "(overlaps another tensor)"},
      {"PastTheEnd", b_at(2, 9), 4, "tensor \"b\": data_offsets: got end 9, expected at most 4"},
      {"BytesLeftOver", b_at(2, 4), 5, "cover 4 of 5 bytes"},
      {"NoTensorsButBytes", "{}", 1, "cover 0 of 1 bytes"},
  };
}

INSTANTIATE_TEST_SUITE_P(All, BadHeader, ::testing::ValuesIn(BadHeaders()),
                         [](const auto& info) { return info.param.name; });

TEST(SafetensorsHeader, Caps) {
  SafetensorsLimits limits;
  limits.max_tensors = 1;
  limits.max_name_bytes = 3;
  const std::string one = "{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}";
  const auto many =
      ParseSafetensorsHeader(absl::StrCat("{\"a\":", one, ",\"b\":", one, "}"), 0, limits);
  EXPECT_THAT(std::string(many.status().message()), HasSubstr("more than 1 tensors"));
  const auto name = ParseSafetensorsHeader(absl::StrCat("{\"abcd\":", one, "}"), 0, limits);
  EXPECT_THAT(std::string(name.status().message()),
              HasSubstr("name: got 4 bytes, expected at most 3"));
}

class SafetensorsFiles : public ::testing::Test {
 protected:
  absl::StatusOr<TensorFile> Open(absl::string_view bytes, const SafetensorsLimits& limits = {}) {
    directory_.Write("x.safetensors", bytes);
    const std::string path = directory_.At("x.safetensors");
    absl::StatusOr<File> file =
        File::Adopt(UniqueFd(open(path.c_str(), O_RDONLY | O_CLOEXEC)), "m/x.safetensors");
    if (!file.ok()) return file.status();
    return OpenSafetensors(*std::move(file), limits);
  }
  void ExpectRefused(absl::string_view bytes, const std::string& says) {
    const auto file = Open(bytes);
    EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(file.status().message()),
                ::testing::AllOf(HasSubstr("m/x.safetensors: "), HasSubstr(says)));
  }
  TempDirectory directory_;
};

TEST_F(SafetensorsFiles, ReadsUnalignedTensors) {
  const auto file =
      Open(Safetensors("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                       "\"b\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[1,5]}}",
                       "\x01wxyz"));
  ASSERT_TRUE(file.ok()) << file.status();
  std::string bytes(4, 0);
  ASSERT_TRUE(file->Read(file->tensors().at("b"),
                         absl::MakeSpan(reinterpret_cast<uint8_t*>(bytes.data()), 4))
                  .ok());
  EXPECT_EQ(bytes, "wxyz");
}

TEST_F(SafetensorsFiles, LengthsThatCannotBe) {
  ExpectRefused("", "got 0 bytes, expected at least 8");
  ExpectRefused("1234567", "got 7 bytes, expected at least 8");
  ExpectRefused(LittleEndian64(3) + "{}", "header length: got 3 bytes, expected at most 2");
  ExpectRefused(LittleEndian64(std::numeric_limits<uint64_t>::max()) + "{}",
                "header length: got 18446744073709551615");
  ExpectRefused(LittleEndian64(uint64_t{1} << 63) + "{}", "header length");
  ExpectRefused(LittleEndian64(std::numeric_limits<uint64_t>::max() - 7) + "{}", "header length");
  ExpectRefused(LittleEndian64(0) + "{}", "begin with '{'");
}

TEST_F(SafetensorsFiles, HeaderCap) {
  SafetensorsLimits limits;
  limits.max_header_bytes = 3;
  const auto file = Open(Safetensors("{}  ", ""), limits);
  EXPECT_THAT(std::string(file.status().message()),
              HasSubstr("header length: got 4 bytes, expected at most 3"));
  EXPECT_EQ(SafetensorsLimits().max_header_bytes, 100'000'000);
}

TEST_F(SafetensorsFiles, ShorterThanItsHeaderSays) {
  ExpectRefused(Safetensors(One("U8", "[9]", "[0,9]"), "12345678"),
                "got end 9, expected at most 8");
}

TEST_F(SafetensorsFiles, TruncatedAfterOpen) {
  const auto file = Open(Safetensors(One("U8", "[9]", "[0,9]"), "123456789"));
  ASSERT_TRUE(file.ok()) << file.status();
  const std::string path = directory_.At("x.safetensors");
  ASSERT_EQ(truncate(path.c_str(), file->file().size() - 4), 0);
  std::vector<uint8_t> bytes(9);
  const absl::Status read = file->Read(file->tensors().at("a"), absl::MakeSpan(bytes));
  EXPECT_EQ(read.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(read.message()), HasSubstr("end of file"));
  EXPECT_THAT(std::string(file->file().CheckUnchanged().message()),
              HasSubstr("changed while it was loaded"));
}

TEST_F(SafetensorsFiles, WrongBufferIsOurFault) {
  const auto file = Open(Safetensors(One("U8", "[2]", "[0,2]"), "12"));
  std::vector<uint8_t> bytes(3);
  EXPECT_EQ(file->Read(file->tensors().at("a"), absl::MakeSpan(bytes)).code(),
            absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace awqd::model
