// ParseProduct: every encoding of a request means the same as to the generated parser, in pieces of
// any size, and the payload is referenced rather than copied.
#include "server/wire/matmul_wire.h"

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/requests.h"
#include "tests/server/wire/wire_check.h"
#include "tests/testing/repeated.h"

namespace awqd::wire {
namespace {

std::string Varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
  return out;
}

// A length-delimited field.
std::string Bytes(int number, const std::string& contents) {
  return Varint(static_cast<uint64_t>(number) << 3 | 2) + Varint(contents.size()) + contents;
}

std::string Raw(const std::string& contents) {
  return Bytes(v1::Tensor::kRawFieldNumber, contents);
}
std::string Activations(const std::string& contents) {
  return Bytes(v1::QuantizedMatmulRequest::kActivationsFieldNumber, contents);
}

// floats {values: 1}
const std::string kFloats("\x22\x06\x0a\x04\x00\x00\x80\x3f", 8);

// Parses, compares with the generated parser in several splits, and returns the payload.
std::optional<std::string> CutOf(const std::string& bytes) {
  for (uint32_t seed = 0; seed < 20; ++seed) EXPECT_EQ(WireDifference(bytes, seed), "");
  ParsedRequest<v1::QuantizedMatmulRequest> message;
  const absl::string_view piece = bytes;
  EXPECT_TRUE(ParseProduct({&piece, 1}, &message));
  if (!message.cut) return std::nullopt;
  return bytes.substr(message.cut->begin, message.cut->size);
}

TEST(MatmulWire, CutsThePayloadOutOfAnOrdinaryRequest) {
  v1::QuantizedMatmulRequest request = GoodMatmul(20);
  for (char& c : *request.mutable_activations()->mutable_raw()) c = 'p';
  request.set_request_id("id");
  EXPECT_EQ(CutOf(request.SerializeAsString()), request.activations().raw());
}

TEST(MatmulWire, FieldsComeInAnyOrder) {
  v1::QuantizedMatmulRequest rest = GoodMatmul();
  rest.clear_activations();
  const std::string head = rest.SerializeAsString();
  const std::string tensor = "\x08\x01\x12\x02\x01\x02";  // FP16 [1, 2]
  EXPECT_EQ(CutOf(Activations(Raw("abcd") + tensor) + head), "abcd");
  EXPECT_EQ(CutOf(head + Activations(tensor + Raw("abcd"))), "abcd");
}

TEST(MatmulWire, TheLastOccurrenceWinsAndTheOthersMerge) {
  EXPECT_EQ(CutOf(Activations(Raw("first") + Raw("second"))), "second");
  EXPECT_EQ(CutOf(Activations(Raw("first")) + Activations(Raw("second"))), "second");
  EXPECT_EQ(CutOf(Activations(Raw("first")) + Activations("\x08\x01")), "first");
  EXPECT_EQ(CutOf(Activations(Raw("first") + Raw(""))), "");
}

TEST(MatmulWire, TheOneofGoesToItsLastMember) {
  EXPECT_EQ(CutOf(Activations(Raw("abcd") + kFloats)), std::nullopt);
  EXPECT_EQ(CutOf(Activations(Raw("abcd")) + Activations(kFloats)), std::nullopt);
  EXPECT_EQ(CutOf(Activations(kFloats + Raw("abcd"))), "abcd");
  EXPECT_EQ(CutOf(Activations(kFloats) + Activations(Raw("x") + kFloats + Raw("y"))), "y");
}

TEST(MatmulWire, OnlyTheActivationsAreCut) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  *request.mutable_bias() = RawTensor(v1::FP16, {3}, 6);
  *request.mutable_packed() = GoodPacked();
  EXPECT_EQ(CutOf(request.SerializeAsString()), request.activations().raw());
  request.clear_activations();
  EXPECT_EQ(CutOf(request.SerializeAsString()), std::nullopt);
  EXPECT_EQ(CutOf(""), std::nullopt);
}

TEST(MatmulWire, UnusualSpellingsMeanTheSame) {
  const std::string unknown = Bytes(100, Raw("no payload")) + "\xa8\x06\x05";  // bytes and a varint
  EXPECT_EQ(CutOf(unknown + Activations(unknown + Raw("abcd") + unknown) + unknown), "abcd");
  // Lengths and tags may be encoded longer than necessary.
  EXPECT_EQ(CutOf(std::string("\x9a\x00\x88\x00\x1a\x84\x80\x00", 8) + "abcd"), "abcd");
  // The bits of a tag past 32 are dropped.
  EXPECT_EQ(CutOf(absl::StrCat("\x9a\x80\x80\x80\x70", "\x06", Raw("abcd"))), "abcd");
  // The wrong wire type makes known fields unknown.
  EXPECT_EQ(CutOf(absl::StrCat("\x18\x05", Activations(absl::StrCat("\x18\x05", Raw("abcd"))))),
            "abcd");
  // More occurrences than the parser keeps.
  std::string many;
  for (int i = 0; i < 100; ++i) many += Activations(Raw("x"));
  EXPECT_EQ(CutOf(many), std::nullopt);
}

