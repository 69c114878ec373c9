// Encoding reference: protobuf.dev/programming-guides/encoding.
#include "server/wire/matmul_wire.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "google/protobuf/io/zero_copy_stream_impl.h"

namespace awqd::wire {
namespace {

using v1::QuantizedMatmulRequest;

// More cuts than this are no sane client's; the generated parser may have such a message.
constexpr size_t kMaxEdits = 16;
// Heads up to this size are put together on the stack, which is faster to parse than pieces.
constexpr int64_t kFlatBytes = 4096;

// Bytes [begin, end) of the message become `patch`.
struct Edit {
  int64_t begin = 0;
  int64_t end = 0;
  std::array<char, 5> patch{};
  size_t patch_size = 0;

  void SetVarint(uint64_t value) {
    patch_size = 0;
    for (; value >= 0x80; value >>= 7) patch[patch_size++] = static_cast<char>(value | 0x80);
    patch[patch_size++] = static_cast<char>(value);
  }
  int64_t saved() const { return end - begin - static_cast<int64_t>(patch_size); }
};

// Finds what to cut. Scan fails on everything that the generated parser should judge instead.
class Cutter {
 public:
  // `cut` gets the payloads, in their order.
  Cutter(Pieces pieces, int64_t size, PayloadPlace payload = {}, WireRanges* cut = nullptr)
      : reader_(pieces), size_(size), payload_(payload), cut_(cut) {}

  // Where the last bytes or string `number` of the top level are, if they are short.
  std::optional<WireRange> Find(int number, int64_t max_bytes) {
    std::optional<WireRange> found;
    for (int fields = 0; reader_.position() < size_; ++fields) {
      Field field;
      if (fields == kMaxFields || !reader_.Next(size_, &field)) return std::nullopt;
      if (Is(field, number) && field.bytes <= max_bytes) {
        found = {reader_.position(), field.bytes};
      }
      if (!reader_.SkipContents(field)) return std::nullopt;
    }
    return found;
  }

  bool Scan() {
    while (reader_.position() < size_) {
      Field field;
      if (!reader_.Next(size_, &field)) return false;
      if (payload_.message != 0 && Is(field, payload_.message)) {
        if (!ScanMessage(field)) return false;
        continue;
      }
      if (payload_.message == 0 && Is(field, payload_.field)) Cut(field);
      if (!reader_.SkipContents(field) || edits_.size() > kMaxEdits) return false;
    }
    return true;
  }

  absl::Span<const Edit> edits() const { return edits_; }

 private:
  static bool Is(const Field& field, int number) {
    return static_cast<int>(field.number) == number && field.bytes >= 0;
  }

  // Leaves an empty field in its stead.
  void Cut(const Field& field) {
    cut_->push_back({reader_.position(), field.bytes});
    edits_.push_back({.begin = field.length_at, .end = field.end});
    edits_.back().SetVarint(0);
  }

  // The message around payloads, whose length is mended.
  bool ScanMessage(const Field& field) {
    const size_t mine = edits_.size();
    edits_.push_back({.begin = field.length_at, .end = reader_.position()});
    int64_t saved = 0;
    while (reader_.position() < field.end) {
      Field inner;
      if (!reader_.Next(field.end, &inner)) return false;
      if (Is(inner, payload_.field)) {
        Cut(inner);
        saved += edits_.back().saved();
      }
      if (!reader_.SkipContents(inner) || edits_.size() > kMaxEdits) return false;
    }
    edits_[mine].SetVarint(static_cast<uint64_t>(field.bytes - saved));
    return edits_.size() <= kMaxEdits;
  }

  FieldReader reader_;
  const int64_t size_;
  const PayloadPlace payload_;
  absl::InlinedVector<Edit, 4> edits_;
  WireRanges* const cut_;
};

using Runs = absl::InlinedVector<absl::string_view, 16>;

// The message with its edits made, as views of the pieces and of the patches.
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
        runs.push_back({cut.patch.data(), cut.patch_size});
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

bool ParseScanned(Pieces pieces, google::protobuf::Message* out) { return ParseRuns(pieces, out); }

bool ParseWhole(Pieces pieces, google::protobuf::Message* out) {
  return ScanFields(pieces, *out->GetDescriptor()).passes && ParseRuns(pieces, out);
}

bool ParseCutting(Pieces pieces, PayloadPlace payload, google::protobuf::Message* request,
                  WireRanges* cut) {
  cut->clear();
  Cutter cutter(pieces, SizeOfAll(pieces), payload, cut);
  if (cutter.Scan() && !cut->empty()) return ParseRuns(MakeRuns(pieces, cutter.edits()), request);
  cut->clear();
  return ParseRuns(pieces, request);
}

std::string PeekBytes(Pieces pieces, int field, int64_t max_bytes) {
  const std::optional<WireRange> range = Cutter(pieces, SizeOfAll(pieces)).Find(field, max_bytes);
  if (!range) return "";
  std::string text(range->size, '\0');
  CopyRange(pieces, *range, text.data());
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

std::string PeekRequestId(Pieces pieces) {
  return PeekString(pieces, QuantizedMatmulRequest::kRequestIdFieldNumber, kMaxPeekedIdBytes);
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
