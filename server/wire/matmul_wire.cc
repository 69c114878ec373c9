// The scan goes where the generated parser would, and so no further than the messages that it knows.
#include "server/wire/matmul_wire.h"

#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/zero_copy_stream_impl.h"
#include "inference/grpc_service.pb.h"

namespace awqd::wire {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

// A varint has at most so many bytes.
constexpr int64_t kVarintBytes = 10;
// The memory of a packed varint: the parser doubles its array until the values fit.
constexpr int64_t kBytesOfValue = 2 * static_cast<int64_t>(sizeof(int64_t));

bool IsVarint(const FieldDescriptor& field) {
  switch (field.type()) {
    case FieldDescriptor::TYPE_FIXED64:
    case FieldDescriptor::TYPE_FIXED32:
    case FieldDescriptor::TYPE_SFIXED64:
    case FieldDescriptor::TYPE_SFIXED32:
    case FieldDescriptor::TYPE_DOUBLE:
    case FieldDescriptor::TYPE_FLOAT:
      return false;
    default:
      return true;
  }
}

// The object that the parser makes from a message within the message, and the one that it makes
// from an unknown number. Each may have two bytes on the wire.
constexpr int64_t kBytesOfMessage = 128;
constexpr int64_t kBytesOfUnknown = 32;

// More edits than this are no sane client's; the generated parser may have such a message.
constexpr size_t kMaxEdits = 16;

class FieldScanner {
 public:
  FieldScanner(Pieces pieces, PayloadPlace payload) : reader_(pieces), payload_(payload) {}

  bool Scan(const Descriptor& type, int64_t end) {
    while (reader_.position() < end) {
      Field field;
      if (++fields_ > kMaxFields || !reader_.Next(end, &field)) return false;
      if (!ScanField(type, field)) return false;
    }
    return true;
  }

  FieldScan TakeResult(bool passes) {
    found_.passes = passes;
    if (!passes || found_.payloads.empty() || found_.edits.size() > kMaxEdits) {
      found_.payloads.clear();
      found_.edits.clear();
    }
    return std::move(found_);
  }

 private:
  bool ScanField(const Descriptor& type, const Field& field) {
    const FieldDescriptor* known = type.FindFieldByNumber(static_cast<int>(field.number));
    if (known == nullptr) found_.parsed_bytes += kBytesOfUnknown;
    if (field.bytes < 0) return reader_.SkipContents(field);
    if (known != nullptr && known->message_type() != nullptr) {
      if (depth_ == kMaxDepth) return false;
      found_.parsed_bytes += kBytesOfMessage;
      const bool around_payload = ++depth_ == 1 && known->number() == payload_.message;
      in_payload_message_ |= around_payload;
      const bool fine =
          around_payload ? ScanAround(*known, field) : Scan(*known->message_type(), field.end);
      in_payload_message_ &= !around_payload;
      --depth_;
      if (!fine && !found_.crowded_field.empty()) {
        found_.crowded_field = absl::StrCat(known->name(), ".", found_.crowded_field);
      }
      return fine;
    }
    if (known != nullptr && known->is_packable()) return ScanPacked(type, *known, field);
    if (!IsPayload(field)) {
      found_.parsed_bytes += field.bytes;
    } else if (found_.edits.size() <= kMaxEdits) {
      found_.payloads.push_back({reader_.position(), field.bytes});
      found_.edits.push_back({.begin = field.length_at, .end = field.end});
    }
    return reader_.SkipContents(field);
  }

  // The message around payloads, whose length is mended.
  bool ScanAround(const FieldDescriptor& known, const Field& field) {
    const size_t mine = found_.edits.size();
    const bool room = mine <= kMaxEdits;
    if (room) found_.edits.push_back({.begin = field.length_at, .end = reader_.position()});
    if (!Scan(*known.message_type(), field.end)) return false;
    if (!room) return true;
    int64_t saved = 0;
    for (size_t i = mine + 1; i < found_.edits.size(); ++i) saved += found_.edits[i].saved();
    found_.edits[mine].SetVarint(static_cast<uint64_t>(field.bytes - saved));
    return true;
  }

  bool IsPayload(const Field& field) const {
    if (static_cast<int>(field.number) != payload_.field) return false;
    return payload_.message == 0 ? depth_ == 0 : depth_ == 1 && in_payload_message_;
  }

  bool ScanPacked(const Descriptor& type, const FieldDescriptor& known, const Field& field) {
    const bool payload = &type == v1::IntValues::descriptor() ||
                         &type == v1::FloatValues::descriptor() ||
                         &type == inference::InferTensorContents::descriptor();
    if (!IsVarint(known)) {
      found_.parsed_bytes += field.bytes;
      return reader_.SkipContents(field);
    }
    const bool crowded = !payload && field.bytes > kVarintBytes * (kMaxFields - fields_);
    int64_t values = 0;
    if (!crowded) {
      if (!reader_.SkipCounting(field, &values)) return false;
      if (!payload) fields_ += static_cast<int>(values);
    }
    if (crowded || fields_ > kMaxFields) {
      found_.crowded_field = known.name();
      found_.crowded_bytes = field.bytes;
      return false;
    }
    found_.parsed_bytes += values * kBytesOfValue;
    return true;
  }

