// A prepared request is checked with one token. A call completes a copy of it with its tokens and
// ranges, in the codec; then it is a request like any other.
#include "server/services/rings/prepare.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "server/services/methods.h"
#include "server/services/request_handler.h"
#include "server/wire/matmul_wire.h"
#include "server/wire/status.h"
#include "server/wire/tensor.h"

namespace awqd::services::rings {
namespace {

using ring::Call, ring::PreparedBody, ring::PreparedPtr;
using wire::FieldError;

// Before the answer's size is known.
constexpr int64_t kAnySize = int64_t{1} << 62;

template <typename Request>
inline constexpr bool kHasExperts = requires(Request request) {
  request.mutable_expert_ids();
};

// Where the tensors of one call are, in bytes.
struct CallRanges {
  int64_t tokens = 1;
  int64_t x_offset = 0, x_bytes = 0;
  int64_t y_offset = 0, y_bytes = 0;
};

// A tensor of each call beside its activations, which lies in the payload.
struct Extra {
  v1::Tensor* tensor;
  absl::string_view field;
  DTypeMask allowed;
  int64_t PreparedBody::*bytes;  // of a token
  int64_t ring::Request::*offset;
  absl::string_view offset_name;

  bool is_scales() const { return bytes == &PreparedBody::scales_bytes; }
};

// Those that a prepared request has. Scales with contents are of all its calls.
template <typename Request>
absl::InlinedVector<Extra, 3> FindExtras(Request* request) {
  absl::InlinedVector<Extra, 3> out;
  if constexpr (kHasExperts<Request>) {
    if (request->has_expert_ids()) {
      out.push_back({request->mutable_expert_ids(), "expert_ids", MaskOf(DType::kInt32),
                     &PreparedBody::ids_bytes, &ring::Request::ids_offset, "ids_offset"});
    }
    if (request->has_router_weights()) {
      out.push_back({request->mutable_router_weights(), "router_weights", kFloatingMask,
                     &PreparedBody::router_bytes, &ring::Request::router_offset, "router_offset"});
    }
    if (request->router().has_logits()) {
      out.push_back({request->mutable_router()->mutable_logits(), "router.logits", kFloatingMask,
                     &PreparedBody::router_bytes, &ring::Request::router_offset, "router_offset"});
    }
  }
  // Floating activations of experts have scales of experts.
  const bool of_tokens = !kHasExperts<Request> || request->activations().dtype() == v1::FP8_E4M3;
  if (of_tokens && request->has_activation_scales() &&
      request->activation_scales().contents_case() == v1::Tensor::CONTENTS_NOT_SET) {
    out.push_back({request->mutable_activation_scales(), "activation_scales", MaskOf(DType::kFp32),
                   &PreparedBody::scales_bytes, &ring::Request::scales_offset, "scales_offset"});
  }
  return out;
}

// Sets the shape [tokens, last dimension] of a tensor whose prepared shape is [..., last].
void SetTokens(int64_t tokens, v1::Tensor* tensor) {
  const int64_t last = tensor->shape_size() == 0 ? 0 : tensor->shape(tensor->shape_size() - 1);
  tensor->clear_shape();
  tensor->add_shape(tokens);
  tensor->add_shape(last);
}

// Whether a range lies in the payload of the ring: the prepared call names no memory.
bool InPayload(const v1::SharedMemory& range) {
  return range.name().empty() && range.region().empty();
}

void SetRange(int64_t offset, int64_t size, v1::SharedMemory* range) {
  range->set_offset(offset);
  range->set_size(size);
}

// Completes a copy of a prepared request, but for its extra tensors.
template <typename Request>
void Complete(const CallRanges& call, Request* request) {
  v1::Tensor* const x = request->mutable_activations();
  SetTokens(call.tokens, x);
  SetRange(call.x_offset, call.x_bytes, x->mutable_shared_memory());
  SetRange(call.y_offset, call.y_bytes, request->mutable_output_shared_memory());
}

// Completes an extra tensor of such a copy.
void CompleteExtra(int64_t tokens, std::string bytes, const Extra& extra) {
  SetTokens(tokens, extra.tensor);
  // [tokens], or for blocks of E4M3 activations [tokens, blocks].
  if (extra.is_scales() && extra.tensor->shape(1) == 1) extra.tensor->mutable_shape()->RemoveLast();
  extra.tensor->set_raw(std::move(bytes));
}

// `per_token` bytes for each token. INVALID_ARGUMENT for a count that no call can have.
absl::StatusOr<int64_t> CountBytes(int64_t tokens, int64_t per_token) {
  const std::optional<int64_t> bytes = CheckedMul(tokens, per_token);
  if (bytes) return *bytes;
  return FieldError("tokens", absl::StrCat(tokens), "0 or more, whose bytes are below 2^63");
}

// The memory of a range of the payload.
absl::StatusOr<char*> FindPayload(const ring::Memory& memory, int64_t offset, int64_t bytes,
                                  absl::string_view field) {
  if (char* const found = memory.FindPayload(offset, bytes)) return found;
  return FieldError(
      field, absl::StrCat(offset, " for ", bytes, " bytes"),
      absl::StrCat("a range within the ring's payload of ", memory.payload_bytes(), " bytes"));
}

// The fields of a prepared request that a call writes, or that have no meaning in a ring.
template <typename Request>
absl::Status CheckTemplate(const Request& request) {
  const auto empty = [](const v1::Tensor& tensor, absl::string_view field) {
    const bool named = tensor.has_shared_memory() && field == "activations";
    if (tensor.contents_case() == v1::Tensor::CONTENTS_NOT_SET || named) return absl::OkStatus();
    return FieldError(field, "contents", "none: those of each call lie in shared memory");
  };
  if (request.has_packed()) {
    return FieldError("packed", "a weight", "none: a prepared call names a loaded one");
  }
  AWQD_RETURN_IF_ERROR(empty(request.activations(), "activations"));
  if constexpr (kHasExperts<Request>) {
    AWQD_RETURN_IF_ERROR(empty(request.expert_ids(), "expert_ids"));
    AWQD_RETURN_IF_ERROR(empty(request.router_weights(), "router_weights"));
    AWQD_RETURN_IF_ERROR(empty(request.router().logits(), "router.logits"));
  }
  return absl::OkStatus();
}

// A row of a tensor of a prepared request, in bytes.
absl::StatusOr<int64_t> RowBytes(const v1::Tensor& tensor, DTypeMask allowed,
                                 absl::string_view field) {
  AWQD_ASSIGN_OR_RETURN(const DType dtype,
                        wire::ParseDType(tensor.dtype(), allowed, absl::StrCat(field, ".dtype")));
  const int64_t last = tensor.shape_size() == 0 ? -1 : tensor.shape(tensor.shape_size() - 1);
  if (const auto bytes = CheckedMul(last, SizeOf(dtype))) return *bytes;
  return FieldError(absl::StrCat(field, ".shape"), absl::StrCat("a last dimension of ", last),
                    "[..., columns]");
}

template <typename Method>
class PreparedOf;

// One call: the request is complete when it is decoded, the answer goes to the ring.
template <typename Method>
class RingCodec final : public Codec<typename Method::Request> {
 public:
  using Request = typename Method::Request;

