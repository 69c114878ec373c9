// Walks the top level of the message.
#include "client/bench/response.h"

#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/proto_buffer_reader.h"

namespace awqd::bench {
namespace {

using google::protobuf::internal::WireFormatLite;

constexpr uint32_t Tag(int field) {
  return WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}

}  // namespace

std::optional<ResponseFacts> ReadResponse(grpc::ByteBuffer& response) {
  grpc::ProtoBufferReader reader(&response);
  if (!reader.status().ok()) return std::nullopt;
  google::protobuf::io::CodedInputStream input(&reader);
  ResponseFacts facts;
  while (const uint32_t tag = input.ReadTag()) {
    uint32_t length = 0;
    std::string bytes;
    bool ok = true;
    switch (tag) {
      case Tag(v1::QuantizedMatmulResponse::kOutputFieldNumber):
        ok = input.ReadVarint32(&length) && input.Skip(static_cast<int>(length));
        facts.output_bytes = length;
        break;
      case Tag(v1::QuantizedMatmulResponse::kExecutionFieldNumber):
        ok = input.ReadVarint32(&length) && input.ReadString(&bytes, static_cast<int>(length)) &&
             facts.execution.ParseFromString(bytes);
        break;
      default:
        ok = WireFormatLite::SkipField(&input, tag);
    }
    if (!ok) return std::nullopt;
  }
  if (!input.ConsumedEntireMessage()) return std::nullopt;
  return facts;
}

}  // namespace awqd::bench
