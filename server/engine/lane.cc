// Lane: buffers, copies, and when to wait.
#include "server/engine/lane.h"

#include <algorithm>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/time/clock.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"

namespace awqd::engine {

namespace {

// The alignment that kernels expect of what a lane returns.
constexpr int64_t kAlign = 256;

bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAlign == 0; }

}  // namespace

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
  AWQD_RETURN_IF_ERROR(Settle());  // staging memory of early work is still read
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
  const auto is_small = [&](const RowPiece& piece) {
    return pieces.size() > 1 && piece.device == nullptr && piece.rows * row_bytes < kOwnCopyBytes;
  };
  int64_t small_bytes = 0;
  for (const RowPiece& piece : pieces) {
    if (is_small(piece)) small_bytes += piece.rows * row_bytes;
  }
  if (small_bytes > 0) AWQD_RETURN_IF_ERROR(Settle());
  AWQD_ASSIGN_OR_RETURN(char* pinned, GrowBuffer(&x_staging_, MemoryKind::kStaging, small_bytes));
  std::vector<CopyPiece> of_devices;
  for (size_t i = 0; i < pieces.size();) {
    size_t end = i + 1;
    const char* source = pieces[i].data;
    if (is_small(pieces[i])) {
      while (end < pieces.size() && is_small(pieces[end])) ++end;
      source = pinned;
      pinned = Concatenate(pieces.subspan(i, end - i), row_bytes, pinned);
    }
    const int64_t bytes = CountRows(pieces.subspan(i, end - i)) * row_bytes;
    if (const Device* const device = pieces[i].device) {
      of_devices.push_back({target, source, bytes, device != device_});
    } else {
      AWQD_RETURN_IF_ERROR(device_->CopyToDevice(target, source, bytes, stream_->view()));
    }
    target += bytes;
    i = end;
  }
  return of_devices.empty() ? absl::OkStatus() : device_->CopyPieces(of_devices, stream_->view());
}

absl::StatusOr<const void*> Lane::GatherRows(absl::Span<const RowPiece> pieces, int64_t row_bytes) {
  if (pieces.size() == 1 &&
      (direct_ || (pieces[0].device == device_ && IsAligned(pieces[0].data)))) {
    return pieces[0].data;
  }
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

void* Lane::FindPlace(void* host, int64_t bytes) const {
  if (direct_) return host;
  char* const begin = static_cast<char*>(host);
  bool on_host = true;
  for (const DeviceOutput& part : outputs_) {
    if (begin + bytes <= part.begin || begin >= part.begin + part.output.size()) continue;
    on_host = false;
    const bool all = begin >= part.begin && begin + bytes <= part.begin + part.output.size();
    char* const place = part.output.data() + (begin - part.begin);
    if (all && part.output.device() == device_ && IsAligned(place)) return place;
  }
  constexpr int64_t kSmall = 64 << 10;
  return on_host && bytes <= kSmall && IsAligned(host) ? host : nullptr;
}

absl::StatusOr<Lane::Targets> Lane::AllocateResults(absl::Span<const ResultPiece> pieces) {
  int64_t bytes = 0;
  for (const ResultPiece& piece : pieces) {
    if (FindPlace(piece.data, piece.bytes) == nullptr) bytes += RoundUp(piece.bytes, kAlign);
  }
  char* next = nullptr;
  if (bytes > 0) {
    AWQD_ASSIGN_OR_RETURN(next, GrowBuffer(&y_device_, MemoryKind::kDevice, bytes));
  }
  Targets out;
  for (const ResultPiece& piece : pieces) {
    void* const place = FindPlace(piece.data, piece.bytes);
    out.push_back(place == nullptr ? next : place);
    if (place == nullptr) next += RoundUp(piece.bytes, kAlign);
  }
  return out;
}

absl::Status Lane::Fetch(void* host, const void* target, int64_t bytes) {
  const ResultPiece piece = {static_cast<char*>(host), bytes};
  return Fetch({&piece, 1}, {const_cast<void*>(target)});
}

absl::Status Lane::FetchPiece(const ResultPiece& piece, const char* from,
                              std::vector<CopyPiece>* to_devices) {
  const auto copy_to_host = [&](char* begin, char* end) -> absl::Status {
    const char* const source = from + (begin - piece.data);
    if (begin >= end || source == begin) return absl::OkStatus();
    return device_->CopyToHost(begin, source, end - begin, stream_->view());
  };
  char* next = piece.data;  // the first byte that is in no part yet
  char* const end = piece.data + piece.bytes;
  for (const DeviceOutput& part : outputs_) {
    char* const begin = std::max(next, part.begin);
    char* const part_end = std::min(end, part.begin + part.output.size());
    if (begin >= part_end) continue;
    AWQD_RETURN_IF_ERROR(copy_to_host(next, begin));
    char* const to = part.output.data() + (begin - part.begin);
    const char* const source = from + (begin - piece.data);
    if (to != source) {
      to_devices->push_back({to, source, part_end - begin, part.output.device() != device_});
    }
    next = part_end;
  }
  return copy_to_host(next, end);
}

absl::Status Lane::Fetch(absl::Span<const ResultPiece> pieces, const Targets& targets) {
  std::vector<CopyPiece> to_devices;
  for (size_t i = 0; i < pieces.size(); ++i) {
    AWQD_RETURN_IF_ERROR(FetchPiece(pieces[i], static_cast<const char*>(targets[i]), &to_devices));
  }
  if (!to_devices.empty()) {
    AWQD_RETURN_IF_ERROR(device_->CopyPieces(to_devices, stream_->view()));
  }
  pending_ = pending_ || early_;
  if (early_) return absl::OkStatus();
  return Synchronize();
}

absl::Status Lane::Synchronize() {
  uploads_used_ = 0;
  pending_ = false;
  const absl::Status status = stream_->Synchronize();
  kept_.clear();
  return status;
}

absl::Status Lane::Settle(size_t most) {
  return pending_ && kept_.size() >= most ? Synchronize() : absl::OkStatus();
}

std::shared_ptr<SharedEvent> Lane::MakeEvent() {
  for (const std::shared_ptr<SharedEvent>& event : events_) {
    if (event.use_count() == 1) return event;
  }
  absl::StatusOr<std::unique_ptr<SharedEvent>> made = device_->CreateEvent();
  if (!made.ok()) return nullptr;
  return events_.emplace_back(*std::move(made));
}

}  // namespace awqd::engine
