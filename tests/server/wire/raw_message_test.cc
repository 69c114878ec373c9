// RawMessage and Encode: slices in, slices out, and the owner of the payload meanwhile.
#include "server/wire/raw_message.h"

#include <cstring>
#include <string>
#include <vector>

#include "awqd/v1/inference.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/kernels.h"

namespace awqd::wire {
namespace {

using ::testing::ElementsAre;

std::string Flat(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string out;
  for (const grpc::Slice& slice : slices) {
    out.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return out;
}

class RawMessageTest : public ::testing::Test {
 protected:
  engine::Payload Filled(int64_t bytes) {
    engine::Payload payload = *staging_.Get(bytes);
    std::memset(payload.data(), 'y', bytes);
    return payload;
  }

  grpc::ByteBuffer EncodeMatmul(const engine::Payload& result, v1::Encoding encoding) {
    v1::QuantizedMatmulResponse message;
    message.set_request_id("id");
    message.mutable_execution()->set_kernel("k");
    const AnswerForm form = {DType::kFp32, {result.size() / 4, 1}, encoding};
    return Encode(message, v1::QuantizedMatmulResponse::kOutputFieldNumber, {result, &form},
                  &staging_);
  }

  std::unique_ptr<Device> device_ = *OpenDevice("cpu", {.cpu_threads = 1});
  engine::StagingPool staging_{device_.get(), 1 << 20};
};

TEST_F(RawMessageTest, EveryAnswerIsAMessageOfTheApi) {
  for (int64_t bytes :
       {int64_t{0}, int64_t{4}, kSendInPlaceBytes - 4, kSendInPlaceBytes, 3 * kSendInPlaceBytes}) {
    for (v1::Encoding encoding : {v1::RAW, v1::VALUES}) {
      v1::QuantizedMatmulResponse parsed;
      ASSERT_TRUE(parsed.ParseFromString(Flat(EncodeMatmul(Filled(bytes), encoding)))) << bytes;
      EXPECT_EQ(parsed.request_id(), "id");
      EXPECT_EQ(parsed.execution().kernel(), "k");
      EXPECT_EQ(parsed.output().dtype(), v1::FP32);
      EXPECT_THAT(parsed.output().shape(), ElementsAre(bytes / 4, 1));
      if (encoding == v1::RAW) {
        EXPECT_EQ(parsed.output().raw(), std::string(bytes, 'y'));
      } else {
        EXPECT_EQ(parsed.output().floats().values_size(), bytes / 4);
      }
    }
  }
}

TEST_F(RawMessageTest, ALargePayloadIsSentFromWhereItLies) {
  engine::Payload payload = Filled(kSendInPlaceBytes);
  const char* const data = payload.data();
  grpc::ByteBuffer buffer = EncodeMatmul(payload, v1::RAW);
  payload = engine::Payload();
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(buffer.Dump(&slices).ok());
  ASSERT_EQ(slices.size(), 2u);
  EXPECT_EQ(reinterpret_cast<const char*>(slices[1].begin()), data);
  EXPECT_EQ(staging_.stats().copied_bytes, 0);
  EXPECT_GT(staging_.stats().lent_bytes, 0) << "gRPC is still sending it";
  buffer.Clear();
  EXPECT_GT(staging_.stats().lent_bytes, 0);
  slices.clear();
  EXPECT_EQ(staging_.stats().lent_bytes, 0);
}

TEST_F(RawMessageTest, ASmallPayloadGivesItsBufferBackAtOnce) {
  const grpc::ByteBuffer buffer = EncodeMatmul(Filled(1000), v1::RAW);
  EXPECT_EQ(staging_.stats().lent_bytes, 0);
  EXPECT_EQ(staging_.stats().copied_bytes, 1000);
}

TEST_F(RawMessageTest, TakesEverySliceOfAMessage) {
  const grpc::Slice slices[] = {grpc::Slice(std::string("a")), grpc::Slice(std::string("")),
                                grpc::Slice(std::string(100, 'b')), grpc::Slice(std::string("c"))};
  grpc::ByteBuffer buffer(slices, 4);
  RawMessage message;
  message.TakeSlices(&buffer);
  EXPECT_FALSE(buffer.Valid());
  EXPECT_EQ(message.size(), 102);
  std::string all;
  for (absl::string_view piece : message.pieces()) all.append(piece.data(), piece.size());
  EXPECT_EQ(all, "a" + std::string(100, 'b') + "c");
  message.Free();
  EXPECT_TRUE(message.pieces().empty());
  RawMessage none;
  none.TakeSlices(&buffer);
  EXPECT_EQ(none.size(), 0);
}

}  // namespace
}  // namespace awqd::wire
