// Weights with an error, in every format, inline and in a folder: the error is named, and nothing
// is kept.
#include <filesystem>
#include <fstream>
#include <functional>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/inference/golden_models.h"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

class BadWeightsTest : public SharedServerTest {
 protected:
  int64_t WeightsBytes() {
    const auto info = client_->GetServerInfo();
    EXPECT_TRUE(info.ok()) << info.status();
    return info.ok() ? info->devices(0).weights_bytes() : -1;
  }
};

using Spoil = std::function<void(v1::PackedWeight*)>;

v1::Tensor& Part(v1::PackedWeight* packed, const std::string& suffix) {
  return packed->mutable_tensors()->at(suffix);
}

struct BadCase {
  std::string format;
  std::string field;  // the field that the error names
  Spoil spoil;
};

std::vector<BadCase> BadCases() {
  using P = v1::PackedWeight;
  const auto nan = [](const std::string& suffix, const std::string& bits) -> Spoil {
    return [=](P* p) {
      std::string& raw = *Part(p, suffix).mutable_raw();
      raw.replace(raw.size() - bits.size(), bits.size(), bits);
    };
  };
  const auto missing = [](const std::string& suffix) -> Spoil {
    return [=](P* p) { p->mutable_tensors()->erase(suffix); };
  };
  const auto truncated = [](const std::string& suffix) -> Spoil {
    return [=](P* p) { Part(p, suffix).mutable_raw()->pop_back(); };
  };
  const auto typed = [](const std::string& suffix, v1::DType dtype) -> Spoil {
    return [=](P* p) {
      v1::Tensor& tensor = Part(p, suffix);
      int64_t count = 1;
      for (const int64_t dim : tensor.shape()) count *= dim;
      tensor.set_dtype(dtype);
      tensor.set_raw(std::string(static_cast<size_t>(count * client::SizeOf(dtype)), '\0'));
    };
  };
  const auto taller = [](const std::string& suffix) -> Spoil {
    return [=](P* p) {
      v1::Tensor& tensor = Part(p, suffix);
      tensor.set_shape(0, tensor.shape(0) * 2);
      tensor.mutable_raw()->append(tensor.raw());
    };
  };
  const auto set = [](const std::string& name, const std::string& value) -> Spoil {
    return [=](P* p) { (*p->mutable_settings())[name] = value; };
  };
  const std::string half_nan("\x01\x7e", 2), single_nan("\x00\x00\xc0\x7f", 4);
  return {
      {"plain", "codes", missing("codes")},
      {"plain", "codes", truncated("codes")},
      {"plain", "codes", typed("codes", v1::INT8)},
      {"plain", "codes", [](P* p) { Part(p, "codes").mutable_raw()->back() = 16; }},
      {"plain", "zeros", typed("zeros", v1::FP16)},
      {"plain", "zeros", taller("zeros")},
      {"plain", "zeros", [](P* p) { Part(p, "zeros").mutable_raw()->back() = 16; }},
      {"plain", "scales", nan("scales", half_nan)},
      {"plain", "scales", taller("scales")},
      {"plain", "scales", typed("scales", v1::INT32)},
      {"plain", "group_size", set("group_size", "1000000")},
      {"plain", "bits", set("bits", "9")},
      {"plain", "colour", set("colour", "red")},
      {"plain", "packed.format", [](P* p) { p->set_format("plane"); }},
      {"plain", "packed.bits", [](P* p) { p->set_bits(4); }},
      {"int-quantized", "weight", missing("weight")},
      {"int-quantized", "weight", truncated("weight")},
      {"int-quantized", "weight", typed("weight", v1::FP16)},
      {"int-quantized", "weight", set("num_bits", "4")},  // codes of 8 bits do not fit
      {"int-quantized", "weight_scale", missing("weight_scale")},
      {"int-quantized", "weight_scale", taller("weight_scale")},
      {"int-quantized", "weight_scale", typed("weight_scale", v1::UINT8)},
      {"int-quantized", "weight_scale", nan("weight_scale", std::string("\xc1\x7f", 2))},
      {"int-quantized", "strategy", set("strategy", "block")},
      {"fastertransformer", "weight", missing("weight")},
      {"fastertransformer", "weight", truncated("weight")},
      {"fastertransformer", "weight", typed("weight", v1::INT32)},
      {"fastertransformer", "weight_scale", nan("weight_scale", half_nan)},
      {"fastertransformer", "weight_scale", taller("weight_scale")},
      {"fastertransformer", "bits", set("bits", "5")},
      {"fastertransformer", "group_size", set("group_size", "1024")},
      {"fastertransformer", "bias", typed("bias", v1::INT8)},
      {"pack-quantized", "weight_packed", missing("weight_packed")},
      {"pack-quantized", "weight_packed", truncated("weight_packed")},
      {"pack-quantized", "weight_packed", typed("weight_packed", v1::UINT8)},
      {"pack-quantized", "weight_packed", set("num_bits", "8")},
      {"pack-quantized", "weight_shape", missing("weight_shape")},
      {"pack-quantized", "weight_shape", taller("weight_packed")},
      {"pack-quantized", "weight_scale", nan("weight_scale", std::string("\xc1\x7f", 2))},
      {"pack-quantized", "weight_scale", set("group_size", "64")},
      {"pack-quantized", "num_bits", set("num_bits", "9")},
      {"pack-quantized", "weight_zero_point", set("symmetric", "false")},
      {"pack-quantized", "weight_g_idx", set("actorder", "group")},
      {"pack-quantized", "weight_colour",
       [](P* p) { (*p->mutable_tensors())["weight_colour"] = Part(p, "weight_shape"); }},
      {"float-quantized", "weight_scale", taller("weight_scale")},
      {"float-quantized", "weight_scale", set("strategy", "tensor")},
      {"float-quantized", "weight", typed("weight", v1::INT8)},
      {"nvfp4-pack-quantized", "weight_global_scale", nan("weight_global_scale", single_nan)},
      {"nvfp4-pack-quantized", "weight_scale", truncated("weight_scale")},
      {"mxfp4-pack-quantized", "weight_scale", nan("weight_scale", "\xff")},
      {"mxfp4-pack-quantized", "weight_scale", taller("weight_packed")},
      {"qserve", "qweight", truncated("qweight")},
      {"qserve", "s1_scales", nan("s1_scales", half_nan)},
      {"qserve", "s2_scales", [](P* p) { Part(p, "s2_scales").mutable_raw()->back() = 18; }},
      {"qserve", "s2_zeros", missing("s2_zeros")},
      {"qserve", "group_size", set("group_size", "96")},
      {"awq-gemv", "scales", taller("scales")},
      {"awq-gemv", "qzeros", missing("qzeros")},
      {"awq-gemv", "group_size", set("group_size", "48")},
      {"awq-gemv-fast", "qweight", truncated("qweight")},
      {"awq-gemv-fast", "qzeros", nan("qzeros", half_nan)},
      {"awq-gemv-fast", "zero_point", set("zero_point", "false")},
      {"awq-marlin", "scales", nan("scales", half_nan)},
      {"awq-marlin", "zero_point", set("zero_point", "true")},
      {"gptq-marlin", "tensors[\"B\"]", typed("B", v1::FP16)},
      {"gptq-marlin", "tensors[\"s\"]", taller("s")},
      {"gptq-marlin", "sym", set("sym", "false")},
      {"pack-quantized", "hadamard_size", set("hadamard_size", "12")},
      {"fp-quant", "forward_dtype", set("forward_dtype", "mxfp8")},
      {"fp-quant", "forward_hadamard_matrix", missing("forward_hadamard_matrix")},
      {"fp-quant", "weight_global_scale", missing("weight_global_scale")},
      {"exl3", "trellis", truncated("trellis")},
      {"exl3", "trellis", taller("trellis")},
      {"exl3", "suh", missing("suh")},
      {"exl3", "svh", nan("svh", half_nan)},
  };
}

