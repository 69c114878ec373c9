// Device, StreamView, Buffer: the interface through which the server uses memory and orders work.
//
// Implemented by kernels/cpu/ and kernels/cuda/core/. Nothing here names CUDA, so that server/
// never does.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/base/unique_fd.h"
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
  // kStreamCounters words of device memory, by which the blocks of a kernel synchronise. Kernels of
  // one stream run one after the other: each finds zeros and leaves zeros. Null on the CPU, and for
  // a stream of copies.
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

// Bytes to copy; the two places do not overlap.
struct CopyPiece {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t bytes = 0;
  bool between_devices = false;  // one place is memory of another device
};

// A point in a stream of another process, which that process may move. Thread-safe.
class SharedEvent {
 public:
  virtual ~SharedEvent() = default;
  // Later work on `stream` starts when the work is done that the other process recorded last.
  virtual absl::Status Wait(StreamView stream) = 0;
  // The other process may wait for the work that `stream` has now.
  virtual absl::Status Record(StreamView stream) = 0;
};

// A point in a stream of this process, for later work of any of its streams. Used by one thread at a
// time.
struct StreamPoint {
  std::shared_ptr<SharedEvent> event;  // null: not recorded, or all of the work is done
};

enum class MemoryKind : uint8_t {
  kDevice,   // buffers that kernels read and write
  kWeights,  // as kDevice, but apart from it, so that unloading returns all memory of a weight
  kStaging   // host memory for copies at full speed (pinned on CUDA)
};

// A place where weights live and kernels run. Thread-safe.
class Device {
 public:
  virtual ~Device() = default;

  virtual const DeviceInfo& info() const = 0;

  // Bytes of device memory that Allocate can still return: the smaller of free physical memory and
  // the rest of the budget.
  virtual int64_t FreeBytes() const = 0;
  // Caps the device memory that Allocate returns in total; 0 removes the cap.
  virtual void SetBudget(int64_t bytes) = 0;
  // Bytes of device memory currently handed out.
  virtual int64_t UsedBytes() const = 0;

  // The memory is at least 256-byte aligned and uninitialised. RESOURCE_EXHAUSTED names the bytes
  // that were requested and that are free.
  virtual absl::StatusOr<Buffer> Allocate(MemoryKind kind, int64_t bytes) = 0;

  virtual absl::StatusOr<std::unique_ptr<Stream>> CreateStream() = 0;
  // Creates a stream for copies alone, which run beside other work.
  virtual absl::StatusOr<std::unique_ptr<Stream>> CreateCopyStream() { return CreateStream(); }

  // Copies between this device's memory and host memory, in stream order. The copy is asynchronous
  // if the host memory is staging memory. On the CPU both are memcpy.
  virtual absl::Status CopyToDevice(void* device, const void* host, int64_t bytes,
                                    StreamView stream) = 0;
  virtual absl::Status CopyToHost(void* host, const void* device, int64_t bytes,
                                  StreamView stream) = 0;

  // Copies pieces in stream order. Each place is device memory or staging memory.
  virtual absl::Status CopyPieces(absl::Span<const CopyPiece> pieces, StreamView stream) = 0;

  // Maps memory of this device that another process exported, the whole allocation; the buffer's
  // end unmaps it. It stays valid when that process ends. `handle`: the bytes of a
  // cudaIpcMemHandle_t. UNIMPLEMENTED on a device that shares no memory so, INVALID_ARGUMENT for
  // what is no handle of it.
  virtual absl::StatusOr<Buffer> ImportMemory(absl::string_view /*handle*/) {
    return SharesNothing();
  }
  // Likewise by a descriptor of the driver's own memory (VMM), at least the first `bytes` of it, for
  // reading and writing, by the other GPUs of this process too where they reach this one.
  virtual absl::StatusOr<Buffer> ImportMemory(const UniqueFd& /*descriptor*/, int64_t /*bytes*/) {
    return SharesNothing();
  }
  // Likewise an event of another process; `handle`: the bytes of a cudaIpcEventHandle_t.
  virtual absl::StatusOr<std::unique_ptr<SharedEvent>> ImportEvent(absl::string_view /*handle*/) {
    return SharesNothing();
  }

  // An event of this device, whose other process is this one. UNIMPLEMENTED where work is done when
  // a call returns.
  virtual absl::StatusOr<std::unique_ptr<SharedEvent>> CreateEvent() { return SharesNothing(); }

  // True if the host can read and write device memory directly, as on the CPU, so that copies can
  // be skipped.
  virtual bool host_addressable() const = 0;

  // The device that the backend created: this one, or the one that it wraps.
  virtual Device& backend() { return *this; }

  // False after a sticky error: results of this device can no longer be trusted.
  virtual bool healthy() const = 0;

 private:
  absl::Status SharesNothing() const {
    return absl::UnimplementedError(info().id + ": shares no memory of GPUs with other processes");
  }
};

struct DeviceOptions {
  int cpu_threads = 0;       // 0: as many as the process may use
  int64_t budget_bytes = 0;  // cap on device memory; 0: none
  // Gives a token's result the same bits whatever its batch is: excludes the dense path, and
  // kernels whose sums depend on the number of tokens.
  bool batch_invariant = false;
  // Appended to the device's id: "#2" for a device that is opened a second time.
  std::string id_suffix;
  // Pins worker i of a CPU to the i-th core after the first one that the process may use. Callers
  // are not pinned.
  bool cpu_pin_threads = false;
  // Interleaves the pages of a CPU's large buffers over the memory nodes that the process may use,
  // so that all memory controllers are read at once. It has no effect where the system does not
  // allow it.
  bool cpu_interleave = false;
};

}  // namespace awqd
