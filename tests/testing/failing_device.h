// FailingDevice: a CPU device whose memory the host cannot access, and whose N-th call fails.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/device.h"

namespace awqd::testing {

class FailingDevice final : public Device {
 public:
  enum class Way {
    kOutOfMemory,  // RESOURCE_EXHAUSTED, once
    kOnce,         // INTERNAL, once: a launch or a copy that fails
    kSticky        // INTERNAL for this and all later calls; the device is then unhealthy
  };

  explicit FailingDevice(std::unique_ptr<Device> inner) : inner_(std::move(inner)) {}

  // Counts calls from 0 again; lets the `number`-th call fail, or none with 0.
  void FailAt(int64_t number, Way way) {
    way_ = way;
    fail_at_ = number;
    calls_ = 0;
    failed_ = 0;
  }
  int64_t calls() const { return calls_; }
  int64_t failed() const { return failed_; }
  // Makes the device work again.
  void Repair() {
    fail_at_ = 0;
    broken_ = false;
  }

  const DeviceInfo& info() const override { return inner_->info(); }
  int64_t FreeBytes() const override { return inner_->FreeBytes(); }
  void SetBudget(int64_t bytes) override { inner_->SetBudget(bytes); }
  int64_t UsedBytes() const override { return inner_->UsedBytes(); }
  absl::StatusOr<Buffer> Allocate(MemoryKind kind, int64_t bytes) override {
    if (absl::Status status = Call("allocation"); !status.ok()) return status;
    return inner_->Allocate(kind, bytes);
  }
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override {
    if (absl::Status status = Call("stream"); !status.ok()) return status;
    auto inner = inner_->CreateStream();
    if (!inner.ok()) return inner.status();
    return std::make_unique<FailingStream>(*std::move(inner), this);
  }
  absl::Status CopyToDevice(void* device, const void* host, int64_t bytes,
                            StreamView stream) override {
    if (absl::Status status = Call("copy to the device"); !status.ok()) return status;
    return inner_->CopyToDevice(device, host, bytes, stream);
  }
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes,
                          StreamView stream) override {
    if (absl::Status status = Call("copy to the host"); !status.ok()) return status;
    return inner_->CopyToHost(host, device, bytes, stream);
  }
  absl::Status CopyPieces(absl::Span<const CopyPiece> pieces, StreamView stream) override {
    if (absl::Status status = Call("copy of pieces"); !status.ok()) return status;
    return inner_->CopyPieces(pieces, stream);
  }
  bool host_addressable() const override { return false; }
  Device& backend() override { return inner_->backend(); }
  bool healthy() const override { return !broken_; }

 private:
  class FailingStream final : public Stream {
   public:
    FailingStream(std::unique_ptr<Stream> inner, FailingDevice* device)
        : inner_(std::move(inner)), device_(device) {}
    StreamView view() const override { return inner_->view(); }
    absl::Status Synchronize() override {
      if (absl::Status status = device_->Call("wait"); !status.ok()) return status;
      return inner_->Synchronize();
    }

   private:
    const std::unique_ptr<Stream> inner_;
    FailingDevice* const device_;
  };

  absl::Status Call(absl::string_view what) {
    const bool now = ++calls_ == fail_at_;
    if (now && way_ == Way::kSticky) broken_ = true;
    if (!now && !broken_) return absl::OkStatus();
    ++failed_;
    const std::string message = absl::StrCat("the test's ", what);
    return way_ == Way::kOutOfMemory ? absl::ResourceExhaustedError(message)
                                     : absl::InternalError(message);
  }

  const std::unique_ptr<Device> inner_;
  std::atomic<Way> way_{Way::kOnce};
  std::atomic<int64_t> fail_at_{0}, calls_{0}, failed_{0};
  std::atomic<bool> broken_{false};
};

}  // namespace awqd::testing
