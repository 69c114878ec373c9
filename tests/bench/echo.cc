// Parses requests, and builds answers from three slices.
#include "tests/bench/echo.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/proto_buffer_reader.h"

namespace awqd::bench {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

constexpr uint32_t Bytes(int field) {
  return WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}
constexpr uint32_t Varint(int field) {
  return WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_VARINT);
}

int64_t SizeOf(v1::DType dtype) { return dtype == v1::FP32 ? 4 : 2; }

// Reads the activations: everything but `raw` into a message, and skips through `raw`.
bool ReadTensor(CodedInputStream& input, v1::Tensor& header, int64_t& payload_bytes) {
  uint32_t length = 0, dtype = 0;
  if (!input.ReadVarint32(&length)) return false;
  const auto outer = input.PushLimit(static_cast<int>(length));
  while (const uint32_t tag = input.ReadTag()) {
    bool ok = false;
    if (tag == Varint(v1::Tensor::kDtypeFieldNumber)) {
      ok = input.ReadVarint32(&dtype);
      header.set_dtype(static_cast<v1::DType>(dtype));
    } else if (tag == Bytes(v1::Tensor::kShapeFieldNumber)) {
      ok = input.ReadVarint32(&length);
      const auto inner = input.PushLimit(static_cast<int>(length));
      uint64_t dimension = 0;
      while (ok && input.BytesUntilLimit() > 0) {
        ok = input.ReadVarint64(&dimension);
        header.add_shape(static_cast<int64_t>(dimension));
      }
      input.PopLimit(inner);
    } else if (tag == Bytes(v1::Tensor::kRawFieldNumber)) {
      ok = input.ReadVarint32(&length) && input.Skip(static_cast<int>(length));
      payload_bytes = length;
    } else {
      ok = WireFormatLite::SkipField(&input, tag);
    }
    if (!ok) return false;
  }
  const bool whole = input.ConsumedEntireMessage();
  input.PopLimit(outer);
  return whole && header.shape_size() > 0;
}

bool ReadWeight(CodedInputStream& input, std::string& weight) {
  uint32_t length = 0;
  std::string bytes;
  v1::WeightRef ref;
  if (!input.ReadVarint32(&length) || !input.ReadString(&bytes, static_cast<int>(length)) ||
      !ref.ParseFromString(bytes)) {
    return false;
  }
  weight = ref.weight();
  return true;
}

// The parts of a response before and after the payload.
std::pair<std::string, std::string> Frame(const EchoRequest& request, int64_t n, int64_t bytes) {
  v1::Tensor output;
  output.set_dtype(request.output_dtype);
  output.add_shape(request.tokens);
  output.add_shape(n);
  std::string tensor = output.SerializeAsString();
  uint8_t number[10];
  const auto append = [&number](std::string& to, uint64_t value) {
    const uint8_t* const end = CodedOutputStream::WriteVarint64ToArray(value, number);
    to.append(reinterpret_cast<const char*>(number), static_cast<size_t>(end - number));
  };
  append(tensor, Bytes(v1::Tensor::kRawFieldNumber));
  append(tensor, static_cast<uint64_t>(bytes));
  std::string head;
  append(head, Bytes(v1::QuantizedMatmulResponse::kOutputFieldNumber));
  append(head, tensor.size() + static_cast<uint64_t>(bytes));
  head += tensor;
  v1::QuantizedMatmulResponse tail;
  v1::Execution& execution = *tail.mutable_execution();
  execution.set_path(v1::FUSED);
  execution.set_kernel("echo");
  execution.set_batch_tokens(request.tokens);
  execution.set_batch_requests(1);
  execution.set_device("echo");
  return {std::move(head), tail.SerializeAsString()};
}

}  // namespace

std::optional<EchoRequest> ReadRequest(grpc::ByteBuffer& request) {
  grpc::ProtoBufferReader reader(&request);
  if (!reader.status().ok()) return std::nullopt;
  CodedInputStream input(&reader);
  EchoRequest read;
  v1::Tensor activations;
  while (const uint32_t tag = input.ReadTag()) {
    bool ok = false;
    uint32_t dtype = 0;
    if (tag == Bytes(v1::QuantizedMatmulRequest::kWeightFieldNumber)) {
      ok = ReadWeight(input, read.weight);
    } else if (tag == Bytes(v1::QuantizedMatmulRequest::kActivationsFieldNumber)) {
      ok = ReadTensor(input, activations, read.payload_bytes);
    } else if (tag == Varint(v1::QuantizedMatmulRequest::kOutputDtypeFieldNumber)) {
      ok = input.ReadVarint32(&dtype);
      read.output_dtype = static_cast<v1::DType>(dtype);
    } else {
      ok = WireFormatLite::SkipField(&input, tag);
    }
    if (!ok) return std::nullopt;
  }
  if (!input.ConsumedEntireMessage() || activations.shape_size() == 0) return std::nullopt;
  if (read.output_dtype == v1::DTYPE_UNSPECIFIED) read.output_dtype = activations.dtype();
  const int64_t k = activations.shape(activations.shape_size() - 1);
  if (k > 0) read.tokens = read.payload_bytes / (k * SizeOf(activations.dtype()));
  return read;
}

EchoService::EchoService(EchoShapes shapes, int64_t max_answer_bytes)
    : shapes_(std::move(shapes)), payload_(static_cast<size_t>(max_answer_bytes), '\x11') {}

grpc::Status EchoService::Answer(grpc::ByteBuffer request, grpc::ByteBuffer* response) const {
  const auto read = ReadRequest(request);
  if (!read.has_value()) return {grpc::INVALID_ARGUMENT, "not a QuantizedMatmulRequest"};
  const auto shape = shapes_.find(read->weight);
  if (shape == shapes_.end()) return {grpc::NOT_FOUND, absl::StrCat("no weight ", read->weight)};
  const int64_t bytes = read->tokens * shape->second.n * SizeOf(read->output_dtype);
  if (bytes > static_cast<int64_t>(payload_.size())) {
    return {grpc::RESOURCE_EXHAUSTED,
            absl::StrCat("the answer has ", bytes, " bytes, more than ", payload_.size())};
  }
  const auto [head, tail] = Frame(*read, shape->second.n, bytes);
  // The payload is sent in place, as awqd sends results from its staging memory.
  const grpc::Slice slices[] = {
      grpc::Slice(head),
      grpc::Slice(payload_.data(), static_cast<size_t>(bytes), grpc::Slice::STATIC_SLICE),
      grpc::Slice(tail)};
  *response = grpc::ByteBuffer(slices, std::size(slices));
  return grpc::Status::OK;
}

grpc::ServerUnaryReactor* EchoService::QuantizedMatmul(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request,
                                                       grpc::ByteBuffer* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(Answer(*request, response));
  return reactor;
}

EchoRepository::EchoRepository(EchoShapes shapes) : shapes_(std::move(shapes)) {}

grpc::ServerUnaryReactor* EchoRepository::GetModel(grpc::CallbackServerContext* context,
                                                   const v1::GetModelRequest* request,
                                                   v1::GetModelResponse* response) {
  response->mutable_model()->set_name(request->name());
  for (const auto& [path, shape] : shapes_) {
    v1::WeightInfo& weight = *response->add_weights();
    weight.set_path(path);
    weight.set_k(shape.k);
    weight.set_n(shape.n);
  }
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

}  // namespace awqd::bench