bool Parses(const std::string& bytes) {
  for (uint32_t seed = 0; seed < 20; ++seed) EXPECT_EQ(WireDifference(bytes, seed), "");
  ParsedRequest<v1::QuantizedMatmulRequest> message;
  const absl::string_view piece = bytes;
  return ParseProduct({&piece, 1}, &message);
}

TEST(MatmulWire, GroupsAreRefusedWhereTheParserWouldMeetThem) {
  const std::string group = "\x7b\x7c";
  const auto packed = [](const std::string& qweight) { return Bytes(2, Bytes(3, qweight)); };
  for (const std::string& bytes :
       {group, Activations(group), Activations(Raw("abcd") + group), Activations(Bytes(4, group)),
        Bytes(1, group), packed(group), packed(Bytes(5, group)), Bytes(4, group), Bytes(10, group),
        std::string("\x1b\x1c"), Activations(Raw("abcd")) + "\xab\x06\x0a\x01x\xac\x06"}) {
    EXPECT_FALSE(Parses(bytes)) << ::testing::PrintToString(bytes);
    v1::QuantizedMatmulRequest request;
    EXPECT_TRUE(request.ParseFromString(bytes)) << ::testing::PrintToString(bytes);
    const absl::string_view piece = bytes;
    EXPECT_FALSE(ScanFields({&piece, 1}, *request.GetDescriptor()).passes);
  }
  // Bytes that are not parsed as fields.
  EXPECT_TRUE(Parses(Activations(Raw(group)) + Bytes(8, group) + Bytes(100, group)));
}

TEST(MatmulWire, FieldsAreCountedAndPackedValuesAreNot) {
  const auto unknown = [](int n) {
    std::string bytes;
    for (int i = 0; i < n; ++i) bytes += "\x78\x01";
    return bytes;
  };
  EXPECT_TRUE(Parses(unknown(kMaxFields)));
  EXPECT_FALSE(Parses(unknown(kMaxFields + 1)));
  EXPECT_TRUE(Parses(Activations(unknown(kMaxFields / 2)) + unknown(kMaxFields / 2 - 1)));
  EXPECT_FALSE(Parses(Activations(unknown(kMaxFields / 2)) + unknown(kMaxFields / 2)));
  v1::QuantizedMatmulRequest request = GoodMatmul();
  Repeat(100000, 1.0f, request.mutable_activations()->mutable_floats()->mutable_values());
  EXPECT_TRUE(Parses(request.SerializeAsString()));
}

// PackedGatedMlp may hold another one.
TEST(MatmulWire, MessagesInEachOtherAreBounded) {
  const auto passes = [](int levels) {
    v1::GatedMlpRequest request;
    v1::PackedGatedMlp* mlp = request.mutable_packed();
    for (int level = 1; level < levels; ++level) mlp = mlp->mutable_shared_expert();
    const std::string bytes = request.SerializeAsString();
    const absl::string_view piece = bytes;
    return ScanFields({&piece, 1}, *request.GetDescriptor()).passes;
  };
  EXPECT_TRUE(passes(2));
  EXPECT_TRUE(passes(kMaxDepth));
  EXPECT_FALSE(passes(kMaxDepth + 1));
  EXPECT_FALSE(passes(2000));
}

TEST(MatmulWire, DimensionsCountAsFieldsAndAreNotRead) {
  const auto shape = [](const std::string& dims) { return Activations(Bytes(2, dims)); };
  EXPECT_TRUE(Parses(shape(std::string(9, '\x01')))) << "the check of tensors has the better words";
  EXPECT_TRUE(Parses(shape(std::string(kMaxFields - 2, '\x01'))));
  EXPECT_FALSE(Parses(shape(std::string(kMaxFields - 1, '\x01'))));
  EXPECT_FALSE(Parses(shape(std::string(kMaxFields, '\x01')) + Raw("abcd")));
  const std::string huge = shape(std::string(1 << 20, '\x01'));
  const absl::string_view piece = huge;
  const FieldScan scan = ScanFields({&piece, 1}, *v1::QuantizedMatmulRequest::descriptor());
  EXPECT_FALSE(scan.passes);
  EXPECT_EQ(scan.crowded_field, "activations.shape");
  EXPECT_EQ(scan.crowded_bytes, 1 << 20);
}

