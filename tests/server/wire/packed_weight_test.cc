// Inline weights: good ones decode, bad ones name the client's field.
#include "server/wire/packed_weight.h"

#include <cmath>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/kernels.h"
#include "server/wire/status.h"
#include "tests/server/requests.h"

namespace awqd::wire {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(PackedWeight, DecodesRawAndTypedTensors) {
  v1::PackedWeight packed = GoodPacked();
  v1::Tensor* zeros = packed.mutable_qzeros();
  zeros->clear_contents();
  zeros->mutable_ints()->add_values(0x75316420);
  zeros->mutable_ints()->add_values(-1);
  ASSERT_TRUE(CheckPacked(packed, 4096).ok());
  const HostWeight weight = *DecodePacked(packed);
  EXPECT_EQ(weight.k, 128);
  EXPECT_EQ(weight.n, 16);
  EXPECT_EQ(weight.group_rows(), 128);
  for (int column = 0; column < 8; ++column) EXPECT_EQ(weight.Zero(0, column), column);
  EXPECT_EQ(weight.Zero(0, 15), 15);
}

TEST(PackedWeight, TakesTheWholeOfKAsOneGroup) {
  v1::PackedWeight packed = GoodPacked();
  packed.set_group_size(-1);
  packed.set_bits(4);
  *packed.mutable_bias() = RawTensor(v1::BF16, {16}, 32);
  const HostWeight weight = *DecodePacked(packed);
  EXPECT_EQ(weight.group_rows(), 128);
  EXPECT_EQ(weight.bias.size(), 16u);
}

std::string Spoilt(const std::function<void(v1::PackedWeight*)>& spoil) {
  v1::PackedWeight packed = GoodPacked();
  spoil(&packed);
  absl::Status status = CheckPacked(packed, 1 << 20);
  if (status.ok()) status = DecodePacked(packed).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("tensor \"")));
  return FieldOf(status);
}

TEST(PackedWeight, NamesTheBadField) {
  using P = v1::PackedWeight;
  EXPECT_EQ(Spoilt([](P* p) { p->Clear(); }), "packed.qweight");
  EXPECT_EQ(Spoilt([](P* p) { p->clear_qzeros(); }), "packed.qzeros");
  EXPECT_EQ(Spoilt([](P* p) { p->clear_scales(); }), "packed.scales");
  EXPECT_EQ(Spoilt([](P* p) { p->set_bits(9); }), "packed.bits");
  EXPECT_EQ(Spoilt([](P* p) { p->set_group_size(-2); }), "packed.group_size");
  EXPECT_EQ(Spoilt([](P* p) { p->set_group_size(100); }), "packed.group_size");
  EXPECT_EQ(Spoilt([](P* p) { p->set_group_size(256); }), "packed.group_size");
  EXPECT_EQ(Spoilt([](P* p) { p->set_group_size(64); }), "packed.scales");
  EXPECT_EQ(Spoilt([](P* p) { p->mutable_qweight()->set_dtype(v1::FP32); }),
            "packed.qweight.dtype");
  EXPECT_EQ(Spoilt([](P* p) { p->mutable_qweight()->set_dtype(v1::DTYPE_UNSPECIFIED); }),
            "packed.qweight.dtype");
  EXPECT_EQ(Spoilt([](P* p) { *p->mutable_qweight() = RawTensor(v1::INT32, {256}, 1024); }),
            "packed.qweight.shape");
  EXPECT_EQ(Spoilt([](P* p) {
              *p->mutable_qweight() = RawTensor(v1::INT32, {128, 3}, 1536);
            }),
            "packed.qweight.shape");
  EXPECT_EQ(Spoilt([](P* p) {
              *p->mutable_qweight() = RawTensor(v1::INT32, {0, 2}, 0);
            }),
            "packed.qweight.shape");
  EXPECT_EQ(Spoilt([](P* p) {
              *p->mutable_qzeros() = RawTensor(v1::INT32, {2, 2}, 16);
            }),
            "packed.qzeros.shape");
  EXPECT_EQ(Spoilt([](P* p) {
              *p->mutable_scales() = RawTensor(v1::FP32, {1, 16}, 64);
            }),
            "packed.scales.dtype");
  EXPECT_EQ(Spoilt([](P* p) {
              *p->mutable_scales() = RawTensor(v1::FP16, {3, 16}, 96);
            }),
            "packed.scales");
  EXPECT_EQ(Spoilt([](P* p) { p->mutable_scales()->mutable_raw()->at(3) = '\x7e'; }),
            "packed.scales");  // an FP16 NaN
  EXPECT_EQ(Spoilt([](P* p) { *p->mutable_bias() = RawTensor(v1::FP16, {8}, 16); }),
            "packed.bias.shape");
  EXPECT_EQ(Spoilt([](P* p) {
              *p->mutable_bias() = RawTensor(v1::FP16, {1, 16}, 32);
            }),
            "packed.bias.shape");
  EXPECT_EQ(Spoilt([](P* p) { p->mutable_scales()->mutable_raw()->pop_back(); }),
            "packed.scales.raw");
  EXPECT_EQ(Spoilt([](P* p) { p->mutable_scales()->mutable_shared_memory()->set_size(32); }),
            "packed.scales.shared_memory");
}