  RingCodec(std::shared_ptr<const PreparedOf<Method>> prepared, std::shared_ptr<Call> call)
      : prepared_(std::move(prepared)), call_(std::move(call)) {}

  const google::protobuf::Descriptor& type() const override { return *Request::descriptor(); }
  wire::PayloadPlace payload() const override { return {}; }
  absl::Status Decode(const wire::RawMessage&, const wire::FieldScan&,
                      wire::ParsedRequest<Request>* out) override {
    const ring::Request& slot = call_->request();
    const PreparedBody& body = prepared_->body();
    CallRanges ranges = {
        .tokens = slot.tokens, .x_offset = slot.x_offset, .y_offset = slot.y_offset};
    AWQD_ASSIGN_OR_RETURN(ranges.x_bytes, CountBytes(slot.tokens, body.x_bytes));
    AWQD_ASSIGN_OR_RETURN(ranges.y_bytes, CountBytes(slot.tokens, body.y_bytes));
    out->request = prepared_->request();
    Complete(ranges, &out->request);
    call_->state()->received_bytes += ranges.x_bytes;
    for (const Extra& extra : FindExtras(&out->request)) {
      AWQD_ASSIGN_OR_RETURN(const int64_t bytes, CountBytes(slot.tokens, body.*extra.bytes));
      AWQD_ASSIGN_OR_RETURN(
          const char* const data,
          FindPayload(*call_->memory(), slot.*extra.offset, bytes, extra.offset_name));
      CompleteExtra(slot.tokens, std::string(data, static_cast<size_t>(bytes)), extra);
      out->copied_bytes += bytes;
    }
    return absl::OkStatus();
  }
  // An object where the prepared call names one, else the payload of the ring.
  absl::StatusOr<SharedRange> Open(const Env& env, const std::string& owner,
                                   const v1::SharedMemory& range, SharedMemory::Access access,
                                   absl::string_view field) const override {
    const bool read = access == SharedMemory::Access::kRead;
    if (!InPayload(range)) {
      AWQD_ASSIGN_OR_RETURN(SharedRange out, env.regions->Open(owner, range, access, field));
      if (out.on_device()) out.SetPoints(call_->waits_for(), read ? nullptr : call_->marks());
      return out;
    }
    AWQD_ASSIGN_OR_RETURN(char* const data,
                          FindPayload(*call_->memory(), range.offset(), range.size(),
                                      read ? "x_offset" : "y_offset"));
    return SharedRange(call_->memory(), data, range.size());
  }
  std::string PeekId(wire::Pieces) const override { return ""; }
  grpc::ByteBuffer Encode(const std::string&, const engine::ExecutionReport& report,
                          const wire::Answer& answer, engine::StagingPool*) override {
    *call_->outcome() = {.kernel = report.kernel,
                         .device = report.device,
                         .queue_us = report.queue_us,
                         .compute_us = report.compute_us,
                         .batch_tokens = report.batch_tokens,
                         .batch_requests = report.batch_requests,
                         .path = static_cast<uint32_t>(
                             report.path == Path::kDequantize ? v1::DEQUANTIZE : v1::FUSED),
                         .y_bytes = answer.result.size()};
    call_->state()->sent_bytes += answer.result.size();
    return {};
  }