int64_t ParsedBytesOf(const v1::QuantizedMatmulRequest& request, bool cuts) {
  const std::string bytes = request.SerializeAsString();
  const std::vector<absl::string_view> pieces = InPieces(bytes, 7);
  const FieldScan scan = ScanFields(pieces, *v1::QuantizedMatmulRequest::descriptor(),
                                    cuts ? kActivationsRaw : PayloadPlace{});
  EXPECT_TRUE(scan.passes);
  return scan.parsed_bytes;
}

TEST(MatmulWire, WhatIsParsedIsCountedAsItWillLieInMemory) {
  constexpr int kValues = 100000;
  v1::QuantizedMatmulRequest raw = GoodMatmul(1000);
  EXPECT_LT(ParsedBytesOf(raw, true), 1000) << "activations stay where they are";
  EXPECT_GE(ParsedBytesOf(raw, false), 256000);
  v1::QuantizedMatmulRequest floats = GoodMatmul();
  Repeat(kValues, 1.0f, floats.mutable_activations()->mutable_floats()->mutable_values());
  EXPECT_NEAR(ParsedBytesOf(floats, true), 4 * kValues, 1000);
  v1::QuantizedMatmulRequest ints = GoodMatmul();
  v1::Tensor& qweight = *ints.mutable_packed()->mutable_qweight();
  for (const int64_t value : {int64_t{1}, int64_t{-1}}) {  // encoded in one byte, and in ten
    Repeat(kValues, value, qweight.mutable_ints()->mutable_values());
    const int64_t counted = ParsedBytesOf(ints, true);
    EXPECT_GE(counted, 8 * kValues);
    EXPECT_LE(counted, 16 * kValues + 1000);
  }
}

// An inline weight of any format has maps, whose entries the parser sees as messages.
TEST(MatmulWire, EntriesOfMapsCountAsFields) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  v1::PackedWeight& packed = *request.mutable_packed();
  packed.set_format("plain");
  (*packed.mutable_settings())["symmetric"] = std::string("true");
  (*packed.mutable_tensors())["codes"] = RawTensor(v1::UINT8, {128, 16}, 2048);
  (*packed.mutable_tensors())["scales"] = RawTensor(v1::FP16, {1, 16}, 32);
  EXPECT_EQ(CutOf(request.SerializeAsString()), request.activations().raw());
  const auto in_packed = [](const std::string& contents) {
    return Bytes(v1::QuantizedMatmulRequest::kPackedFieldNumber, contents);
  };
  constexpr int kSettings = v1::PackedWeight::kSettingsFieldNumber;
  std::string entries;
  for (int i = 0; i < kMaxFields; ++i) entries += Bytes(kSettings, "");
  EXPECT_FALSE(Parses(in_packed(entries)));
  EXPECT_TRUE(Parses(in_packed(entries.substr(0, entries.size() / 2))));
  const std::string group = "\x1b\x1c";  // for field 3, in an entry and in an entry's tensor
  EXPECT_FALSE(Parses(in_packed(Bytes(kSettings, group))));
  EXPECT_FALSE(Parses(in_packed(
      Bytes(v1::PackedWeight::kTensorsFieldNumber, Bytes(1, "codes") + Bytes(2, group)))));
}

TEST(MatmulWire, LongHeadsAreParsedInPieces) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  *request.mutable_packed() = GoodPacked();
  request.mutable_packed()->mutable_qweight()->set_raw(std::string(100000, 'q'));
  EXPECT_EQ(CutOf(request.SerializeAsString()), request.activations().raw());
}

TEST(MatmulWire, GarbageIsRefused) {
  const std::string good = Activations(Raw("abcd"));
  for (const std::string& bytes :
       {good.substr(0, good.size() - 1), good.substr(0, 1), std::string("\x1a\xff"),
        std::string("\x1a\x7f\x01"), std::string(100, '\x0b'), std::string(20, '\xff'),
        Activations("\x1a\x05"
                    "abcd"),                      // a payload that ends after its tensor
        Activations("\x1a\xff\xff\xff\xff\x0f"),  // a length of 4 GiB
        Activations("\x1a\xff\xff\xff\xff\xff\x01"),
        std::string("\x42\x02\xc3\x28"),  // a request_id that is not UTF-8
        good + "\x42\x02\xc3\x28", good + std::string("\x00", 1), good + "\x0c"}) {
    for (uint32_t seed = 0; seed < 20; ++seed) {
      EXPECT_EQ(WireDifference(bytes, seed), "");
      const std::vector<absl::string_view> pieces = InPieces(bytes, seed);
      ParsedRequest<v1::QuantizedMatmulRequest> message;
      EXPECT_FALSE(ParseProduct(pieces, &message)) << ::testing::PrintToString(bytes);
    }
  }
}

class RandomMessages {
 public:
  explicit RandomMessages(uint32_t seed) : random_(seed) {}

