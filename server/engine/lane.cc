// Lane: buffers, copies, and when to wait.
#include "server/engine/lane.h"

#include <algorithm>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/time/clock.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"

namespace awqd::engine {

int64_t CountRows(absl::Span<const RowPiece> pieces) {
  int64_t rows = 0;
  for (const RowPiece& piece : pieces) rows += piece.rows;
  return rows;
}

absl::Status RunInSteps(int64_t items, int64_t most,
                        absl::FunctionRef<absl::Status(int64_t begin, int64_t count)> run) {
  for (int64_t begin = 0; begin < items; begin += most) {
    AWQD_RETURN_IF_ERROR(run(begin, std::min(most, items - begin)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Lane>> Lane::Create(const LaneOptions& options) {
  AWQD_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, options.device->CreateStream());
  return std::unique_ptr<Lane>(new Lane(options, std::move(stream)));
}

absl::StatusOr<char*> Lane::GrowBuffer(Buffer* buffer, MemoryKind kind, int64_t bytes) {
  if (!*buffer || buffer->size() < bytes) {
    if (*buffer) AWQD_RETURN_IF_ERROR(stream_->Synchronize());
    // Grow by half at least, so that slowly growing requests do not allocate each time.
    const int64_t wanted = std::max({bytes, buffer->size() + buffer->size() / 2, int64_t{4096}});
    buffer->Reset();
    AWQD_ASSIGN_OR_RETURN(*buffer, device_->Allocate(kind, wanted));
  }
  return static_cast<char*>(buffer->data());
}

absl::StatusOr<const void*> Lane::Upload(const void* host, int64_t bytes) {
  if (direct_) return host;
  const absl::Time begin = absl::Now();
  const absl::Cleanup count = [&] { input_time_ += absl::Now() - begin; };
  if (uploads_used_ == uploads_.size()) uploads_.emplace_back();
  auto& [staging, device] = uploads_[uploads_used_++];
  AWQD_ASSIGN_OR_RETURN(char* pinned, GrowBuffer(&staging, MemoryKind::kStaging, bytes));
  AWQD_ASSIGN_OR_RETURN(char* target, GrowBuffer(&device, MemoryKind::kDevice, bytes));
  std::memcpy(pinned, host, bytes);
  AWQD_RETURN_IF_ERROR(device_->CopyToDevice(target, pinned, bytes, stream_->view()));
  return target;
}

absl::StatusOr<const float*> Lane::Upload(absl::Span<const float> host) {
  AWQD_ASSIGN_OR_RETURN(const void* there,
                        Upload(host.data(), static_cast<int64_t>(host.size() * sizeof(float))));
  return static_cast<const float*>(there);
}

char* Lane::Concatenate(absl::Span<const RowPiece> pieces, int64_t row_bytes, char* target) {
  for (const RowPiece& piece : pieces) {
    const int64_t bytes = piece.rows * row_bytes;
    if (bytes > 0) std::memcpy(target, piece.data, bytes);
    options_.staging->CountCopy(bytes);
    target += bytes;
  }
  return target;
}

absl::Status Lane::CopyRows(absl::Span<const RowPiece> pieces, int64_t row_bytes, char* target) {
  // A piece of this size and more is copied to the device by itself. Smaller ones share a copy,
  // because starting a copy costs as much as gathering this many bytes.
  constexpr int64_t kOwnCopyBytes = 64 << 10;
  const auto is_large = [&](const RowPiece& piece) {
    return pieces.size() == 1 || piece.rows * row_bytes >= kOwnCopyBytes;
  };
  int64_t small_bytes = 0;
  for (const RowPiece& piece : pieces) {
    if (!is_large(piece)) small_bytes += piece.rows * row_bytes;
  }
  AWQD_ASSIGN_OR_RETURN(char* pinned, GrowBuffer(&x_staging_, MemoryKind::kStaging, small_bytes));
  for (size_t i = 0; i < pieces.size();) {
    size_t end = i + 1;
    const char* source = pieces[i].data;
    if (!is_large(pieces[i])) {
      while (end < pieces.size() && !is_large(pieces[end])) ++end;
      source = pinned;
      pinned = Concatenate(pieces.subspan(i, end - i), row_bytes, pinned);
    }
    const int64_t bytes = CountRows(pieces.subspan(i, end - i)) * row_bytes;
    AWQD_RETURN_IF_ERROR(device_->CopyToDevice(target, source, bytes, stream_->view()));
    target += bytes;
    i = end;
  }
  return absl::OkStatus();
}

absl::StatusOr<const void*> Lane::GatherRows(absl::Span<const RowPiece> pieces, int64_t row_bytes) {
  if (direct_ && pieces.size() == 1) return pieces[0].data;
  const absl::Time begin = absl::Now();
  const absl::Cleanup count = [&] { input_time_ += absl::Now() - begin; };
  const int64_t bytes = CountRows(pieces) * row_bytes;
  if (direct_) {
    AWQD_ASSIGN_OR_RETURN(char* rows, GrowBuffer(&x_staging_, MemoryKind::kStaging, bytes));
    Concatenate(pieces, row_bytes, rows);
    return rows;
  }
  AWQD_ASSIGN_OR_RETURN(char* target, GrowBuffer(&x_device_, MemoryKind::kDevice, bytes));
  AWQD_RETURN_IF_ERROR(CopyRows(pieces, row_bytes, target));
  return target;
}

absl::StatusOr<Lane::Targets> Lane::AllocateResults(absl::Span<const ResultPiece> pieces) {
  constexpr int64_t kAlign = 256;
  int64_t bytes = 0;
  for (const ResultPiece& piece : pieces) bytes += RoundUp(piece.bytes, kAlign);
  char* next = nullptr;
  if (!direct_) {
    AWQD_ASSIGN_OR_RETURN(next, GrowBuffer(&y_device_, MemoryKind::kDevice, bytes));
  }
  Targets out;
  for (const ResultPiece& piece : pieces) {
    out.push_back(direct_ ? piece.data : next);
    if (!direct_) next += RoundUp(piece.bytes, kAlign);
  }
  return out;
}

absl::Status Lane::Fetch(void* host, const void* target, int64_t bytes) {
  const ResultPiece piece = {static_cast<char*>(host), bytes};
  return Fetch({&piece, 1}, {const_cast<void*>(target)});
}

absl::Status Lane::Fetch(absl::Span<const ResultPiece> pieces, const Targets& targets) {
  for (size_t i = 0; i < pieces.size() && !direct_; ++i) {
    AWQD_RETURN_IF_ERROR(
        device_->CopyToHost(pieces[i].data, targets[i], pieces[i].bytes, stream_->view()));
  }
  uploads_used_ = 0;
  return stream_->Synchronize();
}

}  // namespace awqd::engine