 private:
  const std::shared_ptr<const PreparedOf<Method>> prepared_;
  const std::shared_ptr<Call> call_;
};

template <typename Method>
class PreparedOf final : public ring::Prepared,
                         public std::enable_shared_from_this<PreparedOf<Method>> {
 public:
  using Request = typename Method::Request;

  PreparedOf(const Env& env, absl::string_view name, transport::Admission::Entry* entry)
      : env_(env), name_(name), entry_(entry) {}

  // Once, before any call.
  absl::Status Init(absl::string_view bytes, transport::Charge charge) {
    const wire::FieldScan scan = wire::ScanFields({bytes}, *Request::descriptor());
    if (!scan.passes) return wire::DoesNotParse(bytes.size(), *Request::descriptor());
    AWQD_ASSIGN_OR_RETURN(
        lease_, env_.in_flight->AcquireBytes(std::move(charge),
                                             static_cast<int64_t>(bytes.size()) + scan.parsed_bytes,
                                             "prepared request"));
    if (!request_.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      return wire::DoesNotParse(bytes.size(), *Request::descriptor());
    }
    AWQD_RETURN_IF_ERROR(CheckTemplate(request_));
    const absl::Status checked = CheckWithOneToken();
    const std::string model(Method::Lookup::Name(request_).model);
    if (checked.ok() || !env_.models->IsUnloadedIdle(model)) return checked;
    AWQD_RETURN_IF_ERROR(env_.on_demand->Request(model, [](const absl::Status&) {}));
    return absl::UnavailableError(
        absl::StrCat("model \"", model,
                     "\": it was unloaded while idle and is loaded now; try "
                     "again soon"));
  }

  const Request& request() const { return request_; }
  const PreparedBody& body() const override { return body_; }
  std::optional<std::string> place() const override {
    const v1::SharedMemory& x = request_.activations().shared_memory();
    const v1::SharedMemory& y = request_.output_shared_memory();
    const bool objects = !x.name().empty() || !y.name().empty();
    return objects || x.region() != y.region() ? std::nullopt : std::optional(x.region());
  }
  std::shared_ptr<StreamPoint> MakePoint() const override {
    return place().value_or("").empty() ? nullptr : std::make_shared<StreamPoint>();
  }
  transport::Admission::Entry* entry() const override { return entry_; }
  std::function<void()> Run(const std::shared_ptr<Call>& call) const override {
    const std::shared_ptr<RequestHandler> handler = HandlerOf<Method>::Make(
        env_, name_,
        {call->deadline(), &call->state()->notes, call->state()->span, call->state()->charge(),
         call->state()->identity},
        std::make_unique<RingCodec<Method>>(this->shared_from_this(), call),
        [call](const absl::Status& status, const grpc::ByteBuffer&) { call->End(status); });
    grpc::ByteBuffer none;
    handler->Start(&none);
    return [handler] { handler->Cancel(); };
  }

 private:
  absl::Status CheckWithOneToken() {
    AWQD_ASSIGN_OR_RETURN(
        body_.x_bytes,
        RowBytes(request_.activations(),
                 kFloatingMask | MaskOf(DType::kInt8) | MaskOf(DType::kE4m3), "activations"));
    Request one = request_;
    Complete({.x_bytes = body_.x_bytes, .y_bytes = kAnySize}, &one);
    for (const Extra& extra : FindExtras(&one)) {
      AWQD_ASSIGN_OR_RETURN(const int64_t bytes,
                            RowBytes(*extra.tensor, extra.allowed, extra.field));
      // No payload holds more, and the client would choose how much is allocated here.
      if (bytes > env_.options.ring.max_bytes) {
        return FieldError(absl::StrCat(extra.field, ".shape"),
                          absl::StrCat(bytes, " bytes for each token"),
                          absl::StrCat("at most ", env_.options.ring.max_bytes,
                                       ", a ring's payload (max_ring_bytes)"));
      }
      std::string row(static_cast<size_t>(bytes), '\0');
      for (size_t at = 0; extra.is_scales() && at < row.size(); at += 4) {
        row.replace(at, 4, "\0\0\x80\x3f", 4);  // 1: they are positive
      }
      body_.*extra.bytes = bytes;
      if (extra.bytes == &PreparedBody::router_bytes) body_.router_dtype = extra.tensor->dtype();
      CompleteExtra(1, std::move(row), extra);
    }
    AWQD_ASSIGN_OR_RETURN(const wire::AnswerForm form,
                          HandlerOf<Method>::Check(env_, std::move(one), body_.x_bytes));
    body_.x_dtype = request_.activations().dtype();
    body_.y_columns = form.shape.back();
    body_.y_dtype = wire::ToProto(form.dtype);
    body_.y_bytes = SizeOf(form.dtype);
    for (const int64_t dimension : form.shape) body_.y_bytes *= dimension;
    return absl::OkStatus();
  }

  const Env& env_;
  const absl::string_view name_;
  transport::Admission::Entry* const entry_;
  transport::ByteLease lease_;
  Request request_;
  PreparedBody body_ = {};
};

// Calls of a method by rings are counted beside those by gRPC.
struct Entries {
  transport::Admission::Entry* matmul = nullptr;
  transport::Admission::Entry* grouped = nullptr;
  transport::Admission::Entry* mlp = nullptr;
};

transport::Admission::Entry* AddEntry(const Env& env, absl::string_view method) {
  const std::string name =
      absl::StrCat(transport::Admission::kRingPrefix, "QuantizedInference/", method);
  transport::Admission::Entry* const entry = env.admission->AddMethod(name, security::Need::kInfer);
  env.admission->RejectWhileBusy(name);
  return entry;
}

template <typename Method>
absl::StatusOr<PreparedPtr> Make(const Env& env, absl::string_view name,
                                 transport::Admission::Entry* entry, absl::string_view request,
                                 transport::Charge charge) {
  const auto prepared = std::make_shared<PreparedOf<Method>>(env, name, entry);
  const absl::Status status = prepared->Init(request, std::move(charge));
  if (!status.ok()) return wire::ForClient(status);
  return prepared;
}

}  // namespace

std::unique_ptr<ring::RingServer> MakeServer(const Env& env) {
  const Entries entries = {.matmul = AddEntry(env, "QuantizedMatmul"),
                           .grouped = AddEntry(env, "GroupedQuantizedMatmul"),
                           .mlp = AddEntry(env, "GatedMlp")};
  auto prepare = [&env, entries](uint64_t method, absl::string_view request,
                                 transport::Charge charge) -> absl::StatusOr<PreparedPtr> {
    switch (method) {
      case ring::kQuantizedMatmul:
        return Make<MatmulMethod>(env, "QuantizedMatmul", entries.matmul, request, charge);
      case ring::kGroupedQuantizedMatmul:
        return Make<GroupedMatmulMethod>(env, "GroupedQuantizedMatmul", entries.grouped, request,
                                         charge);
      case ring::kGatedMlp:
        return Make<GatedMlpMethod>(env, "GatedMlp", entries.mlp, request, charge);
      default:
        return FieldError("method", absl::StrCat(method),
                          "1 QuantizedMatmul, 2 GroupedQuantizedMatmul, 3 GatedMlp or 4, a chain");
    }
  };
  auto share = [&env](const security::IdentityPtr& identity, absl::string_view bytes,
                      UniqueFd descriptor) -> absl::StatusOr<ring::RingServer::SharedRegion> {
    v1::ShareMemoryRequest request;
    if (!request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      return wire::DoesNotParse(bytes.size(), *v1::ShareMemoryRequest::descriptor());
    }
    absl::StatusOr<Region> region = ImportRegion(env, request, std::move(descriptor));
    if (!region.ok()) return wire::ForClient(region.status());
    const std::string owner = OwnerName(identity);
    AWQD_RETURN_IF_ERROR(env.regions->Register(owner, *std::move(region)));
    const auto unregister = [&env, owner, name = request.region()](void*) {
      env.regions->Unregister(owner, name, RegionKind::kDevice);
    };
    return ring::RingServer::SharedRegion{request.region(),
                                          std::shared_ptr<void>(nullptr, unregister)};
  };
  ring::Options options = env.options.ring;
  // A thread starts some 300,000 calls a second, a GPU computes more.
  if (!env.engine->device().host_addressable()) {
    options.threads =
        std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 8, options.threads, 4);
  }
  return std::make_unique<ring::RingServer>(options, env.admission, env.loop, std::move(prepare),
                                            std::move(share));
}

}  // namespace awqd::services::rings
