// From the client's structs to requests and calls, from grpc::Status to absl::Status.
#include "client/convert.h"

#include <chrono>
#include <limits>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "google/rpc/status.pb.h"
#include "kernels/base/status.h"

namespace awqd::client {
namespace {

template <typename Packed, typename Request>
void SetSource(const std::variant<WeightName, Packed>& source, Request& request) {
  if (const auto* name = std::get_if<WeightName>(&source)) {
    request.mutable_weight()->set_model(name->model);
    request.mutable_weight()->set_weight(name->name);
  } else {
    *request.mutable_packed() = std::get<Packed>(source);
  }
}

template <typename Request>
void SetRouter(Router router, Request& request) {
  v1::Router& out = *request.mutable_router();
  *out.mutable_logits() = ToProto(std::move(router.logits));
  out.set_top_k(router.top_k);
  out.set_scoring(router.scoring);
  if (router.correction_bias) {
    *out.mutable_correction_bias() = ToProto(*std::move(router.correction_bias));
  }
  out.set_n_group(router.n_group);
  out.set_topk_group(router.topk_group);
  out.set_norm_topk_prob(router.norm_topk_prob);
  if (router.routed_scaling_factor != 1) {
    out.set_routed_scaling_factor(router.routed_scaling_factor);
  }
}

template <typename Request>
void SetRouting(Routing routing, Request& request) {
  *request.mutable_expert_ids() = ToProto(std::move(routing.expert_ids));
  if (routing.router_weights.has_value()) {
    *request.mutable_router_weights() = ToProto(*std::move(routing.router_weights));
  }
}

// The fields that all calls for products have.
template <typename Call, typename Request>
void SetProduct(Call call, Request& request) {
  *request.mutable_activations() = ToProto(std::move(call.activations));
  if (call.shared_activations) {
    *request.mutable_activations()->mutable_shared_memory() = *std::move(call.shared_activations);
  }
  if (call.shared_output) {
    *request.mutable_output_shared_memory() = *std::move(call.shared_output);
  }
  request.set_output_dtype(call.output_dtype);
  request.set_path(call.path);
  request.set_activation_function(call.activation_function);
  request.set_activation_quantization(call.activation_quantization);
  if (call.activation_scales) {
    *request.mutable_activation_scales() = ToProto(*std::move(call.activation_scales));
  }
  request.set_priority(call.priority);
  request.set_request_id(std::move(call.request_id));
  request.set_output_encoding(v1::RAW);
}

// Rows or columns that a range leaves of `extent` (-1 unknown), -1 when it cannot be told.
int64_t RangeLength(int64_t begin, int64_t end, int64_t extent) {
  if (end == 0) end = extent;
  return end < begin || begin < 0 ? -1 : end - begin;
}

}  // namespace

void Prepare(grpc::ClientContext& context, const CallOptions& options) {
  context.set_wait_for_ready(options.wait_for_server);
  if (options.timeout == absl::InfiniteDuration()) return;
  context.set_deadline(absl::ToChronoTime(absl::Now() + options.timeout));
}

absl::Status CheckSize(const google::protobuf::MessageLite& request) {
  constexpr size_t kMost = std::numeric_limits<int>::max();
  const size_t bytes = request.ByteSizeLong();
  if (bytes <= kMost) return absl::OkStatus();
  return Invalid("request: got ", bytes, " bytes, expected at most ", kMost,
                 "; send it in parts or use shared memory");
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  // The numbers of grpc::StatusCode and absl::StatusCode are the same by design.
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  if (!status.error_details().empty()) {
    result.SetPayload(kErrorDetailsPayload, absl::Cord(status.error_details()));
  }
  return result;
}

absl::Status FromProto(const v1::RequestError& error) {
  absl::Status result(static_cast<absl::StatusCode>(error.code()), error.message());
  if (error.details_size() > 0) {
    google::rpc::Status details;
    details.set_code(error.code());
    details.set_message(error.message());
    *details.mutable_details() = error.details();
    result.SetPayload(kErrorDetailsPayload, absl::Cord(details.SerializeAsString()));
  }
  return result;
}

absl::Status FromGrpc(const grpc::Status& status, int64_t max_receive_bytes) {
  absl::Status result = FromGrpc(status);
  // "CLIENT: Received message larger than max (70000 vs. 65536)"; later versions do not say who.
  const std::string limit = absl::StrCat(" vs. ", max_receive_bytes, ")");
  const absl::string_view text = result.message();
  const size_t begin = text.find("larger than max (");
  if (!absl::IsResourceExhausted(result) || begin == absl::string_view::npos ||
      absl::StartsWith(text, "SERVER") || !absl::EndsWith(text, limit)) {
    return result;
  }
  absl::string_view bytes = text.substr(text.find('(', begin) + 1);
  bytes.remove_suffix(limit.size());
  return absl::ResourceExhaustedError(absl::StrCat("answer: got ", bytes,
                                                   " bytes, expected at most ", max_receive_bytes,
                                                   ", the client's own max_receive_bytes"));
}

absl::Status FromGrpc(const grpc::ClientContext& context, const grpc::Status& status,
                      int64_t max_receive_bytes) {
  if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED &&
      absl::StartsWith(status.error_message(), "No message returned") &&
      context.deadline() <= std::chrono::system_clock::now()) {
    return absl::DeadlineExceededError("Deadline Exceeded while the answer came");
  }
  return FromGrpc(status, max_receive_bytes);
}

