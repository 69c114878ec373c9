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

// A result that lies whole in one host buffer, or null.
char* Whole(absl::Span<const RowPiece> pieces) {
  return pieces.size() == 1 ? pieces[0].y : nullptr;
}

}  // namespace

Lane::Lane(Device* device, std::unique_ptr<Stream> stream)
    : device_(device), direct_(device->host_addressable()), stream_(std::move(stream)) {}

absl::StatusOr<std::unique_ptr<Lane>> Lane::Create(Device* device) {
  AWQD_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device->CreateStream());
  return std::unique_ptr<Lane>(new Lane(device, std::move(stream)));
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

absl::StatusOr<const void*> Lane::Upload(const void* host, int64_t bytes, Scratch* staging,
                                         Scratch* device) {
  if (direct_) return host;
  AWQD_ASSIGN_OR_RETURN(char* pinned, staging->Get(device_, MemoryKind::kStaging, bytes));
  AWQD_ASSIGN_OR_RETURN(char* target, device->Get(device_, MemoryKind::kDevice, bytes));
  if (host != pinned) std::memcpy(pinned, host, bytes);
  AWQD_RETURN_IF_ERROR(device_->CopyToDevice(target, pinned, bytes, stream_->view()));
  return target;
}

absl::StatusOr<const void*> Lane::Gather(absl::Span<const RowPiece> pieces, int64_t row_bytes) {
  const int64_t bytes = Tokens(pieces) * row_bytes;
  if (pieces.size() == 1) return Upload(pieces[0].x, bytes, &x_staging_, &x_device_);
  AWQD_ASSIGN_OR_RETURN(char* rows, x_staging_.Get(device_, MemoryKind::kStaging, bytes));
  char* next = rows;
  for (const RowPiece& piece : pieces) {
    std::memcpy(next, piece.x, piece.tokens * row_bytes);
    next += piece.tokens * row_bytes;
  }
  return Upload(rows, bytes, &x_staging_, &x_device_);
}

absl::StatusOr<char*> Lane::Target(char* direct, int64_t bytes) {
  if (direct_ && direct != nullptr) return direct;
  return y_device_.Get(device_, MemoryKind::kDevice, bytes);
}

absl::Status Lane::Scatter(const char* target, absl::Span<const RowPiece> pieces,
                           int64_t row_bytes) {
  const char* next = target;
  if (!direct_) {
    const int64_t bytes = Tokens(pieces) * row_bytes;
    AWQD_ASSIGN_OR_RETURN(char* pinned, y_staging_.Get(device_, MemoryKind::kStaging, bytes));
    AWQD_RETURN_IF_ERROR(device_->CopyToHost(pinned, target, bytes, stream_->view()));
    next = pinned;
  }
  AWQD_RETURN_IF_ERROR(stream_->Synchronize());
  for (const RowPiece& piece : pieces) {
    if (next != piece.y) std::memcpy(piece.y, next, piece.tokens * row_bytes);
    next += piece.tokens * row_bytes;
  }
  return absl::OkStatus();
}

absl::Status Lane::Matmul(const MatmulWork& work, absl::Span<const RowPiece> pieces, Path path,
                          const KernelRow** ran) {
  const DeviceWeight& weight = *work.weight;
  const WeightShape& shape = weight.shape;
  const int64_t tokens = Tokens(pieces);
  const int64_t y_row_bytes = shape.n * SizeOf(work.out_dtype);
  MatmulArgs args;
  args.weight = &weight;
  args.bias = weight.bias_data();
  if (!work.bias.empty()) {
    AWQD_ASSIGN_OR_RETURN(const void* bias,
                          Upload(work.bias.data(), shape.n * 4, &bias_staging_, &bias_device_));
    args.bias = static_cast<const float*>(bias);
  }
  AWQD_ASSIGN_OR_RETURN(const void* x, Gather(pieces, shape.k * SizeOf(work.x_dtype)));
  args.x = {x, work.x_dtype, tokens, shape.k};
  // Either path may run (QuantizedMatmul falls back), so the scratch serves both.
  const int64_t scratch =
      std::max(WorkspaceBytes(weight, Path::kFused, tokens), WorkspaceBytes(weight, path, tokens));
  AWQD_ASSIGN_OR_RETURN(args.workspace, workspace_.Get(device_, MemoryKind::kDevice, scratch));
  AWQD_ASSIGN_OR_RETURN(char* y, Target(Whole(pieces), tokens * y_row_bytes));
  args.y = {y, work.out_dtype, tokens, shape.n};
  AWQD_RETURN_IF_ERROR(QuantizedMatmul(args, path, stream_->view(), ran));
  return Scatter(y, pieces, y_row_bytes);
}

absl::Status Lane::Dequantize(const DequantizeWork& work, char* out, const KernelRow** ran) {
  const int64_t row_bytes = work.cols * SizeOf(work.out_dtype);
  AWQD_ASSIGN_OR_RETURN(char* target, Target(out, work.rows * row_bytes));
  DequantizeArgs args;
  args.weight = work.weight.get();
  args.out = {target, work.out_dtype, work.rows, work.cols};
  args.row_begin = work.row_begin;
  args.col_begin = work.col_begin;
  AWQD_RETURN_IF_ERROR(awqd::Dequantize(args, stream_->view(), ran));
  const RowPiece piece{nullptr, out, work.rows};
  return Scatter(target, {&piece, 1}, row_bytes);
}

}  // namespace awqd
