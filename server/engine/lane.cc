// Lane: staging, copies and launches of one batch.
#include "server/engine/lane.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/status.h"

namespace awqd {
namespace {

int64_t Tokens(absl::Span<const RowPiece> pieces) {
  int64_t tokens = 0;
  for (const RowPiece& piece : pieces) tokens += piece.tokens;
  return tokens;
}

// From here on a piece is worth a copy to the device of its own; smaller ones share one, because
// starting a copy costs as much as gathering this many bytes.
constexpr int64_t kOwnCopyBytes = 64 << 10;

}  // namespace

Lane::Lane(Device* device, StagingPool* staging, std::unique_ptr<Stream> stream)
    : device_(device),
      staging_(staging),
      direct_(device->host_addressable()),
      stream_(std::move(stream)) {}

absl::StatusOr<std::unique_ptr<Lane>> Lane::Create(Device* device, StagingPool* staging) {
  AWQD_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device->CreateStream());
  return std::unique_ptr<Lane>(new Lane(device, staging, std::move(stream)));
}

absl::StatusOr<char*> Lane::Scratch::Get(Device* device, MemoryKind kind, int64_t bytes) {
  if (!buffer_ || buffer_.size() < bytes) {
    // Grow by half at least, so that slowly growing requests do not allocate each time.
    const int64_t wanted = std::max({bytes, buffer_.size() + buffer_.size() / 2, int64_t{4096}});
    buffer_.Reset();
    AWQD_ASSIGN_OR_RETURN(buffer_, device->Allocate(kind, wanted));
  }
  return static_cast<char*>(buffer_.data());
}

absl::StatusOr<const float*> Lane::Bias(const std::vector<float>& bias) {
  if (direct_) return bias.data();
  const auto bytes = static_cast<int64_t>(bias.size() * sizeof(float));
  AWQD_ASSIGN_OR_RETURN(char* pinned, bias_staging_.Get(device_, MemoryKind::kStaging, bytes));
  AWQD_ASSIGN_OR_RETURN(char* target, bias_device_.Get(device_, MemoryKind::kDevice, bytes));
  std::memcpy(pinned, bias.data(), bytes);
  AWQD_RETURN_IF_ERROR(device_->CopyToDevice(target, pinned, bytes, stream_->view()));
  return reinterpret_cast<const float*>(target);
}

char* Lane::Concatenate(absl::Span<const RowPiece> pieces, int64_t row_bytes, char* target) {
  for (const RowPiece& piece : pieces) {
    const int64_t bytes = piece.tokens * row_bytes;
    if (bytes > 0) std::memcpy(target, piece.x, bytes);
    staging_->CountCopy(bytes);
    target += bytes;
  }
  return target;
}

absl::Status Lane::Upload(absl::Span<const RowPiece> pieces, int64_t row_bytes, char* target) {
  const auto is_large = [&](const RowPiece& piece) {
    return pieces.size() == 1 || piece.tokens * row_bytes >= kOwnCopyBytes;
  };
  int64_t small_bytes = 0;
  for (const RowPiece& piece : pieces) {
    if (!is_large(piece)) small_bytes += piece.tokens * row_bytes;
  }
  AWQD_ASSIGN_OR_RETURN(char* pinned, x_staging_.Get(device_, MemoryKind::kStaging, small_bytes));
  for (size_t i = 0; i < pieces.size();) {
    size_t end = i + 1;
    const char* source = pieces[i].x;
    if (!is_large(pieces[i])) {
      while (end < pieces.size() && !is_large(pieces[end])) ++end;
      source = pinned;
      pinned = Concatenate(pieces.subspan(i, end - i), row_bytes, pinned);
    }
    const int64_t bytes = Tokens(pieces.subspan(i, end - i)) * row_bytes;
    AWQD_RETURN_IF_ERROR(device_->CopyToDevice(target, source, bytes, stream_->view()));
    target += bytes;
    i = end;
  }
  return absl::OkStatus();
}

absl::StatusOr<const void*> Lane::Gather(absl::Span<const RowPiece> pieces, int64_t row_bytes) {
  if (direct_ && pieces.size() == 1) return pieces[0].x;
  const int64_t bytes = Tokens(pieces) * row_bytes;
  if (direct_) {
    AWQD_ASSIGN_OR_RETURN(char* rows, x_staging_.Get(device_, MemoryKind::kStaging, bytes));
    Concatenate(pieces, row_bytes, rows);
    return rows;
  }
  AWQD_ASSIGN_OR_RETURN(char* target, x_device_.Get(device_, MemoryKind::kDevice, bytes));
  AWQD_RETURN_IF_ERROR(Upload(pieces, row_bytes, target));
  return target;
}

absl::StatusOr<char*> Lane::Target(char* host, int64_t bytes) {
  if (direct_) return host;
  return y_device_.Get(device_, MemoryKind::kDevice, bytes);
}

absl::Status Lane::Fetch(char* host, const char* target, int64_t bytes) {
  if (!direct_) {
    AWQD_RETURN_IF_ERROR(device_->CopyToHost(host, target, bytes, stream_->view()));
  }
  return stream_->Synchronize();
}

absl::Status Lane::Matmul(const MatmulWork& work, absl::Span<const RowPiece> pieces, Path path,
                          char* y, const KernelRow** ran) {
  const DeviceWeight& weight = work.here();
  const WeightShape& shape = weight.shape;
  const int64_t tokens = Tokens(pieces);
  const int64_t y_bytes = tokens * shape.n * SizeOf(work.out_dtype);
  MatmulArgs args;
  args.weight = &weight;
  args.bias = weight.bias_data();
  if (!work.bias.empty()) {
    AWQD_ASSIGN_OR_RETURN(args.bias, Bias(work.bias));
  }
  AWQD_ASSIGN_OR_RETURN(const void* x, Gather(pieces, shape.k * SizeOf(work.x_dtype)));
  args.x = {x, work.x_dtype, tokens, shape.k};
  // Either path may run (QuantizedMatmul falls back), so the scratch serves both.
  const int64_t scratch =
      std::max(WorkspaceBytes(weight, Path::kFused, tokens), WorkspaceBytes(weight, path, tokens));
  AWQD_ASSIGN_OR_RETURN(args.workspace, workspace_.Get(device_, MemoryKind::kDevice, scratch));
  AWQD_ASSIGN_OR_RETURN(char* target, Target(y, y_bytes));
  args.y = {target, work.out_dtype, tokens, shape.n};
  AWQD_RETURN_IF_ERROR(QuantizedMatmul(args, path, stream_->view(), ran));
  return Fetch(y, target, y_bytes);
}

absl::Status Lane::Dequantize(const DequantizeWork& work, char* out, const KernelRow** ran) {
  const int64_t bytes = work.rows * work.cols * SizeOf(work.out_dtype);
  AWQD_ASSIGN_OR_RETURN(char* target, Target(out, bytes));
  DequantizeArgs args;
  args.weight = &work.here();
  args.out = {target, work.out_dtype, work.rows, work.cols};
  args.row_begin = work.row_begin;
  args.col_begin = work.col_begin;
  AWQD_RETURN_IF_ERROR(awqd::Dequantize(args, stream_->view(), ran));
  return Fetch(out, target, bytes);
}

void Lane::FreeHostBuffers() {
  if (!direct_) return;
  x_staging_.Free();
  workspace_.Free();
}

}  // namespace awqd
