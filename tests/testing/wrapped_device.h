// WrappedDevice: a CPU device that can pretend that the host cannot access its memory, or that it
// failed and recovered. Weights may be prepared on it or on the wrapped device.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
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
  // A handle by which this device imports memory of this process.
  static std::string Export(const void* data, int64_t bytes) {
    std::string handle(64, '\0');
    const Exported exported = {kExported, data, bytes};
    std::memcpy(handle.data(), &exported, sizeof(exported));
    return handle;
  }
  // Imports that are not closed.
  int64_t imported() const { return *imported_; }
  // How often events were waited for and recorded. Their handle is EventHandle().
  int64_t waits() const { return *waits_; }
  int64_t records() const { return *records_; }
  // How often the host waited for a stream.
  int64_t synchronizations() const { return synchronizations_; }
  static std::string EventHandle() { return std::string(64, 'e'); }

  Device& inner() { return *inner_; }
  int64_t allocations() const { return allocations_; }
  int64_t copies_to_device() const { return copies_to_device_; }
  int64_t copies_to_host() const { return copies_to_host_; }
  int64_t copies_of_pieces() const { return copies_of_pieces_; }

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
  absl::Status CopyPieces(absl::Span<const CopyPiece> pieces, StreamView stream) override {
    ++copies_of_pieces_;
    if (broken_) return Fault();
    return inner_->CopyPieces(pieces, stream);
  }
  absl::StatusOr<Buffer> ImportMemory(absl::string_view handle) override {
    Exported exported = {};
    if (handle.size() == 64) std::memcpy(&exported, handle.data(), sizeof(exported));
    if (exported.magic != kExported) return absl::InvalidArgumentError("got no handle");
    ++*imported_;
    return Buffer(const_cast<void*>(exported.data), exported.bytes,
                  [imported = imported_](void*, int64_t) { --*imported; });
  }
  // `descriptor`: of a memfd.
  absl::StatusOr<Buffer> ImportMemory(const UniqueFd& descriptor, int64_t bytes) override {
    const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 0));
    struct stat file = {};
    void* const data =
        fstat(descriptor.get(), &file) == 0 && S_ISREG(file.st_mode) && bytes <= file.st_size
            ? mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0)
            : MAP_FAILED;
    if (data == MAP_FAILED) return absl::InvalidArgumentError("got no memory of that size");
    ++*imported_;
    return Buffer(data, bytes, [imported = imported_](void* mapped, int64_t length) {
      munmap(mapped, static_cast<size_t>(length));
      --*imported;
    });
  }
  absl::StatusOr<std::unique_ptr<SharedEvent>> ImportEvent(absl::string_view handle) override {
    if (handle != EventHandle()) return absl::InvalidArgumentError("got no handle");
    return std::make_unique<CountedEvent>(waits_, records_);
  }
  absl::StatusOr<std::unique_ptr<SharedEvent>> CreateEvent() override {
    return std::make_unique<CountedEvent>(waits_, records_);
  }
  bool host_addressable() const override { return host_addressable_; }
  Device& backend() override { return inner_->backend(); }
  bool healthy() const override { return !broken_ && inner_->healthy(); }

 private:
  static absl::Status Fault() { return absl::InternalError("illegal address"); }

  static constexpr uint64_t kExported = 0x64657870;
  struct Exported {
    uint64_t magic;
    const void* data;
    int64_t bytes;
  };
  using Counter = std::shared_ptr<std::atomic<int64_t>>;
  static Counter MakeCounter() { return std::make_shared<std::atomic<int64_t>>(0); }
  class CountedEvent final : public SharedEvent {
   public:
    CountedEvent(Counter waits, Counter records)
        : waits_(std::move(waits)), records_(std::move(records)) {}
    absl::Status Wait(StreamView) override {
      ++*waits_;
      return absl::OkStatus();
    }
    absl::Status Record(StreamView) override {
      ++*records_;
      return absl::OkStatus();
    }

   private:
    const Counter waits_, records_;
  };

  class WrappedStream final : public Stream {
   public:
    WrappedStream(std::unique_ptr<Stream> inner, const WrappedDevice* device)
        : inner_(std::move(inner)), device_(device) {}
    StreamView view() const override { return inner_->view(); }
    absl::Status Synchronize() override {
      ++device_->synchronizations_;
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
  std::atomic<int64_t> copies_of_pieces_{0};
  mutable std::atomic<int64_t> synchronizations_{0};
  const Counter imported_ = MakeCounter(), waits_ = MakeCounter(), records_ = MakeCounter();
};

}  // namespace awqd::testing
