// In-place parsing: parses a request that lies in pieces, and leaves its activations where they
// are.
//
// A request is a few header fields and one payload, activations.raw, which may be megabytes. The
// generated parser would copy it into a string. Here the payload is cut out first: its place is
// noted, an empty field is put in its stead, the lengths around it are mended, and the generated
// parser reads what is left. So every rule of Protocol Buffers holds (unknown fields, repeated and
// merged occurrences, the last member of a oneof, UTF-8) without being written down again. Whatever
// the cutter does not understand at a glance goes to the generated parser whole.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/time/time.h"
#include "awqd/v1/inference.pb.h"
#include "google/protobuf/message.h"
#include "server/wire/field_scan.h"

namespace awqd::wire {

// Bytes [begin, begin + size) of a message.
struct WireRange {
  int64_t begin = 0;
  int64_t size = 0;
};
using WireRanges = absl::InlinedVector<WireRange, 4>;

// A request as it was parsed. When `cut` is set, activations().contents_case() is kRaw, the
// contents are the bytes of that range of the message, and the field itself is empty. Otherwise the
// request is as the generated parser made it.
template <typename Request>
struct ParsedRequest {
  Request request;
  std::optional<WireRange> cut;
  // Bytes of payloads that were copied out of the message into the request (another protocol).
  int64_t copied_bytes = 0;
  // How long the request may wait, from its arrival on.
  absl::Duration timeout = absl::InfiniteDuration();
};
using MatmulMessage = ParsedRequest<v1::QuantizedMatmulRequest>;

// Parses a message that passed ScanFields. False when the bytes are no message of that type.
bool ParseScanned(Pieces pieces, google::protobuf::Message* out);

// The same for any message with payloads. `cut` gets the ranges of those that were cut out, in
// their order; they are empty in `request`. None: there was no payload, or the message was parsed
// whole.
bool ParseCutting(Pieces pieces, PayloadPlace payload, google::protobuf::Message* request,
                  WireRanges* cut);

template <typename Request>
bool ParseScanned(Pieces pieces, ParsedRequest<Request>* out) {
  // Field numbers that PeekRequestId and kActivationsRaw take for granted.
  static_assert(int{Request::kRequestIdFieldNumber} ==
                int{v1::QuantizedMatmulRequest::kRequestIdFieldNumber});
  static_assert(int{Request::kActivationsFieldNumber} == kActivationsRaw.message &&
                int{v1::Tensor::kRawFieldNumber} == kActivationsRaw.field);
  WireRanges cut;
  if (!ParseCutting(pieces, kActivationsRaw, &out->request, &cut)) return false;
  out->cut = cut.empty() ? std::nullopt : std::make_optional(cut.back());
  // Another member of the oneof may have come after it.
  if (out->request.activations().contents_case() != v1::Tensor::kRaw) out->cut.reset();
  return true;
}

// Both steps. False when the bytes do not parse as a Request, or are refused.
template <typename Request>
bool ParseProduct(Pieces pieces, ParsedRequest<Request>* out) {
  return ScanFields(pieces, *Request::descriptor(), kActivationsRaw).passes &&
         ParseScanned(pieces, out);
}
bool ParseWhole(Pieces pieces, google::protobuf::Message* out);

// The bytes of the last string `field` of a message that will be parsed, and judged, later; empty
// when there is none of at most `max_bytes`, or the message is not plain.
std::string PeekBytes(Pieces pieces, int field, int64_t max_bytes);

// The same of a message that will not be parsed; empty too when it is not UTF-8.
std::string PeekString(Pieces pieces, int field, int64_t max_bytes);

// The most bytes of an id that is peeked at.
inline constexpr int64_t kMaxPeekedIdBytes = 256;

// The request_id of a message that will not be parsed, for its refusal; empty when there is none of
// at most 256 bytes, or the message is not plain.
std::string PeekRequestId(Pieces pieces);

// Copies a range, which must lie within the pieces, to `out`.
void CopyRange(Pieces pieces, const WireRange& range, char* out);

}  // namespace awqd::wire