  std::string Next() {
    std::string bytes;
    for (int fields = Pick(6); fields > 0; --fields) bytes += Field();
    for (int spoils = Pick(4) == 0 ? Pick(3) : 0; spoils > 0 && !bytes.empty(); --spoils) {
      const int at = Pick(static_cast<int>(bytes.size()));
      if (Pick(3) == 0)
        bytes.resize(at);
      else
        bytes[at] = static_cast<char>(Pick(256));
    }
    return bytes;
  }

 private:
  int Pick(int n) { return static_cast<int>(random_() % n); }

  std::string Noise(int size) {
    std::string out(size, '\0');
    for (char& c : out) c = static_cast<char>(random_());
    return out;
  }

  std::string Tensor() {
    std::string out;
    for (int fields = Pick(5); fields > 0; --fields) {
      const std::string choices[] = {Raw(Noise(Pick(200))),
                                     Raw(Noise(Pick(5))),
                                     kFloats,
                                     "\x2a\x03\x0a\x01\x05",
                                     "\x08\x02",
                                     "\x12\x02\x01\x02",
                                     "\x10\x07",
                                     Bytes(9, Noise(3)),
                                     "\x4b\x10\x01\x4c"};
      out += choices[Pick(9)];
    }
    return out;
  }

  std::string Field() {
    const std::string choices[] = {Activations(Tensor()),
                                   Activations(Tensor()),
                                   Activations(Tensor()),
                                   Bytes(4, Tensor()),
                                   Bytes(1, Bytes(1, "model") + Bytes(2, "weight")),
                                   Bytes(2, Bytes(3, Tensor()) + "\x08\x04"),
                                   "\x28\x02",
                                   "\x30\x01",
                                   "\x38\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
                                   Bytes(8, "request"),
                                   Bytes(77, Noise(4)),
                                   absl::StrCat("\xa5\x06", Noise(4)),
                                   absl::StrCat("\xa1\x06", Noise(8)),
                                   absl::StrCat("\x53", Activations(Tensor()), "\x54")};
    return choices[Pick(14)];
  }

  std::mt19937 random_;
};

TEST(MatmulWire, AgreesWithTheGeneratedParserOnRandomMessages) {
  RandomMessages messages(7);
  int parsed = 0, cut = 0;
  for (uint32_t i = 0; i < 35000; ++i) {
    const std::string bytes = messages.Next();
    ASSERT_EQ(WireDifference(bytes, i), "") << i << ": " << ::testing::PrintToString(bytes);
    ParsedRequest<v1::QuantizedMatmulRequest> message;
    const absl::string_view piece = bytes;
    if (!ParseProduct({&piece, 1}, &message)) continue;
    ++parsed;
    cut += message.cut.has_value();
  }
  EXPECT_GT(parsed, 20000);
  EXPECT_GT(cut, 2000);
  EXPECT_LT(parsed, 35000);
}

std::string PeekRequestId(Pieces pieces) {
  return PeekString(pieces, v1::QuantizedMatmulRequest::kRequestIdFieldNumber, kMaxPeekedIdBytes);
}

TEST(MatmulWire, FindsTheIdOfAMessageThatIsNotParsed) {
  v1::QuantizedMatmulRequest request = GoodMatmul(20);
  for (const std::string& id :
       {std::string(), std::string("id"), std::string(128, 'x'), std::string(256, 'y')}) {
    request.set_request_id(id);
    const std::string bytes = request.SerializeAsString();
    for (uint32_t seed = 0; seed < 20; ++seed) EXPECT_EQ(PeekRequestId(InPieces(bytes, seed)), id);
  }
  request.set_request_id(std::string(257, 'x'));
  const std::string longer = request.SerializeAsString();
  EXPECT_EQ(PeekRequestId(InPieces(longer, 1)), "");
  EXPECT_EQ(PeekRequestId(InPieces("\x42\x02\xc3\x28", 1)), "") << "not UTF-8";
  EXPECT_EQ(PeekRequestId(InPieces("\x42\x02i", 1)), "") << "truncated";
  EXPECT_EQ(PeekRequestId(InPieces("\x42\x01"
                                   "a"
                                   "\x42\x01"
                                   "b",
                                   1)),
            "b");
}

TEST(MatmulWire, CopiesARangeAcrossPieces) {
  const std::string bytes = "abcdefghij";
  for (uint32_t seed = 0; seed < 30; ++seed) {
    const std::vector<absl::string_view> pieces = InPieces(bytes, seed);
    for (int64_t begin = 0; begin <= 10; ++begin) {
      for (int64_t size = 0; begin + size <= 10; ++size) {
        std::string out(size, '?');
        CopyRange(pieces, {begin, size}, out.data());
        ASSERT_EQ(out, bytes.substr(begin, size));
      }
    }
  }
}

}  // namespace
}  // namespace awqd::wire