v1::QuantizedMatmulRequest ToRequest(MatmulCall call) {
  v1::QuantizedMatmulRequest request;
  SetSource(call.weight, request);
  if (call.bias.has_value()) *request.mutable_bias() = ToProto(*std::move(call.bias));
  SetProduct(std::move(call), request);
  return request;
}

v1::GroupedQuantizedMatmulRequest ToRequest(GroupedMatmulCall call) {
  v1::GroupedQuantizedMatmulRequest request;
  SetSource(call.stack, request);
  if (call.router) {
    SetRouter(*std::move(call.router), request);
  } else {
    SetRouting(std::move(call.routing), request);
  }
  if (call.bias.has_value()) *request.mutable_bias() = ToProto(*std::move(call.bias));
  SetProduct(std::move(call), request);
  return request;
}

v1::GatedMlpRequest ToRequest(GatedMlpCall call) {
  v1::GatedMlpRequest request;
  if (auto* ref = std::get_if<v1::GatedMlpRef>(&call.mlp)) {
    *request.mutable_mlp() = std::move(*ref);
  } else {
    *request.mutable_packed() = std::get<v1::PackedGatedMlp>(std::move(call.mlp));
  }
  if (call.router) {
    SetRouter(*std::move(call.router), request);
  } else if (call.routing) {
    SetRouting(*std::move(call.routing), request);
  }
  if (call.gate_bias) *request.mutable_gate_bias() = ToProto(*std::move(call.gate_bias));
  if (call.up_bias) *request.mutable_up_bias() = ToProto(*std::move(call.up_bias));
  if (call.down_bias) *request.mutable_down_bias() = ToProto(*std::move(call.down_bias));
  if (call.shared_expert_gate) {
    *request.mutable_shared_expert_gate() = ToProto(*std::move(call.shared_expert_gate));
  }
  if (call.down_activation_scales) {
    *request.mutable_down_activation_scales() = ToProto(*std::move(call.down_activation_scales));
  }
  if (call.activation_parameters.ByteSizeLong() > 0) {
    *request.mutable_activation_parameters() = call.activation_parameters;
  }
  SetProduct(std::move(call), request);
  return request;
}

v1::DequantizeRequest ToRequest(const DequantizeCall& call) {
  v1::DequantizeRequest request;
  SetSource(call.weight, request);
  request.set_output_dtype(call.output_dtype);
  // A range that says "all" stays unset.
  if (call.row_begin != 0 || call.row_end != 0) {
    request.mutable_rows()->set_begin(call.row_begin);
    request.mutable_rows()->set_end(call.row_end);
  }
  if (call.column_begin != 0 || call.column_end != 0) {
    request.mutable_columns()->set_begin(call.column_begin);
    request.mutable_columns()->set_end(call.column_end);
  }
  request.set_request_id(call.request_id);
  request.set_output_encoding(v1::RAW);
  if (call.shared_output) *request.mutable_output_shared_memory() = *call.shared_output;
  return request;
}

v1::QuantizeKvRequest ToRequest(QuantizeKvCall call) {
  v1::QuantizeKvRequest request;
  *request.mutable_block() = ToProto(std::move(call.block));
  request.set_scale_dtype(call.scale_dtype);
  if (call.scales.has_value()) *request.mutable_scales() = ToProto(*std::move(call.scales));
  if (call.zeros.has_value()) *request.mutable_zeros() = ToProto(*std::move(call.zeros));
  request.set_priority(call.priority);
  request.set_request_id(std::move(call.request_id));
  request.set_output_encoding(v1::RAW);
  return request;
}

