// Device, StreamView, Buffer: the small interface through which the server sees memory and order of
// work.
//
// Implemented by kernels/cpu/ and kernels/cuda/core/. Nothing here names CUDA, so that server/
// never does.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/types.h"

namespace awqd {

// Owns bytes in some memory. Move-only; frees on destruction.
class Buffer {
 public:
  using Deleter = std::function<void(void*, int64_t)>;

  Buffer() = default;
  Buffer(void* data, int64_t size, Deleter deleter) : data_(data, Free{size, std::move(deleter)}) {}

  void Reset() { *this = Buffer(); }
  void* data() const { return data_.get(); }
  int64_t size() const { return data_ ? data_.get_deleter().size : 0; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  struct Free {
    int64_t size;
    Deleter deleter;
    void operator()(void* data) const {
      if (deleter) deleter(data, size);
    }
  };
  std::unique_ptr<void, Free> data_;
};

// Names a stream without owning it. The CPU's only stream is null and work on it is done when a
// call returns.
struct StreamView {
  void* handle = nullptr;
  // kStreamCounters words of device memory for the blocks of a kernel to meet at. Kernels of one
  // stream run one after the other: each finds zeros and leaves zeros. Null on the CPU, and for
  // copies alone.
  uint32_t* counters = nullptr;
};
inline constexpr int kStreamCounters = 16384;

// Owns a stream of one device. Destroying it waits for the work on it.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual StreamView view() const = 0;
  // Blocks until all work given to the stream is done, and reports its first error.
  // INTERNAL for a fault of the device, which then counts as unhealthy.
  virtual absl::Status Synchronize() = 0;
};

enum class MemoryKind : uint8_t {
  kDevice,   // where kernels read and write: buffers that come, grow and stay
  kWeights,  // the same for weights: kept apart, so that unloading gives the device back what
             // loading took
  kStaging   // host memory that the device copies from and to at full speed (pinned on CUDA)
};

// One place that weights live and kernels run. Thread-safe.
class Device {
 public:
  virtual ~Device() = default;

  virtual const DeviceInfo& info() const = 0;

  // Bytes that Allocate can still hand out of device memory: physical memory and the budget,
  // whichever is less.
  virtual int64_t FreeBytes() const = 0;
  // Caps what Allocate hands out of device memory in total; 0 removes the cap.
  virtual void SetBudget(int64_t bytes) = 0;
  // Bytes of device memory currently handed out.
  virtual int64_t UsedBytes() const = 0;

  // At least 256-byte aligned, uninitialised. RESOURCE_EXHAUSTED naming the bytes asked for and
  // free.
  virtual absl::StatusOr<Buffer> Allocate(MemoryKind kind, int64_t bytes) = 0;

  virtual absl::StatusOr<std::unique_ptr<Stream>> CreateStream() = 0;
  // The same for copies alone: a stream that comes and goes beside work that runs.
  virtual absl::StatusOr<std::unique_ptr<Stream>> CreateCopyStream() { return CreateStream(); }

  // Copies between this device's memory and host memory (staging memory for it to be asynchronous),
  // in stream order. On the CPU both are memcpy.
  virtual absl::Status CopyToDevice(void* device, const void* host, int64_t bytes,
                                    StreamView stream) = 0;
  virtual absl::Status CopyToHost(void* host, const void* device, int64_t bytes,
                                  StreamView stream) = 0;

  // True when device memory can be read and written by the host directly (the CPU): copies can be
  // skipped.
  virtual bool host_addressable() const = 0;

  // The device whose type its backend knows: this one, or what it wraps.
  virtual Device& backend() { return *this; }

  // False after a sticky error: nothing on this device can be trusted any more.
  virtual bool healthy() const = 0;
};

}  // namespace awqd
