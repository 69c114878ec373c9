// Compares ParseProduct with the generated parser, and with the extra refusals, on the same bytes;
// for a test and a fuzz target.
#pragma once

#include <string>
#include <vector>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/wire_format_lite.h"
#include "inference/grpc_service.pb.h"
#include "server/wire/matmul_wire.h"

namespace awqd::wire {

// ScanFields and ParseScanned. False when the bytes do not parse as a Request, or are refused.
template <typename Request>
bool ParseProduct(Pieces pieces, ParsedRequest<Request>* out) {
  const FieldScan scan = ScanFields(pieces, *Request::descriptor(), kActivationsRaw);
  return scan.passes && ParseScanned(pieces, scan, out);
}

// Splits `bytes` into pieces whose sizes come from `seed`: most are short, some empty, some long.
inline std::vector<absl::string_view> InPieces(absl::string_view bytes, uint32_t seed) {
  std::vector<absl::string_view> pieces;
  while (!bytes.empty()) {
    seed = seed * 1664525u + 1013904223u;
    const uint32_t kind = seed >> 29;
    size_t size = (seed >> 16) % 7;
    if (kind == 0) size = 1 + (seed >> 8) % 4096;
    if (kind == 1) size = bytes.size();
    pieces.push_back(bytes.substr(0, size));
    bytes.remove_prefix(pieces.back().size());
  }
  return pieces;
}

// Whether a message that parses is refused nevertheless, because it has a group, or too many fields
// and dimensions, or messages that lie too deep.
inline bool IsRefused(absl::string_view bytes, const google::protobuf::Descriptor& type,
                      int* fields, int depth = 0) {
  using google::protobuf::internal::WireFormatLite;
  google::protobuf::io::CodedInputStream in(reinterpret_cast<const uint8_t*>(bytes.data()),
                                            static_cast<int>(bytes.size()));
  while (const uint32_t tag = in.ReadTag()) {
    if (++*fields > kMaxFields) return true;
    switch (WireFormatLite::GetTagWireType(tag)) {
      case WireFormatLite::WIRETYPE_START_GROUP:
      case WireFormatLite::WIRETYPE_END_GROUP:
        return true;
      case WireFormatLite::WIRETYPE_LENGTH_DELIMITED: {
        uint32_t size = 0;
        if (!in.ReadVarint32(&size)) return false;
        const absl::string_view contents = bytes.substr(in.CurrentPosition(), size);
        if (!in.Skip(static_cast<int>(size))) return false;
        const auto* known = type.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
        if (known != nullptr && known->is_packable() && type.name() != "IntValues" &&
            type.name() != "FloatValues" && type.name() != "InferTensorContents") {
          for (const char c : contents) *fields += static_cast<uint8_t>(c) < 0x80 ? 1 : 0;
          if (*fields > kMaxFields) return true;
        }
        if (known == nullptr || known->message_type() == nullptr) break;
        if (depth == kMaxDepth) return true;
        if (IsRefused(contents, *known->message_type(), fields, depth + 1)) return true;
        break;
      }
      default:
        if (!WireFormatLite::SkipField(&in, tag)) return false;
    }
  }
  return false;
}

// Serialises with maps in the order of their keys, so that equal messages have equal bytes.
inline std::string SortedBytes(const google::protobuf::Message& message) {
  std::string out;
  google::protobuf::io::StringOutputStream stream(&out);
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.SetSerializationDeterministic(true);
  (void)message.SerializeToCodedStream(&coded);  // fails only if `out` cannot grow
  coded.Trim();
  return out;
}

// Returns "", or the difference of the two parsers.
template <typename Request>
std::string WireDifferenceOf(absl::string_view bytes, uint32_t seed) {
  Request expected;
  int fields = 0;
  const bool parses = expected.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) &&
                      !IsRefused(bytes, *Request::descriptor(), &fields);
  const std::vector<absl::string_view> pieces = InPieces(bytes, seed);
  ParsedRequest<Request> got;
  if (ParseProduct(pieces, &got) != parses) {
    return parses ? "refuses what is a request" : "accepts what is none, or refused";
  }
  if (!parses) return "";
  v1::Tensor* x = got.request.mutable_activations();
  if (!expected.has_activations()) got.request.clear_activations();
  if (got.cut) {
    if (x->contents_case() != v1::Tensor::kRaw) return "cuts what is not the contents";
    if (!x->raw().empty()) return "leaves bytes beside a cut";
    if (got.cut->begin < 0 || got.cut->size < 0 ||
        got.cut->begin + got.cut->size > static_cast<int64_t>(bytes.size())) {
      return "cuts outside the message";
    }
    std::string* raw = x->mutable_raw();
    raw->resize(got.cut->size);
    CopyRange(pieces, *got.cut, raw->data());
  }
  if (SortedBytes(got.request) == SortedBytes(expected)) return "";
  return "parses to \"" + got.request.ShortDebugString() + "\" instead of \"" +
         expected.ShortDebugString() + "\"";
}

// The same for a request of the Open Inference Protocol, whose payloads are fields of their own.
inline std::string InferDifference(absl::string_view bytes, uint32_t seed) {
  using inference::ModelInferRequest;
  constexpr PayloadPlace kRaw = {0, ModelInferRequest::kRawInputContentsFieldNumber};
  ModelInferRequest expected, got;
  int fields = 0;
  const bool parses = expected.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) &&
                      !IsRefused(bytes, *ModelInferRequest::descriptor(), &fields);
  const std::vector<absl::string_view> pieces = InPieces(bytes, seed);
  const FieldScan scan = ScanFields(pieces, *ModelInferRequest::descriptor(), kRaw);
  const WireRanges& cut = scan.payloads;
  if ((scan.passes && ParseScanned(pieces, scan, &got)) != parses) {
    return parses ? "refuses what is an infer request" : "accepts what is none, or refused";
  }
  if (!parses) return "";
  if (!cut.empty() && static_cast<int>(cut.size()) != got.raw_input_contents_size()) {
    return "cuts other than the payloads";
  }
  for (size_t i = 0; i < cut.size(); ++i) {
    std::string* raw = got.mutable_raw_input_contents(static_cast<int>(i));
    if (!raw->empty()) return "leaves bytes beside a cut";
    raw->resize(cut[i].size);
    CopyRange(pieces, cut[i], raw->data());
  }
  return SortedBytes(got) == SortedBytes(expected) ? "" : "parses to another infer request";
}

// Compares the parsers for a request of every method, because the same bytes may be any of them.
inline std::string WireDifference(absl::string_view bytes, uint32_t seed) {
  if (std::string found = InferDifference(bytes, seed); !found.empty()) return found;
  for (const auto difference : {WireDifferenceOf<v1::QuantizedMatmulRequest>,
                                WireDifferenceOf<v1::GroupedQuantizedMatmulRequest>,
                                WireDifferenceOf<v1::GatedMlpRequest>}) {
    if (std::string found = difference(bytes, seed); !found.empty()) return found;
  }
  return "";
}

}  // namespace awqd::wire