v1::DequantizeKvRequest ToRequest(DequantizeKvCall call) {
  v1::DequantizeKvRequest request;
  *request.mutable_codes() = ToProto(std::move(call.codes));
  *request.mutable_scales() = ToProto(std::move(call.scales));
  *request.mutable_zeros() = ToProto(std::move(call.zeros));
  request.set_head_dim(call.head_dim);
  request.set_output_dtype(call.output_dtype);
  request.set_form(call.form);
  request.set_priority(call.priority);
  request.set_request_id(std::move(call.request_id));
  request.set_output_encoding(v1::RAW);
  return request;
}

absl::StatusOr<QuantizeKvResult> ToResult(v1::QuantizeKvResponse response) {
  AWQD_ASSIGN_OR_RETURN(Tensor codes, FromProto(std::move(*response.mutable_codes())));
  QuantizeKvResult out = {std::move(codes), std::nullopt, std::nullopt, response.execution()};
  if (!response.has_scales()) return out;
  AWQD_ASSIGN_OR_RETURN(Tensor scales, FromProto(std::move(*response.mutable_scales())));
  AWQD_ASSIGN_OR_RETURN(Tensor zeros, FromProto(std::move(*response.mutable_zeros())));
  out.scales = std::move(scales);
  out.zeros = std::move(zeros);
  return out;
}

absl::StatusOr<Tensor> ToOutput(v1::Tensor proto) {
  if (!proto.has_shared_memory()) return FromProto(std::move(proto));
  return Tensor{proto.dtype(), {proto.shape().begin(), proto.shape().end()}, ""};
}

int64_t KnownAnswerBytes(const DequantizeCall& call) {
  int64_t k = -1, n = -1;
  if (const auto* packed = std::get_if<v1::PackedWeight>(&call.weight)) {
    if (packed->qweight().shape_size() == 2) k = packed->qweight().shape(0);
    if (packed->scales().shape_size() == 2) n = packed->scales().shape(1);
  }
  const int64_t rows = RangeLength(call.row_begin, call.row_end, k);
  const int64_t columns = RangeLength(call.column_begin, call.column_end, n);
  if (rows < 0 || columns < 0) return -1;
  int64_t bytes = 0;
  if (__builtin_mul_overflow(rows, columns, &bytes) ||
      __builtin_mul_overflow(bytes, SizeOf(call.output_dtype), &bytes)) {
    return -1;
  }
  return bytes;
}

absl::StatusOr<DequantizeBlock> ChunkOrder::Accept(v1::DequantizeChunk chunk) {
  AWQD_ASSIGN_OR_RETURN(Tensor values, FromProto(std::move(*chunk.mutable_output())));
  if (!started_) {
    started_ = true;
    first_row_ = chunk.rows().begin();
    total_rows_ = chunk.total_rows();
    total_columns_ = chunk.total_columns();
    dtype_ = values.dtype;
  }
  const int64_t begin = chunk.rows().begin() - first_row_;
  const int64_t rows = chunk.rows().end() - chunk.rows().begin();
  const bool fits = begin == next_row_ && rows >= 0 && rows <= total_rows_ - next_row_ &&
                    chunk.total_rows() == total_rows_ && chunk.total_columns() == total_columns_ &&
                    values.dtype == dtype_ &&
                    values.shape == std::vector<int64_t>{rows, total_columns_};
  if (!fits) {
    return absl::InternalError(absl::StrCat(
        "the server sent ", Name(values.dtype), " ", ShapeString(values.shape), " for rows [",
        chunk.rows().begin(), ", ", chunk.rows().end(), ") of ", chunk.total_rows(), " x ",
        chunk.total_columns(), ", expected ", Name(dtype_), " from row ", first_row_ + next_row_,
        " of ", total_rows_, " x ", total_columns_));
  }
  next_row_ += rows;
  return DequantizeBlock{begin, std::move(values), total_rows_, total_columns_};
}

absl::Status ChunkOrder::Finish() const {
  if (started_ && next_row_ == total_rows_) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("the server's stream ended after ", next_row_, " of ", total_rows_, " rows"));
}

// The same rule as client/python has.
std::string WeightKey(absl::string_view model, absl::string_view weight) {
  if (model.empty() || weight.empty()) return "";
  constexpr size_t kMaxKeyBytes = 512;
  std::string key = absl::StrCat(model, "/", weight);
  if (key.size() > kMaxKeyBytes || !std::all_of(key.begin(), key.end(), absl::ascii_isprint))
    return "";
  return key;
}

void AddWeightKey(const std::string& key, grpc::ClientContext& context) {
  if (!key.empty()) context.AddMetadata("awqd-weight", key);
}

}  // namespace awqd::client
