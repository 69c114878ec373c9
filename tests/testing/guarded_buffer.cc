// Writes and reads the bands with the device's copies, so that they guard any memory.
#include "tests/testing/guarded_buffer.h"

#include <algorithm>
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

absl::StatusOr<GuardedBuffer> GuardedBuffer::WithBands(Device& device, int64_t bytes,
                                                       int64_t misalign) {
  GuardedBuffer out;
  out.device_ = &device;
  out.size_ = out.poisoned_ = bytes;
  out.misalign_ = misalign;
  AWQD_ASSIGN_OR_RETURN(out.buffer_,
                        device.Allocate(MemoryKind::kDevice, bytes + misalign + 2 * kBand));
  uint8_t* const start = static_cast<uint8_t*>(out.buffer_.data());
  AWQD_RETURN_IF_ERROR(Upload(device, start, std::vector<uint8_t>(kBand + misalign, kBandByte)));
  AWQD_RETURN_IF_ERROR(
      Upload(device, start + kBand + misalign + bytes, std::vector<uint8_t>(kBand, kBandByte)));
  return out;
}

absl::StatusOr<GuardedBuffer> GuardedBuffer::Create(Device& device, int64_t bytes,
                                                    int64_t misalign) {
  AWQD_ASSIGN_OR_RETURN(GuardedBuffer out, WithBands(device, bytes, misalign));
  AWQD_RETURN_IF_ERROR(out.Poison());
  return out;
}

absl::StatusOr<GuardedBuffer> GuardedBuffer::CreateScratch(Device& device, int64_t bytes) {
  AWQD_ASSIGN_OR_RETURN(GuardedBuffer out, WithBands(device, bytes, 0));
  out.poisoned_ = std::min(bytes, kScratchPoison);
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

absl::Status GuardedBuffer::Poison() {
  return Upload(*device_, data(), std::vector<uint8_t>(poisoned_, kPoison));
}

absl::StatusOr<std::vector<uint8_t>> GuardedBuffer::Read() const {
  return Download(*device_, data(), size_);
}

absl::StatusOr<int64_t> GuardedBuffer::FirstBroken(int64_t begin, int64_t end) const {
  const uint8_t* const start = static_cast<const uint8_t*>(buffer_.data());
  AWQD_ASSIGN_OR_RETURN(const std::vector<uint8_t> band,
                        Download(*device_, start + begin, end - begin));
  for (int64_t i = 0; i < end - begin; ++i) {
    if (band[i] != kBandByte) return begin + i;
  }
  return -1;
}

absl::Status GuardedBuffer::CheckBands() const {
  const int64_t begin = kBand + misalign_;
  AWQD_ASSIGN_OR_RETURN(int64_t broken, FirstBroken(0, begin));
  if (broken < 0) {
    AWQD_ASSIGN_OR_RETURN(broken, FirstBroken(begin + size_, begin + size_ + kBand));
  }
  if (broken < 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("byte ", broken - begin, " relative to a buffer of ",
                                          size_, " bytes was written"));
}

}  // namespace awqd::testing