TEST(PackedWeight, MessagesSpeakOfTheRequest) {
  v1::PackedWeight packed = GoodPacked();
  *packed.mutable_scales() = RawTensor(v1::FP32, {1, 16}, 64);
  EXPECT_EQ(std::string(DecodePacked(packed).status().message()),
            "packed.scales.dtype: got FP32, expected FP16 or BF16");
  packed = GoodPacked();
  packed.clear_qzeros();
  EXPECT_THAT(std::string(DecodePacked(packed).status().message()),
              HasSubstr("packed.qzeros: got nothing, expected INT32 [K/group_size, N*bits/32]"));
}

// --- By the name of a format ---

v1::PackedWeight Named() {
  const v1::PackedWeight old = GoodPacked();
  v1::PackedWeight packed;
  packed.set_format("awq");
  auto& tensors = *packed.mutable_tensors();
  tensors["qweight"] = old.qweight();
  tensors["qzeros"] = old.qzeros();
  tensors["scales"] = old.scales();
  (*packed.mutable_settings())["group_size"] = "128";
  return packed;
}

TEST(PackedWeight, OldFieldsAndNamedOnesAreTheSame) {
  const HostWeight old = *DecodePacked(GoodPacked());
  v1::PackedWeight packed = Named();
  ASSERT_TRUE(CheckPacked(packed, 1 << 20).ok());
  auto named = DecodePacked(packed);
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_EQ(named->codes, old.codes);
  EXPECT_EQ(named->scheme, old.scheme);
  EXPECT_EQ(named->format, "awq");
  packed.clear_format();
  packed.mutable_tensors()->erase("scales");
  *packed.mutable_scales() = GoodPacked().scales();
  named = DecodePacked(packed);
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_EQ(named->scales, old.scales);
}

TEST(PackedWeight, NamesTheBadEntry) {
  using P = v1::PackedWeight;
  const auto spoilt = [](const std::function<void(P*)>& spoil) {
    return Spoilt([&](P* p) {
      *p = Named();
      spoil(p);
    });
  };
  EXPECT_EQ(spoilt([](P* p) { p->set_format("onnx"); }), "packed.format");
  EXPECT_EQ(spoilt([](P* p) { p->set_format(std::string(5000, '\x01')); }), "packed.format");
  EXPECT_EQ(spoilt([](P* p) { (*p->mutable_tensors())["w\n"] = {}; }), "packed.tensors[\"w\\n\"]");
  EXPECT_EQ(spoilt([](P* p) { (*p->mutable_tensors())["bias"] = {}; }),
            "packed.tensors[\"bias\"].dtype");
  EXPECT_EQ(spoilt([](P* p) { p->mutable_tensors()->erase("scales"); }),
            "packed.tensors[\"scales\"]");
  EXPECT_EQ(spoilt([](P* p) { *p->mutable_scales() = p->tensors().at("scales"); }),
            "packed.tensors[\"scales\"]");
  EXPECT_EQ(spoilt([](P* p) { (*p->mutable_settings())["sizes"] = std::string("1"); }),
            "packed.settings[\"sizes\"]");
  EXPECT_EQ(spoilt([](P* p) { p->set_group_size(128); }), "packed.settings[\"group_size\"]");
  EXPECT_EQ(spoilt([](P* p) { (*p->mutable_settings())["group_size"] = std::string("x"); }),
            "packed.settings[\"group_size\"]");
  EXPECT_EQ(spoilt([](P* p) { (*p->mutable_settings())["group_size"] = std::string(65, '1'); }),
            "packed.settings[\"group_size\"]");
  EXPECT_EQ(spoilt([](P* p) { (*p->mutable_settings())["version"] = "gemv"; }),
            "packed.settings[\"version\"]");
  EXPECT_EQ(spoilt([](P* p) { (*p->mutable_settings())["zero_point"] = "maybe"; }),
            "packed.settings[\"zero_point\"]");
}

