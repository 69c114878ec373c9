// Lane: staging, copies and launches of one piece of work.
#include "server/engine/lane.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/status.h"

namespace awqd {

Lane::Lane(Device* device, std::unique_ptr<Stream> stream)
    : device_(device), stream_(std::move(stream)) {}

absl::StatusOr<std::unique_ptr<Lane>> Lane::Create(Device* device) {
  AWQD_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device->CreateStream());
  return std::unique_ptr<Lane>(new Lane(device, std::move(stream)));
}

absl::StatusOr<void*> Lane::Scratch::Get(Device* device, MemoryKind kind, int64_t bytes) {
  if (buffer_.size() >= bytes && buffer_) return buffer_.data();
  // Grow by half at least, so that slowly growing requests do not allocate each time.
  const int64_t wanted = std::max(bytes, buffer_.size() + buffer_.size() / 2);
  buffer_.Reset();
  AWQD_ASSIGN_OR_RETURN(buffer_, device->Allocate(kind, std::max<int64_t>(wanted, 4096)));
  return buffer_.data();
}

absl::StatusOr<const void*> Lane::Upload(const void* host, int64_t bytes, Scratch* staging,
                                         Scratch* device) {
  if (device_->host_addressable() || bytes == 0) return host;
  AWQD_ASSIGN_OR_RETURN(void* pinned, staging->Get(device_, MemoryKind::kStaging, bytes));
  AWQD_ASSIGN_OR_RETURN(void* target, device->Get(device_, MemoryKind::kDevice, bytes));
  std::memcpy(pinned, host, bytes);
  AWQD_RETURN_IF_ERROR(device_->CopyToDevice(target, pinned, bytes, stream_->view()));
  return target;
}

template <typename Launch>
absl::Status Lane::RunInto(std::string* out, int64_t bytes, Launch launch) {
  out->resize(bytes);
  if (device_->host_addressable() || bytes == 0) {
    AWQD_RETURN_IF_ERROR(launch(out->data()));
    return stream_->Synchronize();
  }
  AWQD_ASSIGN_OR_RETURN(void* target, y_device_.Get(device_, MemoryKind::kDevice, bytes));
  AWQD_ASSIGN_OR_RETURN(void* pinned, y_staging_.Get(device_, MemoryKind::kStaging, bytes));
  AWQD_RETURN_IF_ERROR(launch(target));
  AWQD_RETURN_IF_ERROR(device_->CopyToHost(pinned, target, bytes, stream_->view()));
  AWQD_RETURN_IF_ERROR(stream_->Synchronize());
  std::memcpy(out->data(), pinned, bytes);
  return absl::OkStatus();
}

absl::Status Lane::Matmul(const MatmulWork& work, Path path, std::string* out,
                          const KernelRow** ran) {
  const DeviceWeight& weight = *work.weight;
  const WeightShape& shape = weight.shape;
  MatmulArgs args;
  args.weight = &weight;
  args.bias = weight.bias_data();
  if (!work.bias.empty()) {
    AWQD_ASSIGN_OR_RETURN(const void* bias,
                          Upload(work.bias.data(), shape.n * 4, &bias_staging_, &bias_device_));
    args.bias = static_cast<const float*>(bias);
  }
  AWQD_ASSIGN_OR_RETURN(const void* x, Upload(work.x.data(), static_cast<int64_t>(work.x.size()),
                                              &x_staging_, &x_device_));
  args.x = {x, work.x_dtype, work.tokens, shape.k};
  // Either path may run (QuantizedMatmul falls back), so the scratch serves both.
  const int64_t scratch = std::max(WorkspaceBytes(weight, Path::kFused, work.tokens),
                                   WorkspaceBytes(weight, path, work.tokens));
  AWQD_ASSIGN_OR_RETURN(args.workspace, workspace_.Get(device_, MemoryKind::kDevice, scratch));
  return RunInto(out, work.tokens * shape.n * SizeOf(work.out_dtype), [&](void* y) {
    args.y = {y, work.out_dtype, work.tokens, shape.n};
    return QuantizedMatmul(args, path, stream_->view(), ran);
  });
}

absl::Status Lane::Dequantize(const DequantizeWork& work, std::string* out, const KernelRow** ran) {
  return RunInto(out, work.rows * work.cols * SizeOf(work.out_dtype), [&](void* target) {
    DequantizeArgs args;
    args.weight = work.weight.get();
    args.out = {target, work.out_dtype, work.rows, work.cols};
    args.row_begin = work.row_begin;
    args.col_begin = work.col_begin;
    return awqd::Dequantize(args, stream_->view(), ran);
  });
}

}  // namespace awqd
