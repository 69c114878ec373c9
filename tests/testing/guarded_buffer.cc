// Bands are written and read back through the device's copies, so that they guard any memory.
#include "tests/testing/guarded_buffer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"

namespace awqd::testing {
namespace {

constexpr uint8_t kBandByte = 0xa5;

absl::Status Upload(Device& device, void* to, const std::vector<uint8_t>& bytes) {
  if (bytes.empty()) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(auto stream, device.CreateStream());
  AWQD_RETURN_IF_ERROR(device.CopyToDevice(to, bytes.data(), bytes.size(), stream->view()));
  return stream->Synchronize();
}

absl::StatusOr<std::vector<uint8_t>> Download(Device& device, const void* from, int64_t size) {
  std::vector<uint8_t> bytes(size);
  if (size == 0) return bytes;
  AWQD_ASSIGN_OR_RETURN(auto stream, device.CreateStream());
  AWQD_RETURN_IF_ERROR(device.CopyToHost(bytes.data(), from, size, stream->view()));
  AWQD_RETURN_IF_ERROR(stream->Synchronize());
  return bytes;
}

}  // namespace

absl::StatusOr<GuardedBuffer> GuardedBuffer::Create(Device& device, int64_t bytes,
                                                    int64_t misalign) {
  GuardedBuffer out;
  out.device_ = &device;
  out.size_ = bytes;
  out.misalign_ = misalign;
  const int64_t total = bytes + misalign + 2 * kBand;
  AWQD_ASSIGN_OR_RETURN(out.buffer_, device.Allocate(MemoryKind::kDevice, total));
  AWQD_RETURN_IF_ERROR(Upload(device, out.buffer_.data(), std::vector<uint8_t>(total, kBandByte)));
  AWQD_RETURN_IF_ERROR(out.Poison());
  return out;
}

absl::Status GuardedBuffer::Fill(const std::vector<uint8_t>& bytes) {
  if (static_cast<int64_t>(bytes.size()) != size_) {
    return absl::InvalidArgumentError(
        absl::StrCat("fill: got ", bytes.size(), " bytes, expected ", size_));
  }
  return Upload(*device_, data(), bytes);
}

absl::Status GuardedBuffer::Poison() { return Fill(std::vector<uint8_t>(size_, kPoison)); }

absl::StatusOr<std::vector<uint8_t>> GuardedBuffer::Read() const {
  return Download(*device_, data(), size_);
}

absl::Status GuardedBuffer::CheckBands() const {
  AWQD_ASSIGN_OR_RETURN(std::vector<uint8_t> all,
                        Download(*device_, buffer_.data(), buffer_.size()));
  const int64_t begin = kBand + misalign_;
  for (int64_t i = 0; i < static_cast<int64_t>(all.size()); ++i) {
    if (i == begin && size_ > 0) i += size_;
    if (all[i] != kBandByte) {
      return absl::DataLossError(absl::StrCat("byte ", i - begin, " relative to a buffer of ",
                                              size_, " bytes was written"));
    }
  }
  return absl::OkStatus();
}

}  // namespace awqd::testing
