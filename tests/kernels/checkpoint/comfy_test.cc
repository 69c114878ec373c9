// Single files of ComfyUI: where their settings stand, and what is refused of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_replace.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/checkpoint/checkpoint_files.h"
#include "tests/kernels/checkpoint/test_files.h"

namespace awqd::model {
namespace {

using ::awqd::testing::Merge;
using ::awqd::testing::Safetensors;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TestTensor;
using ::awqd::testing::TestTensors;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kFp8Settings[] = "{\"format\": \"float8_e4m3fn\"}";

TestTensor Text(absl::string_view text) {
  return {"U8", {static_cast<int64_t>(text.size())}, std::string(text)};
}

// E4M3 [2, 4], and its scale, 1.
TestTensors Fp8Linear(const std::string& path, const std::string& scale = "weight_scale") {
  return {{path + ".weight", {"F8_E4M3", {2, 4}, std::string(8, '\x38')}},
          {path + "." + scale, {"F32", {}, std::string("\0\0\x80\x3f", 4)}}};
}
TestTensors MarkedLinear(const std::string& path, absl::string_view marker = kFp8Settings) {
  return Merge(Fp8Linear(path), {{path + ".comfy_quant", Text(marker)}});
}

// The file with that text as a value of its header's metadata.
std::string WithMetadata(const TestTensors& tensors, absl::string_view text) {
  const std::string file = SafetensorsOf(tensors);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<uint8_t>(file[i]);
  const std::string header =
      absl::StrCat("{\"__metadata__\":{\"_quantization_metadata\":\"",
                   absl::StrReplaceAll(text, {{"\"", "\\\""}}), "\"},", file.substr(9, length - 1));
  return Safetensors(header, file.substr(8 + length));
}

class ComfyFileTest : public ::testing::Test {
 protected:
  ComfyFileTest() : root_(*RepositoryRoot::Open(directory_.path())) {}

