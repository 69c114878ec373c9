// Errors that are sent to clients.
#include "server/wire/status.h"

#include "absl/strings/cord.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "kernels/base/retry_delay.h"
#include "server/engine/engine.h"
#include "server/obs/logging.h"

namespace awqd::wire {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(ToGrpc, KeepsEveryCode) {
  for (int code = 0; code <= 16; ++code) {
    const auto absl_code = static_cast<absl::StatusCode>(code);
    EXPECT_EQ(static_cast<int>(GrpcCode(absl_code)), code);
  }
  EXPECT_EQ(GrpcCode(static_cast<absl::StatusCode>(99)), grpc::StatusCode::UNKNOWN);
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
}

TEST(ToGrpc, CarriesTheFieldForPrograms) {
  const grpc::Status status = ToGrpc(FieldError("activations.shape", "[2]", "[3]"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "activations.shape: got [2], expected [3]");
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), 3);
  google::rpc::BadRequest bad;
  ASSERT_TRUE(details.details(0).UnpackTo(&bad));
  EXPECT_EQ(bad.field_violations(0).field(), "activations.shape");
}

TEST(ToProto, CarriesTheSameDetailsOnAStream) {
  const absl::Status error = FieldError("activations.shape", "[2]", "[3]");
  v1::RequestError on_stream;
  ToProto(error, &on_stream);
  google::rpc::Status unary;
  ASSERT_TRUE(unary.ParseFromString(ToGrpc(error).error_details()));
  ASSERT_EQ(on_stream.details_size(), 1);
  EXPECT_EQ(on_stream.details(0).SerializeAsString(), unary.details(0).SerializeAsString());
  v1::RequestError plain;
  ToProto(absl::NotFoundError("no"), &plain);
  EXPECT_EQ(plain.details_size(), 0);
}

TEST(ToGrpc, CarriesTheRetryDelayForPrograms) {
  const absl::Status full = WithRetryDelay(absl::ResourceExhaustedError("full"),
                                           absl::Seconds(2) + absl::Milliseconds(5));
  const grpc::Status status = ToGrpc(full);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), 8);
  ASSERT_EQ(details.details_size(), 1);
  google::rpc::RetryInfo retry;
  ASSERT_TRUE(details.details(0).UnpackTo(&retry));
  EXPECT_EQ(retry.retry_delay().seconds(), 2);
  EXPECT_EQ(retry.retry_delay().nanos(), 5'000'000);
  ASSERT_TRUE(details.ParseFromString(ToGrpc(WithField(full, "f")).error_details()));
  EXPECT_EQ(details.details_size(), 2);
}

TEST(ForClient, KeepsTheRetryDelayOfALongMessage) {
  const absl::Status status = ForClient(
      WithRetryDelay(absl::ResourceExhaustedError(std::string(5000, 'x')), absl::Seconds(1)));
  EXPECT_LE(status.message().size(), kMaxErrorBytes);
  EXPECT_EQ(RetryDelayOf(status), absl::Seconds(1));
}

TEST(ToGrpc, HidesInternalTextBehindAnId) {
  obs::SetUpLogging(obs::LogLevel::kInfo, obs::LogFormat::kText);
  testing::internal::CaptureStderr();
  const grpc::Status status = ToGrpc(absl::InternalError("secret at 0xdead"));
  obs::FlushLog(absl::Seconds(20));
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_THAT(status.error_message(), HasSubstr("error id "));
  EXPECT_THAT(status.error_message(), Not(HasSubstr("secret")));
  const size_t id = status.error_message().find("error id ") + 9;
  EXPECT_THAT(log, HasSubstr("error_id=" + status.error_message().substr(id, 8)));
  EXPECT_THAT(log, HasSubstr("secret at 0xdead"));
}

TEST(ToGrpc, UsesTheIdThatComesWithTheStatus) {
  absl::Status status = absl::InternalError("boom");
  status.SetPayload(engine::kErrorIdPayload, absl::Cord("batch-7"));
  EXPECT_THAT(ToGrpc(status).error_message(), HasSubstr("batch-7"));
}

TEST(ForClient, IsIdempotent) {
  const absl::Status once = ForClient(absl::InternalError("boom"));
  EXPECT_EQ(ForClient(once).message(), once.message());
}

TEST(ForClient, CutsLongMessagesBetweenCharacters) {
  std::string message;
  for (int i = 0; i < 2000; ++i) message += "\xc3\xa9";  // two bytes a character
  const absl::Status status = ForClient(WithField(absl::NotFoundError(message), "f"));
  EXPECT_LE(status.message().size(), kMaxErrorBytes);
  EXPECT_EQ(FieldOf(status), "f");
  EXPECT_EQ((status.message().size() - 3) % 2, 0u);
}

}  // namespace
}  // namespace awqd::wire