TEST_F(BadWeightsTest, BadPartsAreNamedAndNothingIsKept) {
  const int64_t before = WeightsBytes();
  for (const BadCase& bad : BadCases()) {
    const GoldenCase golden = GoldenCases(bad.format).front();
    v1::PackedWeight packed = InlineOf(golden);
    bad.spoil(&packed);
    const absl::Status status = client_->Dequantize({.weight = packed}).status();
    SCOPED_TRACE(absl::StrCat(bad.format, " ", bad.field, ": ", std::string(status.message())));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.field));
  }
  EXPECT_EQ(WeightsBytes(), before);
}

TEST_F(BadWeightsTest, ABrokenCheckpointIsNotLoaded) {
  const int64_t before = WeightsBytes();
  for (const char* format : {"plain", "int-quantized", "fastertransformer", "pack-quantized"}) {
    const GoldenCase golden = GoldenCases(format).front();
    const std::string name = absl::StrCat("broken.", format);
    const std::string folder = *repository_ / name;
    std::filesystem::copy(golden.Folder(), folder);
    const std::string file = folder + "/model.safetensors";
    std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
    const absl::Status status = client_->LoadModel(name).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("model.safetensors"));
    std::filesystem::copy(golden.Folder() + "/model.safetensors", file,
                          std::filesystem::copy_options::overwrite_existing);
    std::ofstream(folder + "/config.json")
        << R"({"quantization_config": {"quant_method": ")" << format << R"(", "bits": 77}})";
    EXPECT_FALSE(client_->LoadModel(name).ok());
    EXPECT_EQ(client_->GetModel(name).status().code(), absl::StatusCode::kNotFound);
  }
  EXPECT_EQ(WeightsBytes(), before);
}

}  // namespace
}  // namespace awqd