  void Write(const TestTensors& tensors) const {
    directory_.Write("m.safetensors", SafetensorsOf(tensors));
  }
  absl::StatusOr<Checkpoint> Open() const { return Checkpoint::Open(root_, "m.safetensors"); }
  std::vector<std::string> Linears() const {
    const auto checkpoint = Open();
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    std::vector<std::string> out;
    if (!checkpoint.ok()) return out;
    for (const LinearLocation& linear : checkpoint->linears()) out.push_back(linear.path);
    return out;
  }
  // Expects the linear "bad" to be refused beside one that is served.
  void ExpectUnserved(const TestTensors& bad, absl::StatusCode code, absl::string_view says) const {
    Write(Merge(bad, MarkedLinear("good")));
    const auto checkpoint = Open();
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    ASSERT_EQ(checkpoint->unserved().size(), 1u);
    ASSERT_EQ(checkpoint->unserved().begin()->first, "bad");
    const absl::Status& status = checkpoint->unserved().find("bad")->second;
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("m.safetensors: weight \"bad\": "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
  }
  void ExpectRefused(absl::StatusCode code, absl::string_view says) const {
    const absl::Status status = Open().status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
  }

  awqd::testing::TempDirectory directory_;
  RepositoryRoot root_;
};

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnread = absl::StatusCode::kUnimplemented;

TEST_F(ComfyFileTest, EveryTensorIsAccountedFor) {
  TestTensors tensors = MarkedLinear("a.b");
  tensors["a.b.input_scale"] = {"F32", {}, "abcd"};
  tensors["norm.weight"] = {"BF16", {2}, "abcd"};
  Write(tensors);
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->format().name, "comfy");
  EXPECT_EQ(checkpoint->quant_method(), "comfy_quant");
  EXPECT_EQ(checkpoint->ignored_tensors(), 2);
  EXPECT_TRUE(checkpoint->tensors().at("a.b.comfy_quant").served);
  std::vector<uint8_t> scratch;
  const auto weight = checkpoint->Read(checkpoint->linears()[0], &scratch);
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->k, 4);
  EXPECT_TRUE(checkpoint->CheckUnchanged(root_).ok());
  EXPECT_TRUE(FindModel(root_, "m.safetensors").ok());
}

TEST_F(ComfyFileTest, MetadataNamesLayersWithoutTheirPrefix) {
  TestTensors tensors = Merge(Fp8Linear("model.diffusion_model.x"), Fp8Linear("y"));
  directory_.Write("m.safetensors",
                   WithMetadata(tensors, absl::StrCat("{\"layers\":{\"x\":", kFp8Settings,
                                                      ",\"y\":", kFp8Settings,
                                                      ",\"gone\":", kFp8Settings, "}}")));
  EXPECT_THAT(Linears(), ElementsAre("model.diffusion_model.x", "y"));
  EXPECT_EQ(Open()->note(),
            "_quantization_metadata names 1 layers that have no weight, such as \"gone\"");
}

TEST_F(ComfyFileTest, MetadataCountBeforeTensors) {
  directory_.Write("m.safetensors",
                   WithMetadata(MarkedLinear("x", "{\"format\":\"mxfp8\"}"),
                                absl::StrCat("{\"layers\":{\"x\":", kFp8Settings, "}}")));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::vector<uint8_t> scratch;
  EXPECT_TRUE(checkpoint->Read(checkpoint->linears()[0], &scratch).ok());
}

TEST_F(ComfyFileTest, BadMetadata) {
  const auto refused = [&](absl::string_view text, absl::string_view says) {
    directory_.Write("m.safetensors", WithMetadata(Fp8Linear("x"), text));
    ExpectRefused(kInvalid,
                  absl::StrCat("m.safetensors: __metadata__: _quantization_metadata: ", says));
  };
  refused("{", "");
  refused("[]", "");
  refused("{}", "layers: got nothing, expected an object");
  refused("{\"layers\":[]}", "layers: got a list");
  directory_.Write("m.safetensors", WithMetadata(Fp8Linear("x"), "{\"layers\":{\"x\":1}}"));
  ExpectRefused(kInvalid, "m.safetensors: weight \"x\": comfy_quant: got 1, expected an object");
}

TEST_F(ComfyFileTest, LayersThatAreNotRead) {
  ExpectUnserved(MarkedLinear("bad", "{\"format\":\"svdquant_w4a4\"}"), kUnread,
                 "format: got \"svdquant_w4a4\", expected float8_e4m3fn, mxfp8, ");
  ExpectUnserved(MarkedLinear("bad", "{}"), kInvalid, "format: got nothing, expected one of");
  ExpectUnserved(MarkedLinear("bad", "{\"format\":1}"), kInvalid, "format: got 1");
  ExpectUnserved(MarkedLinear("bad", "{\"form"), kInvalid, "tensor \"comfy_quant\": ");
  ExpectUnserved(MarkedLinear("bad", "[]"), kInvalid, "tensor \"comfy_quant\": ");
  TestTensors other = MarkedLinear("bad");
  other["bad.comfy_quant"] = {"F32", {1}, "abcd"};
  ExpectUnserved(other, kInvalid,
                 "tensor \"comfy_quant\": got \"F32\" [1], expected U8 [bytes of JSON], at most");
  ExpectUnserved(MarkedLinear("bad", std::string(70'000, ' ')), kInvalid, "at most 65536");
  other = MarkedLinear("bad");
  other.erase("bad.weight_scale");
  ExpectUnserved(other, kInvalid, "tensor \"weight_scale\" is missing");
  other = MarkedLinear("bad");
  other["bad.weight_correction"] = {"F32", {1}, "abcd"};
  Write(Merge(other, MarkedLinear("good")));
  EXPECT_THAT(std::string(Open()->unserved().at("bad").message()),
              HasSubstr("tensor \"bad.weight_correction\": format comfy has no such tensor"));
}

// No other layer's settings stand in for those that do not fit.
TEST_F(ComfyFileTest, ALayerIsReadByItsOwnSettings) {
  TestTensors tensors = MarkedLinear("bad");
  tensors.erase("bad.weight_scale");
  tensors["plain.weight"] = {"F8_E4M3", {2, 4}, std::string(8, '\x38')};
  ExpectUnserved(tensors, kInvalid, "tensor \"weight_scale\" is missing");
}

TEST_F(ComfyFileTest, CodesWithoutAMarker) {
  ExpectUnserved(
      Fp8Linear("bad"), kUnread,
      "tensor \"weight\": got \"F8_E4M3\" [2, 4], expected \"comfy_quant\" beside it, or "
      "an entry of _quantization_metadata");
  ExpectUnserved({{"bad.weight", {"F8_E4M3", {1, 2, 1, 1}, "ab"}}}, kUnread,
                 "tensor \"weight\": got 4 dimensions, expected 2");
  ExpectUnserved({{"bad.weight", {"F8_E5M2", {1, 2}, "ab"}}}, kUnread,
                 "format: got \"float8_e5m2\"");
  ExpectUnserved({{"bad.weight", {"I8", {1, 2}, "ab"}}}, kUnread, "got \"I8\" [1, 2]");
}

TEST_F(ComfyFileTest, Fp8OfTheYearsBefore) {
  TestTensors tensors = Fp8Linear("x", "scale_weight");
  tensors["x.scale_input"] = {"F32", {1}, "abcd"};
  tensors["scaled_fp8"] = {"F8_E4M3", {2}, "ab"};
  tensors["dense.weight"] = {"BF16", {1, 2}, "abcd"};
  tensors["dense.scale_weight"] = {"F32", {1}, "abcd"};
  Write(tensors);
  EXPECT_THAT(Linears(), ElementsAre("x"));
  EXPECT_THAT(Open()->unserved(), IsEmpty());
  Write({{"plain.weight", {"F8_E4M3", {2, 4}, std::string(8, '\x38')}}});
  EXPECT_THAT(Linears(), ElementsAre("plain"));
}

TEST_F(ComfyFileTest, ExpertsOfOneTensor) {
  Write(
      {{"mlp.experts.up.weight", {"I8", {2, 3, 4}, std::string(24, '\1')}},
       {"mlp.experts.up.weight_scale", {"F32", {2, 3}, std::string(24, '\0')}},
       {"mlp.experts.up.comfy_quant", Text("{\"format\":\"int8_tensorwise\",\"num_experts\":2}")}});
  EXPECT_THAT(Linears(), ElementsAre("mlp.experts.0.up", "mlp.experts.1.up"));
  const auto checkpoint = Open();
  std::vector<uint8_t> scratch;
  const auto weight = checkpoint->Read(checkpoint->linears()[1], &scratch);
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->n, 3);
}

// In a folder the tensors tell where config.json says nothing.
TEST_F(ComfyFileTest, Folders) {
  directory_.Write("f/config.json", "{}");
  directory_.Write("f/diffusion.safetensors", SafetensorsOf(MarkedLinear("x")));
  const auto checkpoint = Checkpoint::Open(root_, "f");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->linears()[0].path, "x");
}

TEST_F(ComfyFileTest, OtherFilesAreNoModels) {
  Write({{"x.weight", {"BF16", {1, 2}, "abcd"}}});
  EXPECT_EQ(FindModel(root_, "m.safetensors").code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(FindModel(root_, "m.safetensors").message()),
              HasSubstr("m.safetensors: got no layers that ComfyUI quantised"));
  ExpectRefused(absl::StatusCode::kNotFound, "m.safetensors");
  directory_.Write("m.safetensors", "no");
  EXPECT_TRUE(FindModel(root_, "m.safetensors").ok()) << "its load says what is wrong";
  ExpectRefused(kInvalid, "m.safetensors: got 2 bytes, expected at least 8 (safetensors)");
  EXPECT_EQ(FindModel(root_, "none.safetensors").code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace awqd::model