// --- Other formats ---

// As a person types it: K = 2, N = 3, 8 bits, symmetric.
v1::PackedWeight Plain() {
  v1::PackedWeight packed;
  packed.set_format("plain");
  (*packed.mutable_settings())["symmetric"] = std::string("true");
  v1::Tensor& codes = (*packed.mutable_tensors())["codes"];
  codes.set_dtype(v1::UINT8);
  for (const int64_t dim : {2, 3}) codes.add_shape(dim);
  for (const int64_t code : {129, 130, 131, 127, 126, 125}) {
    codes.mutable_ints()->add_values(code);
  }
  v1::Tensor& scales = (*packed.mutable_tensors())["scales"];
  scales.set_dtype(v1::FP32);
  for (const int64_t dim : {1, 3}) scales.add_shape(dim);
  for (const float scale : {0.5f, 0.25f, 2.0f}) scales.mutable_floats()->add_values(scale);
  return packed;
}

TEST(PackedWeight, PlainByHand) {
  const v1::PackedWeight packed = Plain();
  ASSERT_TRUE(CheckPacked(packed, 6 + 12).ok());
  const auto weight = DecodePacked(packed);
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->format, "plain");
  EXPECT_EQ(ToString(weight->scheme), "w8cs+fp32");
  EXPECT_EQ(weight->Code(1, 2), 125);
  EXPECT_EQ(weight->Scale(0, 2), 2.0f);
}

TEST(PackedWeight, OtherFormatsNameTheBadEntry) {
  using P = v1::PackedWeight;
  const auto spoilt = [](const std::function<void(P*)>& spoil) {
    return Spoilt([&](P* p) {
      *p = Plain();
      spoil(p);
    });
  };
  const auto tensor = [](P* p, const char* name) -> v1::Tensor& {
    return (*p->mutable_tensors())[name];
  };
  EXPECT_EQ(spoilt([&](P* p) { tensor(p, "codes").mutable_ints()->set_values(4, 256); }),
            "packed.tensors[\"codes\"].ints.values[4]");
  EXPECT_EQ(spoilt([&](P* p) { tensor(p, "codes").mutable_ints()->add_values(0); }),
            "packed.tensors[\"codes\"].ints");
  EXPECT_EQ(spoilt([&](P* p) { tensor(p, "codes").mutable_shape()->Set(0, int64_t{1} << 62); }),
            "packed.tensors[\"codes\"].shape");
  EXPECT_EQ(spoilt([&](P* p) { tensor(p, "scales").mutable_floats()->set_values(0, NAN); }),
            "packed.tensors[\"scales\"]");
  EXPECT_EQ(spoilt([&](P* p) { tensor(p, "scales").set_dtype(v1::INT32); }),
            "packed.tensors[\"scales\"].floats");
  EXPECT_EQ(spoilt([](P* p) { (*p->mutable_settings())["bits"] = std::string("7"); }),
            "packed.tensors[\"codes\"]");
  EXPECT_EQ(spoilt([](P* p) { p->mutable_settings()->clear(); }), "packed.tensors[\"zeros\"]");
  EXPECT_EQ(spoilt([](P* p) { p->set_group_size(2); }), "packed.group_size");
  EXPECT_EQ(spoilt([&](P* p) { *p->mutable_bias() = tensor(p, "scales"); }), "packed.bias");
  EXPECT_EQ(spoilt([](P* p) { p->set_format("fastertransformer"); }), "packed.tensors[\"codes\"]");
}

