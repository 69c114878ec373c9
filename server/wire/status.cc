// Status codes, and the details that go with them.
#include "server/wire/status.h"

#include <cstdint>
#include <optional>

#include "absl/random/random.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/base/retry_delay.h"
#include "kernels/base/text.h"
#include "server/engine/engine.h"
#include "server/obs/logging.h"

namespace awqd::wire {
namespace {

constexpr absl::string_view kFieldPayload = "awqd.field";
// Marks an INTERNAL status whose text was replaced already.
constexpr absl::string_view kSafePayload = "awqd.safe";

std::string PayloadOr(const absl::Status& status, absl::string_view url, std::string otherwise) {
  const absl::optional<absl::Cord> payload = status.GetPayload(url);
  return payload ? std::string(*payload) : std::move(otherwise);
}

std::string NewErrorId() {
  thread_local absl::BitGen bits;
  return absl::StrFormat("%08x", absl::Uniform<uint32_t>(bits));
}

absl::Status HideInternal(const absl::Status& status) {
  const std::string id = PayloadOr(status, engine::kErrorIdPayload, NewErrorId());
  obs::LogEvent(obs::LogLevel::kError, "internal error",
                {{"error_id", id}, {"message", obs::LogText(status.message(), 4096)}});
  absl::Status safe = absl::InternalError(
      absl::StrCat("internal error, error id ", id, " (the server's log says more under this id)"));
  safe.SetPayload(kSafePayload, absl::Cord("1"));
  return safe;
}

// Adds details for programs: the field that `visible` is about, when to try again. False: there are
// none.
bool AddDetails(const absl::Status& visible,
                google::protobuf::RepeatedPtrField<google::protobuf::Any>* details) {
  if (const std::string field = FieldOf(visible); !field.empty()) {
    google::rpc::BadRequest bad_request;
    auto* violation = bad_request.add_field_violations();
    violation->set_field(field);
    violation->set_description(std::string(visible.message()));
    (void)details->Add()->PackFrom(bad_request);
  }
  if (const std::optional<absl::Duration> delay = RetryDelayOf(visible)) {
    const int64_t nanoseconds = absl::ToInt64Nanoseconds(*delay);
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(nanoseconds / 1'000'000'000);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(nanoseconds % 1'000'000'000));
    (void)details->Add()->PackFrom(retry);
  }
  return !details->empty();
}

}  // namespace

absl::Status FieldError(absl::string_view field, absl::string_view got,
                        absl::string_view expected) {
  return WithField(
      absl::InvalidArgumentError(absl::StrCat(field, ": got ", got, ", expected ", expected)),
      field);
}

absl::Status WithField(absl::Status status, absl::string_view field) {
  status.SetPayload(kFieldPayload, absl::Cord(field));
  return status;
}

std::string FieldOf(const absl::Status& status) { return PayloadOr(status, kFieldPayload, ""); }

// Both number the codes as google.rpc.Code does.
grpc::StatusCode GrpcCode(absl::StatusCode code) {
  return code <= absl::StatusCode::kUnauthenticated ? static_cast<grpc::StatusCode>(code)
                                                    : grpc::StatusCode::UNKNOWN;
}

absl::Status ForClient(const absl::Status& status) {
  if (absl::IsInternal(status) && !status.GetPayload(kSafePayload)) return HideInternal(status);
  if (status.message().size() <= kMaxErrorBytes) return status;
  absl::Status clipped(status.code(),
                       absl::StrCat(ClipUtf8(status.message(), kMaxErrorBytes - 3), "..."));
  if (const std::string field = FieldOf(status); !field.empty()) {
    clipped = WithField(std::move(clipped), field);
  }
  if (const auto delay = RetryDelayOf(status)) clipped = WithRetryDelay(std::move(clipped), *delay);
  return clipped;
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const absl::Status visible = ForClient(status);
  const std::string message(visible.message());
  const grpc::StatusCode code = GrpcCode(visible.code());
  google::rpc::Status details;
  if (!AddDetails(visible, details.mutable_details())) return grpc::Status(code, message);
  details.set_code(code);
  details.set_message(message);
  return grpc::Status(code, message, details.SerializeAsString());
}

void ToProto(const absl::Status& status, v1::RequestError* error) {
  const absl::Status visible = ForClient(status);
  error->set_code(GrpcCode(visible.code()));
  error->set_message(std::string(visible.message()));
  AddDetails(visible, error->mutable_details());
}

}  // namespace awqd::wire
