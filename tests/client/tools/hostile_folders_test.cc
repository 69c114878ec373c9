// Folders that claim more than fits in memory: the tools read headers and pieces of rows, or
// refuse.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/tools/convert.h"
#include "client/tools/diff.h"
#include "client/tools/encode/target.h"
#include "client/tools/inspect.h"
#include "client/tools/quantize.h"
#include "tests/client/tools/quiet.h"
#include "tests/kernels/checkpoint/gguf_bytes.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/failing_new.h"

namespace awqd::tools {
namespace {

using ::awqd::testing::AwqConfig;
using ::awqd::testing::CountedNew;
using ::awqd::testing::LittleEndian64;
using ::awqd::testing::TempDirectory;
using ::testing::HasSubstr;

class HostileFolder : public ::testing::Test {
 protected:
  struct Hole {
    std::string name, dtype;
    int64_t rows, columns, bytes;
  };
  // A sparse file of zeros.
  void WriteHoles(const std::string& file, const std::vector<Hole>& holes) const {
    std::string header = "{";
    int64_t at = 0;
    for (const Hole& hole : holes) {
      absl::StrAppend(&header, at == 0 ? "" : ",", "\"", hole.name, "\":{\"dtype\":\"", hole.dtype,
                      "\",\"shape\":[", hole.rows, ",", hole.columns, "],\"data_offsets\":[", at,
                      ",", at + hole.bytes, "]}");
      at += hole.bytes;
    }
    header += "}";
    folder_.Write(file, LittleEndian64(header.size()) + header);
    std::filesystem::resize_file(folder_.At(file), 8 + header.size() + at);
  }
  // One AWQ linear.
  void WriteAwq(const std::string& model, int64_t k, int64_t n, int group) const {
    folder_.Write(model + "/config.json", AwqConfig(group));
    WriteHoles(model + "/model.safetensors",
               {{"l.up.qweight", "I32", k, n / 8, k * n / 2},
                {"l.up.qzeros", "I32", k / group, n / 8, k / group * n / 2},
                {"l.up.scales", "F16", k / group, n, k / group * n * 2}});
  }
  Inspection Look(const std::string& model) {
    const CountedNew memory;
    auto out = Inspect(folder_.At(model), Quiet);
    peak_mib_ = memory.peak_mib();
    EXPECT_TRUE(out.ok()) << out.status();
    return out.ok() ? *std::move(out) : Inspection();
  }
  TempDirectory folder_;
  int64_t peak_mib_ = 0;
};

TEST_F(HostileFolder, CodesOfALargeLinearAreNotRead) {
  WriteAwq("m", 1 << 16, 1 << 16, 4096);
  const Inspection got = Look("m");
  ASSERT_EQ(got.linears.size(), 1u);
  EXPECT_TRUE(got.loads()) << got.linears[0].error;
  EXPECT_EQ(got.linears[0].scheme, "w4g4096z");
  EXPECT_EQ(got.linears[0].k, 1 << 16);
  EXPECT_GT(got.linears[0].bytes, int64_t{2} << 30);
  EXPECT_FALSE(got.linears[0].codes_read);
  EXPECT_LT(peak_mib_, 20);
}

TEST_F(HostileFolder, ScalesOfALargeLinearAreChecked) {
  WriteAwq("m", 1 << 16, 1 << 16, 4096);
  std::fstream file(folder_.At("m/model.safetensors"), std::ios::in | std::ios::out);
  file.seekp(-2, std::ios::end).write("\x01\x7e", 2);  // NaN
  file.close();
  EXPECT_THAT(Look("m").linears.at(0).error, HasSubstr("tensor \"scales\": got NaN"));
}

TEST_F(HostileFolder, LargeScalesAreNotRead) {
  WriteAwq("m", 1 << 18, 1 << 18, 64);
  EXPECT_THAT(Look("m").linears.at(0).error,
              HasSubstr("bytes of tensors beside its codes, expected at most 268435456"));
  EXPECT_LT(peak_mib_, 20);
}

TEST_F(HostileFolder, WhatNeedsAWholeLinearRefusesIt) {
  WriteAwq("m", 1 << 22, 1 << 20, 4096);  // 2 TiB
  const Target* const gptq = TargetNamed("gptq");
  const CountedNew memory;
  const auto converted =
      Convert({.folder = folder_.At("m"), .output = folder_.At("out"), .target = gptq}, Quiet);
  EXPECT_TRUE(absl::IsResourceExhausted(converted.status())) << converted.status();
  EXPECT_THAT(std::string(converted.status().message()),
              HasSubstr("linear \"l.up\": weight \"l.up\": got "));
  EXPECT_FALSE(std::filesystem::exists(folder_.At("out")));
  const auto compared = Diff(folder_.At("m"), folder_.At("m"), 1, Quiet);
  ASSERT_TRUE(compared.ok()) << compared.status();
  EXPECT_THAT(compared->linears.at(0).error, HasSubstr("the memory that is free"));
  folder_.Write("wide/config.json", "{}");
  WriteHoles("wide/model.safetensors",
             {{"wide.weight", "F16", 1, int64_t{1} << 41, int64_t{2} << 41}});
  const auto dense = Diff(folder_.At("wide"), folder_.At("wide"), 1, Quiet);
  ASSERT_TRUE(dense.ok()) << dense.status();
  EXPECT_THAT(dense->linears.at(0).error, HasSubstr("weight \"wide\": got 64 times"));
  folder_.Write("tall/config.json", "{}");
  WriteHoles("tall/model.safetensors",
             {{"tall.weight", "F16", int64_t{1} << 34, 128, int64_t{256} << 34}});
  const auto quantized =
      Quantize({.folder = folder_.At("tall"), .output = folder_.At("out"), .target = gptq}, Quiet);
  EXPECT_TRUE(absl::IsResourceExhausted(quantized.status())) << quantized.status();
  EXPECT_LT(memory.peak_mib(), 50);
}

// The scales of a GGUF file lie among its codes: they are read a few rows at a time.
TEST_F(HostileFolder, RowsOfALargeGgufTensorAreReadInPieces) {
  awqd::testing::GgufBytes gguf = {.data = ""};
  gguf.tensors[0].dims = {4096, 40960};
  folder_.Write("m.gguf", gguf.File());
  const int64_t bytes = 40960 * 4096 / 32 * 18;
  ASSERT_GT(bytes, 64 << 20);
  const auto end = std::filesystem::file_size(folder_.At("m.gguf")) + bytes;
  std::filesystem::resize_file(folder_.At("m.gguf"), end);
  Inspection got = Look("m.gguf");
  EXPECT_TRUE(got.loads()) << got.linears.at(0).error;
  EXPECT_TRUE(got.linears.at(0).codes_read);
  EXPECT_EQ(got.linears.at(0).n, 40960);
  EXPECT_LT(peak_mib_, 60);
  std::fstream file(folder_.At("m.gguf"), std::ios::in | std::ios::out);
  file.seekp(-18, std::ios::end).write("\x01\x7e", 2);  // the scale of the last block: NaN
  file.close();
  got = Look("m.gguf");
  EXPECT_FALSE(got.loads());
  EXPECT_THAT(got.linears.at(0).error, HasSubstr("weight \"a\""));
}

TEST_F(HostileFolder, HeadersOfAllFilesTogetherAreBounded) {
  folder_.Write("m/config.json", "{}");
  WriteHoles("m/a.safetensors", {{"a", "U8", 0, 0, 0}});
  folder_.Write("m/b.safetensors", LittleEndian64(100'000'000 - 8));
  std::filesystem::resize_file(folder_.At("m/b.safetensors"), 100'000'000);
  EXPECT_THAT(std::string(Inspect(folder_.At("m"), Quiet).status().message()),
              HasSubstr("(the headers of a model may have 100000000 in all)"));
  std::filesystem::remove(folder_.At("m/b.safetensors"));
  std::filesystem::create_symlink("a.safetensors", folder_.At("m/b.safetensors"));
  EXPECT_THAT(std::string(Inspect(folder_.At("m"), Quiet).status().message()),
              HasSubstr("expected each shard once"));
}

}  // namespace
}  // namespace awqd::tools
