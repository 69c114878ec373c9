// Requests for KV4: every branch of validation, and how answers are encoded.
#include "server/wire/kv_wire.h"

#include <cstring>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/wire/status.h"
#include "server/wire/tensor.h"
#include "tests/server/requests.h"

namespace awqd::wire {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kMostKvBytes = 1 << 20;

v1::QuantizeKvRequest GoodQuantize() {
  v1::QuantizeKvRequest request;
  *request.mutable_block() = RawTensor(v1::FP16, {2, 3, 5}, 60);
  return request;
}

v1::DequantizeKvRequest GoodDequantizeKv() {
  v1::DequantizeKvRequest request;
  *request.mutable_codes() = RawTensor(v1::UINT8, {2, 3, 3}, 18);
  *request.mutable_scales() = RawTensor(v1::FP16, {2, 3}, 12);
  *request.mutable_zeros() = RawTensor(v1::FP16, {2, 3}, 12);
  request.set_head_dim(5);
  return request;
}

std::string Spoilt(const std::function<void(v1::QuantizeKvRequest*)>& spoil) {
  v1::QuantizeKvRequest request = GoodQuantize();
  spoil(&request);
  absl::Status status = CheckRequest(request);
  if (status.ok()) status = BuildKv(&request, kMostKvBytes).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return FieldOf(status);
}

std::string SpoiltBack(const std::function<void(v1::DequantizeKvRequest*)>& spoil) {
  v1::DequantizeKvRequest request = GoodDequantizeKv();
  spoil(&request);
  absl::Status status = CheckRequest(request);
  if (status.ok()) status = BuildKv(&request, kMostKvBytes).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return FieldOf(status);
}

TEST(QuantizeKv, NamesTheBadField) {
  using R = v1::QuantizeKvRequest;
  EXPECT_EQ(Spoilt([](R* r) { r->clear_block(); }), "block");
  EXPECT_EQ(Spoilt([](R* r) { r->mutable_block()->set_dtype(v1::INT8); }), "block.dtype");
  EXPECT_EQ(Spoilt([](R* r) {
              *r->mutable_block() = RawTensor(v1::FP16, {2, 15}, 60);
            }),
            "block.shape");
  EXPECT_EQ(Spoilt([](R* r) {
              *r->mutable_block() = RawTensor(v1::FP16, {2, 0, 5}, 0);
            }),
            "block.shape");
  EXPECT_EQ(Spoilt([](R* r) { r->set_scale_dtype(v1::BF16); }), "scale_dtype");
  EXPECT_EQ(Spoilt([](R* r) { *r->mutable_zeros() = RawTensor(v1::FP16, {1}, 2); }), "scales");
  EXPECT_EQ(Spoilt([](R* r) {
              *r->mutable_scales() = RawTensor(v1::FP16, {2, 3}, 12);
              *r->mutable_zeros() = RawTensor(v1::FP16, {2, 3}, 12);
            }),
            "scales.shape")
      << "its own are computed";
  EXPECT_EQ(Spoilt([](R* r) {
              *r->mutable_scales() = RawTensor(v1::FP16, {3}, 6);
              *r->mutable_zeros() = RawTensor(v1::FP32, {3}, 12);
            }),
            "zeros.dtype");
  EXPECT_EQ(Spoilt([](R* r) {
              *r->mutable_scales() = RawTensor(v1::FP16, {3}, 6);
              *r->mutable_zeros() = RawTensor(v1::FP16, {1}, 2);
            }),
            "zeros.shape");
  EXPECT_EQ(Spoilt([](R* r) {
              *r->mutable_scales() = *r->mutable_zeros() = RawTensor(v1::FP16, {1}, 2);
              r->set_scale_dtype(v1::FP32);
            }),
            "scale_dtype");
  EXPECT_EQ(Spoilt([](R* r) { r->set_request_id(std::string(257, 'x')); }), "request_id");
  EXPECT_EQ(Spoilt([](R* r) { r->set_output_encoding(static_cast<v1::Encoding>(9)); }),
            "output_encoding");
}

TEST(DequantizeKv, NamesTheBadField) {
  using R = v1::DequantizeKvRequest;
  EXPECT_EQ(SpoiltBack([](R* r) { r->clear_codes(); }), "codes");
  EXPECT_EQ(SpoiltBack([](R* r) { r->mutable_codes()->set_dtype(v1::INT8); }), "codes.dtype");
  EXPECT_EQ(SpoiltBack([](R* r) { r->set_head_dim(7); }), "head_dim");
  EXPECT_EQ(SpoiltBack([](R* r) { r->set_head_dim(-1); }), "head_dim");
  EXPECT_EQ(SpoiltBack([](R* r) {
              r->clear_scales();
              r->clear_zeros();
            }),
            "scales");
  EXPECT_EQ(SpoiltBack([](R* r) { r->clear_zeros(); }), "zeros");
  EXPECT_EQ(SpoiltBack([](R* r) {
              *r->mutable_scales() = RawTensor(v1::FP16, {3, 2}, 12);
            }),
            "zeros.shape");
  EXPECT_EQ(SpoiltBack([](R* r) { r->set_output_dtype(v1::UINT8); }), "output_dtype");
  EXPECT_EQ(SpoiltBack([](R* r) { r->set_form(static_cast<v1::KvForm>(7)); }), "form");
  EXPECT_EQ(SpoiltBack([](R* r) {
              r->set_form(v1::FMA);
              r->set_output_dtype(v1::FP32);
            }),
            "form");
}

TEST(QuantizeKv, BecomesAWorkAndItsResultAnAnswer) {
  v1::QuantizeKvRequest request = GoodQuantize();
  request.set_scale_dtype(v1::FP32);
  request.set_output_encoding(v1::VALUES);
  const auto job = BuildKv(&request, kMostKvBytes);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->inputs[0].bytes.size(), 60u);
  EXPECT_EQ(job->work.per, Kv4Per::kRow);
  std::string bytes(job->work.result_bytes(), '\0');
  bytes[17] = '\xf7';  // the last byte of codes
  const float two = 2;
  std::memcpy(bytes.data() + job->work.scale_offset(), &two, 4);
  const engine::Payload result(nullptr, bytes.data(), static_cast<int64_t>(bytes.size()));
  Answer first = {result, &job->answer};
  v1::QuantizeKvResponse response;
  FillScales(&first, &response);
  EXPECT_THAT(job->answer.shape, ElementsAre(2, 3, 3));
  EXPECT_EQ(first.result.size(), 18);
  EXPECT_THAT(response.scales().shape(), ElementsAre(2, 3));
  EXPECT_EQ(response.scales().floats().values(0), 2);
  EXPECT_EQ(response.zeros().floats().values_size(), 6);
  v1::Tensor codes;
  FillTensor(first.result.view(), first.form->dtype, first.form->shape, first.form->encoding,
             &codes);
  EXPECT_EQ(codes.ints().values(17), 0xf7);
}

TEST(QuantizeKv, AnAnswerThatCannotBeSentIsRefused) {
  v1::QuantizeKvRequest request = GoodQuantize();
  const absl::Status status = BuildKv(&request, 1024 + 10).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  v1::DequantizeKvRequest back = GoodDequantizeKv();
  EXPECT_TRUE(absl::IsResourceExhausted(BuildKv(&back, 1024 + 59).status()));
  back = GoodDequantizeKv();
  EXPECT_TRUE(BuildKv(&back, 1024 + 60).ok());
}

}  // namespace
}  // namespace awqd::wire