// A checkpoint's group_size is for linears of any size; a request's group_size is for its own
// weight.
TEST(PackedWeight, AGroupLargerThanTheMatrix) {
  v1::PackedWeight packed;
  packed.set_format("gptq");
  auto& tensors = *packed.mutable_tensors();
  tensors["qweight"] = RawTensor(v1::INT32, {8, 8}, 256);
  tensors["qzeros"] = RawTensor(v1::INT32, {1, 1}, 4);
  tensors["scales"] = RawTensor(v1::FP16, {1, 8}, 16);
  (*packed.mutable_settings())["bits"] = "4";
  (*packed.mutable_settings())["group_size"] = "64";
  EXPECT_TRUE(DecodePacked(packed).ok()) << DecodePacked(packed).status();
  (*packed.mutable_settings())["group_size"] = "65";
  const absl::Status status = DecodePacked(packed).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("got 65, expected -1 or at most K = 64"));
}

TEST(PackedWeight, EveryFormatCountsItsBytes) {
  const absl::Status status = CheckPacked(Plain(), 6 + 11);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_EQ(FieldOf(status), "packed");
}

TEST(PackedWeight, IsBounded) {
  const int64_t bytes = 1024 + 8 + 32;
  EXPECT_TRUE(CheckPacked(GoodPacked(), bytes).ok());
  const absl::Status status = CheckPacked(GoodPacked(), bytes - 1);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("max_inline_weight_bytes"));
}

// A weight [K, N] at 4 bits with one group.
v1::PackedWeight OfShape(int64_t k, int64_t n) {
  v1::PackedWeight packed;
  *packed.mutable_qweight() = RawTensor(v1::INT32, {k, n / 8}, k * n / 2);
  *packed.mutable_qzeros() = RawTensor(v1::INT32, {1, n / 8}, n / 2);
  *packed.mutable_scales() = RawTensor(v1::FP16, {1, n}, n * 2);
  packed.set_group_size(-1);
  return packed;
}

TEST(PackedWeight, IsMeasuredBeforeItIsPrepared) {
  const auto device = OpenDevice("cpu", {.cpu_threads = 1});
  ASSERT_TRUE(device.ok()) << device.status();
  v1::PackedWeight with_bias = OfShape(256, 64);
  *with_bias.mutable_bias() = RawTensor(v1::BF16, {64}, 128);
  for (const v1::PackedWeight& packed :
       {OfShape(1, 4096), OfShape(128, 16), OfShape(300, 8), with_bias, Named(), Plain()}) {
    const absl::StatusOr<PackedSize> size = MeasurePacked(packed, (*device)->info());
    ASSERT_TRUE(size.ok()) << size.status();
    const absl::StatusOr<HostWeight> host = DecodePacked(packed);
    ASSERT_TRUE(host.ok()) << host.status();
    const auto prepared = PrepareWeight(*host, **device);
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    EXPECT_EQ(size->prepared, (*prepared)->bytes());
    const auto parts = static_cast<int64_t>(host->codes.size() + host->zeros.size() +
                                            host->scales.size() + 4 * host->bias.size());
    EXPECT_GE(size->decoded, parts);
    EXPECT_LE(size->decoded, 2 * parts);
  }
  EXPECT_EQ(FieldOf(MeasurePacked(v1::PackedWeight(), (*device)->info()).status()),
            "packed.qweight");
}

TEST(PackedWeight, WhatItBecomesIsBounded) {
  EXPECT_TRUE(CheckPrepared({.decoded = 1 << 20, .prepared = 200}, 100).ok());
  const absl::Status status = CheckPrepared({.prepared = 201}, 100);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_EQ(FieldOf(status), "packed");
  EXPECT_THAT(
      std::string(status.message()),
      HasSubstr("packed: got 201 bytes once prepared for the device, expected at most 200"));
}

}  // namespace
}  // namespace awqd::wire