  FieldReader reader_;
  const PayloadPlace payload_;
  int fields_ = 0;
  int depth_ = 0;
  bool in_payload_message_ = false;
  FieldScan found_;
};

using v1::QuantizedMatmulRequest;

// Heads up to this size are put together on the stack, which is faster to parse than pieces.
constexpr int64_t kFlatBytes = 4096;

using Runs = absl::InlinedVector<absl::string_view, 16>;

// The message with its edits made, as views of the pieces and of the varints.
Runs MakeRuns(Pieces pieces, absl::Span<const Edit> edits) {
  Runs runs;
  size_t edit = 0;
  int64_t begin = 0;  // of the piece
  for (absl::string_view piece : pieces) {
    const int64_t end = begin + static_cast<int64_t>(piece.size());
    int64_t at = begin;
    for (; edit < edits.size() && edits[edit].begin < end; ++edit) {
      const Edit& cut = edits[edit];
      if (cut.begin >= begin) {
        if (cut.begin > at) runs.push_back(piece.substr(at - begin, cut.begin - at));
        runs.push_back({cut.varint.data(), cut.varint_size});
      }
      at = std::min(cut.end, end);
      if (cut.end > end) break;
    }
    if (at < end) runs.push_back(piece.substr(at - begin));
    begin = end;
  }
  return runs;
}

bool ParseRuns(absl::Span<const absl::string_view> runs, google::protobuf::MessageLite* out) {
  const int64_t size = SizeOfAll(runs);
  if (size > FieldReader::kMaxLength) return false;
  if (runs.size() <= 1) {
    return out->ParseFromArray(runs.empty() ? nullptr : runs[0].data(), static_cast<int>(size));
  }
  if (size <= kFlatBytes) {
    std::array<char, kFlatBytes> flat;
    char* next = flat.data();
    for (absl::string_view run : runs) next = std::copy(run.begin(), run.end(), next);
    return out->ParseFromArray(flat.data(), static_cast<int>(size));
  }
  std::deque<google::protobuf::io::ArrayInputStream> arrays;  // which stay where they are
  std::vector<google::protobuf::io::ZeroCopyInputStream*> streams;
  for (absl::string_view run : runs) {
    streams.push_back(&arrays.emplace_back(run.data(), static_cast<int>(run.size())));
  }
  google::protobuf::io::ConcatenatingInputStream stream(streams.data(),
                                                        static_cast<int>(streams.size()));
  return out->ParseFromZeroCopyStream(&stream);
}

}  // namespace

int64_t SizeOfAll(Pieces pieces) {
  int64_t size = 0;
  for (absl::string_view piece : pieces) size += static_cast<int64_t>(piece.size());
  return size;
}

void Edit::SetVarint(uint64_t value) {
  varint_size = 0;
  for (; value >= 0x80; value >>= 7) varint[varint_size++] = static_cast<char>(value | 0x80);
  varint[varint_size++] = static_cast<char>(value);
}

FieldScan ScanFields(Pieces pieces, const Descriptor& type, PayloadPlace payload) {
  FieldScanner scanner(pieces, payload);
  const bool passes = scanner.Scan(type, SizeOfAll(pieces));
  return scanner.TakeResult(passes);
}

bool ParseScanned(Pieces pieces, const FieldScan& scan, google::protobuf::Message* out) {
  if (scan.edits.empty()) return ParseRuns(pieces, out);
  return ParseRuns(MakeRuns(pieces, scan.edits), out);
}

std::string PeekBytes(Pieces pieces, int field, int64_t max_bytes) {
  const int64_t size = SizeOfAll(pieces);
  FieldReader reader(pieces);
  WireRange last;
  for (int fields = 0; reader.position() < size; ++fields) {
    Field found;
    if (fields == kMaxFields || !reader.Next(size, &found)) return "";
    if (static_cast<int>(found.number) == field && found.bytes >= 0 && found.bytes <= max_bytes) {
      last = {reader.position(), found.bytes};
    }
    if (!reader.SkipContents(found)) return "";
  }
  std::string text(last.size, '\0');
  CopyRange(pieces, last, text.data());
  return text;
}

std::string PeekString(Pieces pieces, int field, int64_t max_bytes) {
  const std::string text = PeekBytes(pieces, field, max_bytes);
  if (text.empty()) return "";
  // Through the parser as a message of its own, because that refuses what is not UTF-8. A length of
  // two bytes serves any text of up to 16 KiB.
  std::string wire = {
      static_cast<char>(QuantizedMatmulRequest::kRequestIdFieldNumber << 3 | FieldReader::kBytes),
      static_cast<char>(text.size() | 0x80), static_cast<char>(text.size() >> 7)};
  wire += text;
  QuantizedMatmulRequest request;
  return request.ParseFromString(wire) ? text : "";
}

void CopyRange(Pieces pieces, const WireRange& range, char* out) {
  int64_t skip = range.begin;
  int64_t left = range.size;
  for (absl::string_view piece : pieces) {
    if (left == 0) return;
    const auto size = static_cast<int64_t>(piece.size());
    if (skip < size) {
      const int64_t bytes = std::min(left, size - skip);
      std::memcpy(out, piece.data() + skip, bytes);
      out += bytes;
      left -= bytes;
    }
    skip = std::max<int64_t>(0, skip - size);
  }
}

}  // namespace awqd::wire
