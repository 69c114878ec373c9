// Files of a checkpoint choose sizes: an index, expressions, headers. Memory is bounded, and a load
// checks for cancellation while it reads them.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/checkpoint/containers/json.h"
#include "kernels/checkpoint/containers/safetensors.h"
#include "kernels/checkpoint/containers/shard_index.h"
#include "kernels/checkpoint/linear_rules.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/failing_new.h"

namespace awqd::model {
namespace {

using ::awqd::testing::CountedNew;
using ::awqd::testing::TempDirectory;
using ::testing::HasSubstr;
using Kind = ModulePattern::Kind;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

class HostileIndex : public ::testing::Test {
 protected:
  absl::StatusOr<ShardIndex> Read(absl::string_view text,
                                  const std::atomic<bool>* cancelled = nullptr) {
    directory_.Write("index", text);
    absl::StatusOr<File> file =
        File::Adopt(UniqueFd(open(directory_.At("index").c_str(), O_RDONLY | O_CLOEXEC)), "index");
    if (!file.ok()) return file.status();
    const CountedNew memory;
    absl::StatusOr<ShardIndex> out = ShardIndex::Read(*file, cancelled);
    peak_mib_ = memory.peak_mib();
    return out;
  }
  TempDirectory directory_;
  int64_t peak_mib_ = 0;
};

// One entry for each tensor until the text has 63 MiB.
std::string LargeIndex(const std::string& stem) {
  std::string out = R"({"metadata":{"total_size":1},"weight_map":{)";
  for (int i = 0; out.size() < 63 << 20; ++i) {
    absl::StrAppend(&out, i == 0 ? "" : ",", "\"", stem, i, "\":\"model-", i % 10,
                    ".safetensors\"");
  }
  return out + "}}";
}

TEST_F(HostileIndex, Of63MiB) {
  const auto index = Read(LargeIndex("model.layers.10.mlp.experts.up_projection.qweight."));
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_GT(index->size(), 700'000u);
  EXPECT_EQ(index->file_names().size(), 10u);
  EXPECT_EQ((*index)[12].tensor, "model.layers.10.mlp.experts.up_projection.qweight.12");
  EXPECT_EQ((*index)[12].file, "model-2.safetensors");
  EXPECT_LT(peak_mib_, 110);
}

TEST_F(HostileIndex, OfMoreTensorsThanAnyFilesMayHave) {
  const auto index = Read(LargeIndex("t"));
  EXPECT_THAT(Message(index.status()),
              HasSubstr("index: weight_map: got more than 1000000 tensors"));
  EXPECT_LT(peak_mib_, 60);
}

TEST_F(HostileIndex, OfOtherKeys) {
  std::string text = R"({"weight_map":{"a":"a.safetensors"},"metadata":{"0":0)";
  for (int i = 1; text.size() < 63 << 20; ++i) absl::StrAppend(&text, ",\"", i, "\":0");
  EXPECT_THAT(Message(Read(text + "}}").status()), HasSubstr("got more than 200000 keys"));
  EXPECT_LT(peak_mib_, 60);
}

TEST_F(HostileIndex, OfOneText) {
  for (const char* text : {"x", "\\\"", "7"}) {
    const bool number = *text == '7';
    std::string out = number ? R"({"a":)" : R"({"a":")";
    while (out.size() < 63 << 20) out += text;
    EXPECT_THAT(Message(Read(out + (number ? "}" : "\"}")).status()),
                HasSubstr("got a string or a number of more than 8388608 bytes"));
    EXPECT_LT(peak_mib_, 120);
  }
}

TEST_F(HostileIndex, Refusals) {
  const auto refusal = [&](absl::string_view map) {
    return Message(Read(absl::StrCat("{\"weight_map\":", map, "}")).status());
  };
  EXPECT_THAT(refusal(R"({"a":"x.safetensors","b":"y.safetensors","a":"x.safetensors"})"),
              HasSubstr("index: duplicate key \"a\""));
  EXPECT_THAT(refusal(absl::StrCat("{\"", std::string(1025, 'n'), "\":\"x.safetensors\"}")),
              HasSubstr("name: got 1025 bytes, expected at most 1024"));
  EXPECT_THAT(refusal(R"({"a":{"b":"x.safetensors"}})"),
              HasSubstr("tensor \"a\": got an object, expected a file name"));
  EXPECT_THAT(refusal(R"({"a":["x.safetensors"]})"), HasSubstr("got an array, expected a file"));
  EXPECT_THAT(refusal(R"("x.safetensors")"), HasSubstr("expected an object of tensor -> file"));
  EXPECT_THAT(
      Message(Read(R"({"weight_map":{"a":"x.safetensors"},"b":{"c":{"c":1,"c":2}}})").status()),
      HasSubstr("duplicate key \"c\""));
  std::string shards = "{\"t0\":\"0.safetensors\"";
  for (int i = 1; i <= 1000; ++i) absl::StrAppend(&shards, ",\"t", i, "\":\"", i, ".safetensors\"");
  EXPECT_THAT(refusal(shards + "}"), HasSubstr("got more than 1000 shards, expected at most 1000"));
  EXPECT_TRUE(Read(R"({"b":[1,{"weight_map":2}],"weight_map":{"":"x.safetensors"}})").ok());
}

TEST_F(HostileIndex, IsCancelled) {
  const std::atomic<bool> cancelled = true;
  const auto index = Read(R"({"weight_map":{"a":"a.safetensors"}})", &cancelled);
  EXPECT_TRUE(absl::IsUnavailable(index.status())) << index.status();
}

// The first event after a cancellation ends the parse.
TEST(HostileJson, IsCancelledBetweenEvents) {
  std::atomic<bool> cancelled = false;
  class Counter final : public JsonEvents {
   public:
    using JsonEvents::JsonEvents;
    int scalars = 0;

   private:
    absl::Status Scalar(const uint64_t*, const std::string*) override {
      ++scalars;
      return absl::OkStatus();
    }
  };
  Counter events(8, &cancelled);
  int pieces = 0;
  const absl::Status status = ParseJson(
      [&]() -> absl::StatusOr<absl::string_view> {
        cancelled = ++pieces > 3;
        return pieces == 1 ? "[" : "1,1,";
      },
      &events);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(pieces, 4);
  EXPECT_EQ(events.scalars, 5);
}

TEST(HostileJson, PlacesAreThoseOfTheWholeText) {
  const auto parse = [](std::vector<absl::string_view> pieces) {
    size_t next = 0;
    JsonEvents events(8);
    return Message(ParseJson(
        [&] {
          return absl::StatusOr<absl::string_view>(next < pieces.size() ? pieces[next++] : "");
        },
        &events));
  };
  EXPECT_EQ(parse({"{\"a", "\":[1,", "2]}"}), "");
  EXPECT_THAT(parse({"{\"a", "\":[1,", "2]x}"}), HasSubstr("at byte 11 "));
  EXPECT_THAT(parse({"{\"a", "\":[1,", absl::string_view("2\0}", 3)}),
              HasSubstr("got a NUL byte in JSON at byte 9"));
}

TEST(HostileHeader, MetadataOfManyKeys) {
  std::string header = R"({"__metadata__":{"0":"")";
  for (int i = 1; header.size() < 90 << 20; ++i) absl::StrAppend(&header, ",\"", i, "\":\"\"");
  header += "}}";
  const CountedNew memory;
  EXPECT_THAT(Message(ParseSafetensorsHeader(header, 0).status()),
              HasSubstr("got more than 200000 keys"));
  EXPECT_LT(memory.peak_mib(), 60);
}

TEST(HostileHeader, NamesAreHeldOnce) {
  std::string header = "{";
  for (int i = 0; i < 200'000; ++i) {
    absl::StrAppend(&header, i == 0 ? "" : ",", "\"model.layers.10.mlp.experts.up_projection.", i,
                    R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})");
  }
  header += "}";
  const CountedNew memory;
  ASSERT_TRUE(ParseSafetensorsHeader(header, 0).ok());
  EXPECT_LT(memory.peak_mib(), 65);
}

// Expressions that need much memory for their length: to compile, to simplify, to match.
TEST(HostileExpressions, MemoryIsBounded) {
  for (const std::string text :
       {"(?:\\pL\\pN){1,9}x", "\\P{Any}{0,999}", "(?:(?:\\P{Any}){0,99}){0,9}", ".*a.{25}",
        "(?:a?){30}a{30}", "model\\.layers\\.[0-9]+\\.mlp\\.experts\\.[0-9]+\\.up_proj"}) {
    SCOPED_TRACE(text);
    QuantConfig config;
    config.rules.emplace_back();
    for (int i = 0; i < 5000; ++i) {
      config.left_out.push_back({Kind::kRegex, absl::StrCat(text, "y", i)});
      config.rules[0].targets.push_back({Kind::kRegex, absl::StrCat(text, "z", i)});
    }
    const CountedNew memory;
    size_t count = config.left_out.size();
    auto rules = LinearRules::Make(config);
    // The largest number that is allowed.
    while (!rules.ok() && count > 0) {
      EXPECT_TRUE(absl::IsInvalidArgument(rules.status())) << rules.status();
      count /= 2;
      config.left_out.resize(count);
      config.rules[0].targets.resize(count);
      rules = LinearRules::Make(config);
    }
    ASSERT_TRUE(rules.ok());
    std::string path;
    for (int i = 0; path.size() < 1000; ++i) path += (i * i) % 7 < 3 ? "a" : "b";
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(rules->RuleOf(path.substr(i)).ok());
      EXPECT_TRUE(rules->RuleOf(absl::StrCat("model.layers.", i, ".mlp.experts.7.up_proj")).ok());
    }
    EXPECT_LT(memory.peak_mib(), 200);
  }
}

TEST(HostileTensors, ReadingIsCancelled) {
  const TempDirectory directory;
  directory.Write("m/config.json", awqd::testing::AwqConfig());
  directory.Write("m/a.safetensors",
                  awqd::testing::SafetensorsOf(awqd::testing::AwqLinear("l.up", 64, 16, 32)));
  const auto root = RepositoryRoot::Open(directory.path());
  std::atomic<bool> cancelled = false;
  const auto checkpoint = Checkpoint::Open(*root, "m", &cancelled);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::vector<uint8_t> scratch;
  EXPECT_TRUE(checkpoint->Read(checkpoint->linears()[0], &scratch).ok());
  cancelled = true;
  EXPECT_TRUE(absl::IsUnavailable(checkpoint->Read(checkpoint->linears()[0], &scratch).status()));
  EXPECT_TRUE(
      absl::IsUnavailable(checkpoint->Describe(checkpoint->linears()[0], &scratch).status()));
}

}  // namespace
}  // namespace awqd::model
