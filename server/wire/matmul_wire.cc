// Encoding reference: protobuf.dev/programming-guides/encoding.
#include "server/wire/matmul_wire.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "google/protobuf/io/zero_copy_stream_impl.h"
#include "server/wire/field_reader.h"

namespace awqd::wire {
namespace {

using v1::QuantizedMatmulRequest;

// More cuts than this are no sane client's; the generated parser may have such a message.
constexpr size_t kMaxEdits = 16;
// Heads up to this size are put together on the stack, which is faster to parse than pieces.
constexpr int64_t kFlatBytes = 4096;
constexpr int64_t kMaxPeekedBytes = 256;

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
  Cutter(Pieces pieces, int64_t size) : reader_(pieces), size_(size) {}

  // Where the last request_id is, if it is short; a scan of the top level alone.
  std::optional<WireRange> FindRequestId() {
    std::optional<WireRange> found;
    for (int fields = 0; reader_.position() < size_; ++fields) {
      Field field;
      if (fields == kMaxFields || !reader_.Next(size_, &field)) return std::nullopt;
      if (field.number == QuantizedMatmulRequest::kRequestIdFieldNumber && field.bytes >= 0 &&
          field.bytes <= kMaxPeekedBytes) {
        found = {reader_.position(), field.bytes};
      }
      if (!reader_.Pass(field)) return std::nullopt;
    }
    return found;
  }

  bool Scan() {
    while (reader_.position() < size_) {
      Field field;
      if (!reader_.Next(size_, &field)) return false;
      const bool activations =
          field.number == QuantizedMatmulRequest::kActivationsFieldNumber && field.bytes >= 0;
      if (activations ? !ScanActivations(field) : !reader_.Pass(field)) return false;
    }
    return true;
  }

  absl::Span<const Edit> edits() const { return edits_; }
  const std::optional<WireRange>& last_raw() const { return last_raw_; }

 private:
  bool ScanActivations(const Field& field) {
    const size_t mine = edits_.size();
    edits_.push_back({.begin = field.length_at, .end = reader_.position()});
    int64_t saved = 0;
    while (reader_.position() < field.end) {
      Field inner;
      if (!reader_.Next(field.end, &inner)) return false;
      if (inner.number == v1::Tensor::kRawFieldNumber && inner.bytes >= 0) {
        last_raw_ = {reader_.position(), inner.bytes};
        edits_.push_back({.begin = inner.length_at, .end = inner.end});
        edits_.back().SetVarint(0);
        saved += edits_.back().saved();
      }
      if (!reader_.Pass(inner) || edits_.size() > kMaxEdits) return false;
    }
    edits_[mine].SetVarint(static_cast<uint64_t>(field.bytes - saved));
    return edits_.size() <= kMaxEdits;
  }

  FieldReader reader_;
  const int64_t size_;
  absl::InlinedVector<Edit, 4> edits_;
  std::optional<WireRange> last_raw_;
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

bool ParseSifted(Pieces pieces, google::protobuf::Message* out) { return ParseRuns(pieces, out); }

bool ParseWhole(Pieces pieces, google::protobuf::Message* out) {
  return Sift(pieces, *out->GetDescriptor()).passes && ParseRuns(pieces, out);
}

bool ParseCutting(Pieces pieces, google::protobuf::Message* request,
                  std::optional<WireRange>* raw) {
  raw->reset();
  const int64_t size = SizeOfAll(pieces);
  Cutter cutter(pieces, size);
  if (!cutter.Scan() || !cutter.last_raw()) return ParseRuns(pieces, request);
  *raw = cutter.last_raw();
  return ParseRuns(MakeRuns(pieces, cutter.edits()), request);
}

std::string PeekRequestId(Pieces pieces) {
  const std::optional<WireRange> range = Cutter(pieces, SizeOfAll(pieces)).FindRequestId();
  if (!range) return "";
  std::string id(range->size, '\0');
  CopyRange(pieces, *range, id.data());
  // Through the parser as a message of its own, because that refuses what is not UTF-8. A length of
  // two bytes serves any id.
  std::string wire = {
      static_cast<char>(QuantizedMatmulRequest::kRequestIdFieldNumber << 3 | FieldReader::kBytes),
      static_cast<char>(id.size() | 0x80), static_cast<char>(id.size() >> 7)};
  wire += id;
  QuantizedMatmulRequest request;
  return request.ParseFromString(wire) ? id : "";
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
