// The echo server's answers are whole responses of the size that awqd would send.
#include "tests/bench/echo.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace awqd::bench {
namespace {

v1::QuantizedMatmulRequest Request(v1::DType dtype, int64_t tokens, int64_t k) {
  v1::QuantizedMatmulRequest request;
  request.mutable_weight()->set_model("m");
  request.mutable_weight()->set_weight("w");
  request.mutable_activations()->set_dtype(dtype);
  request.mutable_activations()->add_shape(tokens);
  request.mutable_activations()->add_shape(k);
  request.mutable_activations()->set_raw(
      std::string(tokens * k * (dtype == v1::FP32 ? 4 : 2), 'x'));
  return request;
}

grpc::ByteBuffer BufferOf(const std::string& bytes, size_t piece) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += piece) slices.emplace_back(bytes.substr(at, piece));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

TEST(EchoTest, AnswersAreWholeResponsesOfTheRightSize) {
  const EchoService service({{"w", {4, 16}}}, 1 << 20);
  for (const v1::DType dtype : {v1::FP16, v1::FP32}) {
    for (const int64_t tokens : {0, 1, 3, 300}) {
      for (const size_t piece : {size_t{1}, size_t{1000000}}) {
        grpc::ByteBuffer buffer;
        const grpc::ByteBuffer request =
            BufferOf(Request(dtype, tokens, 4).SerializeAsString(), piece);
        ASSERT_TRUE(service.Answer(request, &buffer).ok());
        grpc::Slice slice;
        ASSERT_TRUE(buffer.DumpToSingleSlice(&slice).ok());
        v1::QuantizedMatmulResponse response;
        ASSERT_TRUE(response.ParseFromArray(slice.begin(), static_cast<int>(slice.size())));
        EXPECT_EQ(response.output().dtype(), dtype);
        EXPECT_THAT(response.output().shape(), ::testing::ElementsAre(tokens, 16));
        EXPECT_EQ(response.output().raw().size(), tokens * 16 * (dtype == v1::FP32 ? 4u : 2u));
        EXPECT_EQ(response.execution().batch_tokens(), tokens);
      }
    }
  }
}

TEST(EchoTest, RefusesWhatItCannotAnswer) {
  const EchoService service({{"w", {4, 16}}}, 1000);
  grpc::ByteBuffer buffer;
  const auto code = [&](const std::string& bytes) {
    return service.Answer(BufferOf(bytes, 5), &buffer).error_code();
  };
  const std::string whole = Request(v1::FP16, 2, 4).SerializeAsString();
  EXPECT_EQ(code(whole), grpc::OK);
  EXPECT_EQ(code(whole.substr(0, whole.size() - 3)), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(code("\xff\xff\xff"), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(code(Request(v1::FP16, 200, 4).SerializeAsString()), grpc::RESOURCE_EXHAUSTED);
  v1::QuantizedMatmulRequest other = Request(v1::FP16, 2, 4);
  other.mutable_weight()->set_weight("absent");
  EXPECT_EQ(code(other.SerializeAsString()), grpc::NOT_FOUND);
}

}  // namespace
}  // namespace awqd::bench
