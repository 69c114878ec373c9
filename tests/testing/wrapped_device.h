// WrappedDevice: a CPU device that can pretend that the host cannot access its memory, or that it
// failed and recovered. Weights may be prepared on it or on the wrapped device.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "kernels/device.h"

namespace awqd::testing {

class WrappedDevice final : public Device {
 public:
  // `host_addressable` false makes callers stage and copy, as on a GPU.
  WrappedDevice(std::unique_ptr<Device> inner, bool host_addressable)
      : inner_(std::move(inner)), host_addressable_(host_addressable) {}

  // Makes all work fail as after an illegal address: every Synchronize, copy, stream and allocation
  // of device memory.
  void Break() { broken_ = true; }
  // Makes the device work again.
  void Repair() { broken_ = false; }
  // Called within every allocation of memory other than staging memory. Set it before any
  // allocation.
  void OnAllocate(std::function<void()> hook) { on_allocate_ = std::move(hook); }
  Device& inner() { return *inner_; }
  int64_t allocations() const { return allocations_; }
  int64_t copies_to_device() const { return copies_to_device_; }
  int64_t copies_to_host() const { return copies_to_host_; }

  // Pretends to be another kind of device for the choice of layouts and kernels. Nothing can run on
  // it then.
  void Pretend(DeviceInfo info) { info_ = std::move(info); }

  const DeviceInfo& info() const override { return info_ ? *info_ : inner_->info(); }
  int64_t FreeBytes() const override { return inner_->FreeBytes(); }
  void SetBudget(int64_t bytes) override { inner_->SetBudget(bytes); }
  int64_t UsedBytes() const override { return inner_->UsedBytes(); }
  absl::StatusOr<Buffer> Allocate(MemoryKind kind, int64_t bytes) override {
    ++allocations_;
    if (kind != MemoryKind::kStaging) {
      if (broken_) return Fault();
      if (on_allocate_) on_allocate_();
    }
    return inner_->Allocate(kind, bytes);
  }
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override {
    if (broken_) return Fault();
    auto inner = inner_->CreateStream();
    if (!inner.ok()) return inner.status();
    return std::make_unique<WrappedStream>(*std::move(inner), this);
  }
  absl::Status CopyToDevice(void* device, const void* host, int64_t bytes,
                            StreamView stream) override {
    ++copies_to_device_;
    if (broken_) return Fault();
    return inner_->CopyToDevice(device, host, bytes, stream);
  }
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes,
                          StreamView stream) override {
    ++copies_to_host_;
    if (broken_) return Fault();
    return inner_->CopyToHost(host, device, bytes, stream);
  }
  bool host_addressable() const override { return host_addressable_; }
  Device& backend() override { return inner_->backend(); }
  bool healthy() const override { return !broken_ && inner_->healthy(); }

 private:
  static absl::Status Fault() { return absl::InternalError("illegal address"); }

  class WrappedStream final : public Stream {
   public:
    WrappedStream(std::unique_ptr<Stream> inner, const WrappedDevice* device)
        : inner_(std::move(inner)), device_(device) {}
    StreamView view() const override { return inner_->view(); }
    absl::Status Synchronize() override {
      if (device_->broken_) return Fault();
      return inner_->Synchronize();
    }

   private:
    const std::unique_ptr<Stream> inner_;
    const WrappedDevice* const device_;
  };

  const std::unique_ptr<Device> inner_;
  std::optional<DeviceInfo> info_;
  const bool host_addressable_;
  std::function<void()> on_allocate_;
  std::atomic<bool> broken_{false};
  std::atomic<int64_t> allocations_{0};
  std::atomic<int64_t> copies_to_device_{0};
  std::atomic<int64_t> copies_to_host_{0};
};

}  // namespace awqd::testing
